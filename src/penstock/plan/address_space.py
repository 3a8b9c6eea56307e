"""The addresses that a step's slots would need, where blocks stay where they were placed.

Bytes that are free may be of no use if no gap of them is long enough. So what a device must have is not
the most bytes alive at once, but the end of the highest block. Two placements are simulated over the
residences of a replayed step:

* *first fit*: the lowest gap that is long enough, gaps that touch being one;
* *two-ended* (the memory manager of FlashNeuron, FAST 2021): what is kept from one end of the space, what
  comes and goes from the other, each first fit, so that what is short-lived leaves no holes between what
  stays. The space needed is what both ends take together, at the worst moment.

Only slots are placed: what is fixed lies outside, and what is transient comes from a pool of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.core.units import round_up
from penstock.plan.replay.result import Residence

GRANULE_BYTES: Final = 512
"""Blocks begin at, and take, multiples of this, as those of CUDA's allocators do."""


@dataclass(frozen=True, slots=True)
class AddressUse:
    """What one way of placing blocks needs."""

    peak_address: int
    """Bytes of address space that are enough."""
    peak_live_bytes: int
    """The most bytes alive at once, each block in whole granules."""

    @property
    def fragmentation(self) -> float:
        """Address space per byte alive, at the worst of each; 1 is none."""
        return self.peak_address / self.peak_live_bytes if self.peak_live_bytes else 1.0


class Space:
    """An address space without end: blocks are placed first fit, and freed gaps that touch are one."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []  # (start, end), by address, below ``top``
        self.top = 0
        """Where the highest block ends; 0 if there is none."""

    def allocate(self, nbytes: int) -> int:
        """Place a block in the lowest gap that is long enough; its address."""
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
    """All blocks from one end."""
    return _simulate(residences, two_ended=False)


def two_ended(residences: Iterable[Residence]) -> AddressUse:
    """What is kept from one end, what comes and goes from the other."""
    return _simulate(residences, two_ended=True)


def _simulate(residences: Iterable[Residence], *, two_ended: bool) -> AddressUse:
    ends = (Space(), Space())
    live = most_live = most_address = 0
    placed: dict[int, int] = {}
    for _, comes, index, one in _events(residences):
        space = ends[two_ended and not one.kept]
        nbytes = round_up(one.nbytes, GRANULE_BYTES)
        if comes:
            placed[index] = space.allocate(nbytes)
            live += nbytes
        else:
            space.free(placed.pop(index), nbytes)
            live -= nbytes
        most_live = max(most_live, live)
        most_address = max(most_address, ends[0].top + ends[1].top)
    return AddressUse(most_address, most_live)


def _events(residences: Iterable[Residence]) -> list[tuple[int, bool, int, Residence]]:
    """(when, whether it comes, which, the residence) in order; who leaves goes before who comes."""
    found = []
    for index, one in enumerate(residences):
        if one.end_ns > one.start_ns:
            found.append((one.start_ns, True, index, one))
            found.append((one.end_ns, False, index, one))
    found.sort(key=lambda event: event[:3])
    return found
