"""The memory that samples are read into: taken at the head, given back at the tail.

Not thread-safe: its owner has a lock.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from penstock.core.units import round_down, round_up
from penstock.data.permutation import Numbers
from penstock.io.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping

Places = tuple[Numbers, "Taken"]


class Taken:
    """What one ``take`` has, until ``free``."""

    __slots__ = ("freed", "pieces")

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        """(start, stop) of one or two pieces."""
        self.pieces = pieces
        self.freed = False


class Ring:
    """A ring of bytes.

    Attributes:
        capacity_bytes: All there can be.
        limit_bytes: What is used of it: less, where less is needed.
        held_bytes: What is resident: the most that was used since the limit was last lowered.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Reserve address space; nothing is resident yet."""
        self.capacity_bytes = self.limit_bytes = round_down(capacity_bytes, PAGE_BYTES)
        self._mapping = Mapping(self.capacity_bytes)
        self.address = self._mapping.address
        self.bytes: NDArray[np.uint8] = self._mapping.array(0, self.capacity_bytes)
        self.held_bytes = 0
        self._taken: deque[Taken] = deque()
        self._head = 0

    def take(self, sizes: Numbers) -> Places | None:
        """Places for some extents, each in one piece; None: they do not fit now.

        Whoever waits frees something first; if everything is free and they still do not fit, they
        never will.
        """
        pieces = list[tuple[int, int]]()
        offsets = np.empty(len(sizes), np.int64)
        rest = 0
        for start, stop in self._free():
            ends = start + np.cumsum(sizes[rest:])
            count = int(np.searchsorted(ends, stop, side="right"))
            if count:
                offsets[rest : rest + count] = ends[:count] - sizes[rest : rest + count]
                pieces.append((start, int(ends[count - 1])))
                rest += count
            if rest == len(sizes):
                break
        else:
            return None
        taken = Taken(pieces)
        self._taken.append(taken)
        self._head = pieces[-1][1]
        self._touch(max(stop for _, stop in pieces))
        return offsets, taken

    def free(self, taken: Taken) -> None:
        """Give back what was taken; it can be used again when all before it is free, too."""
        taken.freed = True
        while self._taken and self._taken[0].freed:
            self._taken.popleft()
        if not self._taken:
            self._head = 0
        if self.limit_bytes < self.held_bytes:
            self._trim()

    @property
    def used_bytes(self) -> int:
        """What is taken."""
        return sum(stop - start for taken in self._taken for start, stop in taken.pieces)

    def close(self) -> None:
        """Unmap. Nothing may be under way, and nobody use ``bytes``."""
        self.bytes = np.zeros(0, np.uint8)
        self._mapping.unmap()

    def _free(self) -> list[tuple[int, int]]:
        """Free pieces in the order in which they are to be used."""
        if not self._taken:
            return [(0, self.limit_bytes)]
        tail, head = self._taken[0].pieces[0][0], self._head
        if head > tail:
            return [(head, max(head, self.limit_bytes)), (0, tail)]
        return [(head, tail)]

    def _touch(self, stop: int) -> None:
        limit = round_up(max(stop, self.limit_bytes), PAGE_BYTES)
        end = min(round_up(stop, HUGE_PAGE_BYTES), limit, self.capacity_bytes)
        if end > self.held_bytes:
            if not self._mapping.populate(self.held_bytes, end - self.held_bytes):
                self.bytes[self.held_bytes : end : PAGE_BYTES] = 0
            self.held_bytes = end

    def _trim(self) -> None:
        tops = [stop for taken in self._taken for _, stop in taken.pieces]
        end = round_up(max([self.limit_bytes, *tops]), PAGE_BYTES)
        if end < self.held_bytes and self._mapping.drop(end, self.held_bytes - end):
            self.held_bytes = end
