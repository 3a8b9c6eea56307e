"""Address space that a step's slots need where blocks are never moved, fragmentation included.

Free bytes are useless if no gap is long enough. So a device must have memory up to the end of the highest
block, which may be more than the most bytes alive at once. Two placements are simulated over the
residences of a replayed step:

* *first fit*: the lowest gap that is long enough, gaps that touch being one;
* *two-ended* (the memory manager of FlashNeuron, FAST 2021): kept slots from one end of the space, all
  others from the other end, each first fit, so that short-lived blocks leave no holes between those that
  stay. The space needed is the largest sum of both ends.

Only slots are placed: fixed bytes lie outside, and transient ones come from a pool of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.core.units import round_up
from penstock.plan.replay.result import Residence

GRANULE_BYTES: Final = 512
"""Alignment and size granule of blocks, as in CUDA's allocators."""


@dataclass(frozen=True, slots=True)
class AddressUse:
    """Memory that one way of placing blocks needs."""

    peak_address: int
    """Bytes of address space needed."""
    peak_live_bytes: int
    """Largest number of bytes alive at once, each block in whole granules."""

    @property
    def fragmentation(self) -> float:
        """Peak address divided by peak live bytes; 1 means no fragmentation."""
        return self.peak_address / self.peak_live_bytes if self.peak_live_bytes else 1.0


class AddressSpace:
    """Unbounded address space: blocks are placed first fit, and adjacent free gaps are merged."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []  # (start, end), by address, below ``top``
        self.top = 0
        """End of the highest block; 0 if there is none."""

    def allocate(self, nbytes: int) -> int:
        """Place a block in the lowest gap that is long enough and return its address."""
        for place, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._gaps[place]
                else:
                    self._gaps[place] = (start + nbytes, end)
                return start
        self.top += nbytes
        return self.top - nbytes

    def free(self, address: int, nbytes: int) -> None:
        """Free a block that ``allocate`` placed."""
        start, end = address, address + nbytes
        place = bisect_left(self._gaps, (start, end))
        if place < len(self._gaps) and self._gaps[place][0] == end:
            end = self._gaps.pop(place)[1]
        if place and self._gaps[place - 1][1] == start:
            start = self._gaps.pop(place - 1)[0]
            place -= 1
        if end == self.top:
            self.top = start
        else:
            self._gaps.insert(place, (start, end))


def first_fit(residences: Iterable[Residence]) -> AddressUse:
    """Place all blocks from one end."""
    return _simulate(residences, two_ended=False)


def two_ended(residences: Iterable[Residence]) -> AddressUse:
    """Place kept slots from one end and all others from the other."""
    return _simulate(residences, two_ended=True)


def _simulate(residences: Iterable[Residence], *, two_ended: bool) -> AddressUse:
    ends = (AddressSpace(), AddressSpace())
    live = most_live = most_address = 0
    placed: dict[int, int] = {}
    for _, begins, index, one in _events(residences):
        space = ends[two_ended and not one.kept]
        nbytes = round_up(one.nbytes, GRANULE_BYTES)
        if begins:
            placed[index] = space.allocate(nbytes)
            live += nbytes
        else:
            space.free(placed.pop(index), nbytes)
            live -= nbytes
        most_live = max(most_live, live)
        most_address = max(most_address, ends[0].top + ends[1].top)
    return AddressUse(most_address, most_live)


def _events(residences: Iterable[Residence]) -> list[tuple[int, bool, int, Residence]]:
    """List (time, begins, index, residence) in order; of one time, ends come before begins."""
    found = []
    for index, one in enumerate(residences):
        if one.end_ns > one.start_ns:
            found.append((one.start_ns, True, index, one))
            found.append((one.end_ns, False, index, one))
    found.sort(key=lambda event: event[:3])
    return found
