"""All samples of a data set, once, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from penstock.data.build import Opened
from penstock.data.group import SampleGroup
from penstock.data.reader import Pending
from penstock.data.resources import LoaderResources
from penstock.store.window import TransferWindow

_AHEAD: Final = 4
"""Groups in flight."""
_GROUP_BYTES: Final = 8 << 20
MEMORY_BYTES: Final = 64 << 20


def scan(
    opened: Opened, *, memory_bytes: int = MEMORY_BYTES, verify: bool = True
) -> Iterator[SampleGroup]:
    """Yield groups of samples; each is freed when the next is asked for. ``bad`` lists damaged samples.

    Raises:
        BudgetError: A record does not fit.
        DatasetError: A file is missing.
    """
    resources = LoaderResources(opened, memory_bytes + opened.index.nbytes, verify=verify)
    reads = TransferWindow[Pending](release=Pending.free)
    starts = _starts(opened, resources.memory.limit_bytes // (2 * _AHEAD))
    following = next(starts, None)
    try:
        while following is not None or reads:
            while following is not None and len(reads) < _AHEAD:
                pending = resources.reader.start(resources.reader.plan(np.arange(*following)))
                if pending is None:
                    break
                reads.add(pending, pending.transfer)
                following = next(starts, None)
            group = reads.pop().wait("skip")
            try:
                yield group
            finally:
                group.free()
    finally:
        reads.cancel()
        resources.close()


def _starts(opened: Opened, room_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first sample, and the one after the last, of groups of some MiB."""
    index = opened.index
    wanted = min(_GROUP_BYTES, room_bytes)
    start = 0
    while start < index.samples:
        stop = min(index.samples, start + (1 << 14))
        lengths = np.maximum(index.locate(np.arange(start, stop)).nbytes, 0).sum(axis=1)
        count = int(np.searchsorted(np.cumsum(lengths), wanted, side="right"))
        stop = min(stop, start + max(1, count))
        yield start, stop
        start = stop
