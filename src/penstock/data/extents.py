"""Ranges to read for some samples: aligned, and joined where they are near each other. Pure.

[Note: in order]
    Where nothing is joined, samples are read to places in the order in which they were asked for, and not
    in that of the file: if they fill whole blocks, a batch of them then is one piece of memory. So long
    samples in another order than the file's are joined only where they share a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.data.index import Index, Ranges
from penstock.data.permutation import Numbers
from penstock.io.files import MAX_GRANULE_BYTES

GRANULE: Final = MAX_GRANULE_BYTES
GAP_BYTES: Final = 16384
"""Reads that are no farther apart are joined: a read more costs as much time as so many bytes."""
LONG_BYTES: Final = 4 * GAP_BYTES
"""Of samples: reads of these are not worth joining, if that takes a copy."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadPlan:
    """Ranges to read for some samples."""

    samples: Numbers
    ranges: Ranges
    file: Numbers
    """Of each extent, as the next two."""
    begin: Numbers
    nbytes: Numbers
    extent: Numbers
    """``[samples, fields]``: the extent that has it."""
    apart: bool
    """True if no byte is part of two samples, nor a sample there twice."""

    @property
    def total_bytes(self) -> int:
        """Bytes that it takes of the read memory."""
        return int(self.nbytes.sum())

    def file_of(self, row: int) -> int:
        """The file of a sample, by its row."""
        return int(self.ranges.file[row])


def plan_of(index: Index, samples: Numbers) -> ReadPlan:
    """Which extents some samples need."""
    ranges = index.locate(samples)
    present = ranges.nbytes > 0
    rows, _ = np.nonzero(present)
    starts = ranges.offset[present]
    found = _coalesce(ranges.file[rows], starts, starts + ranges.nbytes[present])
    file, begin, nbytes, of, apart = found
    extent = np.full(present.shape, -1, np.int64)
    extent[present] = of
    return ReadPlan(
        samples=samples,
        ranges=ranges,
        file=file,
        begin=begin,
        nbytes=nbytes,
        extent=extent,
        apart=apart,
    )


def _coalesce(
    file: Numbers, start: Numbers, stop: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers, bool]:
    """Extents (file, begin, nbytes); for each range the extent that has it; and whether none overlap."""
    begin, end = start // GRANULE * GRANULE, -(-stop // GRANULE) * GRANULE
    if not len(file):
        return file, begin, end, file, True
    lift = _lift(file, int(end.max()))
    order = np.argsort(start + lift, kind="stable")
    low, high = (begin + lift)[order], (end + lift)[order]
    apart = bool(((stop + lift)[order][:-1] <= (start + lift)[order][1:]).all())
    reach = np.maximum.accumulate(high)
    sorted_already = bool((order[:-1] < order[1:]).all())
    long = (stop - start).mean() >= LONG_BYTES
    near = GAP_BYTES if sorted_already or not long else -1
    fresh = np.ones(len(order), bool)
    fresh[1:] = low[1:] > reach[:-1] + near
    if fresh.all():  # see [Note: in order]
        return file, begin, end - begin, np.arange(len(file)), apart
    of = np.empty(len(order), np.int64)
    of[order] = np.cumsum(fresh) - 1
    heads = order[fresh]
    last = np.append(np.flatnonzero(fresh)[1:] - 1, len(order) - 1)
    return file[heads], begin[heads], reach[last] - low[fresh], of, apart


def _lift(file: Numbers, longest: int) -> Numbers:
    """Return what to add to offsets, so that ranges of two files never meet."""
    _, rank = distinct(file)
    return rank * (longest + GAP_BYTES + 1)


def distinct(file: Numbers) -> tuple[Numbers, Numbers]:
    """Which files there are, and for each number its place among them; most often there is one."""
    if (file == file[0]).all():
        return file[:1], np.zeros_like(file)
    return np.unique(file, return_inverse=True)
