"""The memory that samples are read into: taken at the head, given back at the tail.

Not thread-safe: its owner has a lock.

[Note: lent memory]
    What is taken may be lent as arrays: a batch that lies there in one piece need not be copied. Its
    memory is in the ring again when the last array that refers to it has died. Whoever keeps batches
    stops the tail; then the ring has other memory (``renew``), and what is lent is its holders', as any
    batch is that was handed over: the rest of the old memory is given back to the system.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.process import fork_guard
from penstock.core.units import round_down, round_up
from penstock.data.permutation import Numbers
from penstock.io.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, Mapping
from penstock.store.account import host_account
from penstock.store.pool import free_idle

RING: Final = "ring"
"""Owner, in the account of a loader, of the memory that samples are read into."""
Places = tuple[Numbers, "Taken"]
Span = tuple[int, int]
"""Begin and end."""


class Taken:
    """Memory of one ``take``, held until ``free`` and until everything lent of it is gone."""

    __slots__ = ("holds", "mapping", "pieces")

    def __init__(self, pieces: list[Span], mapping: Mapping) -> None:
        """One or two pieces of this memory, which lives as long as this does."""
        self.pieces = pieces
        self.mapping = mapping
        self.holds = 1


class ByteRing:
    """A ring of bytes.

    Attributes:
        capacity_bytes: All there can be.
        limit_bytes: What is used of it: less, where less is needed.
        held_bytes: What is resident: the most that was used since the limit was last lowered.
        given_back: How often something was; who found no room looks again when it is more.
        guard: The process whose memory it is.
        account: Account that its resident bytes are charged to, but those that are only lent after
            ``renew`` and ``close``.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Reserve address space; nothing is resident yet."""
        self.account = host_account().child("data loader")
        self.capacity_bytes = self.limit_bytes = round_down(capacity_bytes, PAGE_BYTES)
        self.guard = fork_guard()
        self.given_back = 0
        self._closed = False
        self._begin()

    def take(self, sizes: Numbers) -> Places | None:
        """Places for some extents, each in one piece; None: they do not fit now.

        Whoever waits frees something first; if everything is free and they still do not fit, they
        never will; or the account refuses.
        """
        pieces = list[Span]()
        offsets = np.empty(len(sizes), np.int64)
        if not len(sizes):  # samples without bytes: there is nothing to wait for, nor to give back
            return offsets, Taken(pieces, self._mapping)
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
        if not self._touch(max(stop for _, stop in pieces)):
            return None
        taken = Taken(pieces, self._mapping)
        self._taken.append(taken)
        self._head = pieces[-1][1]
        return offsets, taken

    def free(self, taken: Taken) -> None:
        """Give back what was taken; it can be used again when all before it is free, too."""
        taken.holds -= 1
        self.given_back += 1
        if not self._has(taken):
            return
        while self._taken and not self._taken[0].holds:
            self._taken.popleft()
        if not self._taken:
            self._head = 0
        if self.limit_bytes < self.held_bytes:
            self._trim()

    def lend(self, taken: Taken, span: Span) -> NDArray[np.uint8]:
        """An array of what is taken; ``give_back`` is for when it has died. See [Note: lent memory]."""
        taken.holds += 1
        self._lent.add(span)
        return taken.mapping.array(span[0], span[1] - span[0])

    def give_back(self, taken: Taken, span: Span) -> None:
        """An array that was lent has died."""
        if self._has(taken):
            self._lent.discard(span)
        else:
            _drop(taken.mapping, *span)
        self.free(taken)

    def renew(self) -> None:
        """Have other memory. Nothing may be under way, nor anything taken but what is lent."""
        self._give_up()
        self._begin()

    @property
    def used_bytes(self) -> int:
        """Bytes taken."""
        return sum(stop - start for taken in self._taken for start, stop in taken.pieces)

    def close(self) -> None:
        """Unmap, now or when the last array dies. Nothing may be under way, and nobody use ``bytes``."""
        if not self._closed:
            self._closed = True
            self._give_up()

    def _has(self, taken: Taken) -> bool:
        return taken.mapping is self._mapping and not self._closed

    def _begin(self) -> None:
        self._mapping = Mapping(self.capacity_bytes)
        self.address = self._mapping.address
        self.bytes: NDArray[np.uint8] = self._mapping.array(0, self.capacity_bytes)
        self.held_bytes = 0
        self._taken = deque[Taken]()
        self._lent = set[Span]()
        self._head = 0

    def _give_up(self) -> None:
        self.bytes = np.zeros(0, np.uint8)
        self.account.free(self.held_bytes, RING)
        if not self._lent:
            self._mapping.unmap()
            return
        free = 0
        for start, stop in sorted(self._lent):
            _drop(self._mapping, free, start)
            free = stop
        _drop(self._mapping, free, self.held_bytes)

    def _free(self) -> list[Span]:
        """Free pieces in the order in which they are to be used."""
        if not self._taken:
            return [(0, self.limit_bytes)]
        tail, head = self._taken[0].pieces[0][0], self._head
        if head > tail:
            return [(head, max(head, self.limit_bytes)), (0, tail)]
        return [(head, tail)]

    def _touch(self, stop: int) -> bool:
        """Make it resident up to there; return False if the account refuses."""
        limit = round_up(max(stop, self.limit_bytes), PAGE_BYTES)
        end = min(round_up(stop, HUGE_PAGE_BYTES), limit, self.capacity_bytes)
        if end > self.held_bytes and not self._charge(end - self.held_bytes):
            end = round_up(stop, PAGE_BYTES)
            if end > self.held_bytes and not self._charge(end - self.held_bytes):
                return False
        if end > self.held_bytes:
            if not self._mapping.populate(self.held_bytes, end - self.held_bytes):
                self.bytes[self.held_bytes : end : PAGE_BYTES] = 0
            self.held_bytes = end
        return True

    def _charge(self, nbytes: int) -> bool:
        if self.account.try_take(nbytes, RING):
            return True
        return bool(free_idle(self.account, nbytes)) and self.account.try_take(nbytes, RING)

    def _trim(self) -> None:
        tops = [stop for taken in self._taken for _, stop in taken.pieces]
        end = round_up(max([self.limit_bytes, *tops]), PAGE_BYTES)
        if end < self.held_bytes and self._mapping.free(end, self.held_bytes - end):
            self.account.free(self.held_bytes - end, RING)
            self.held_bytes = end


def _drop(mapping: Mapping, start: int, stop: int) -> None:
    """Give the system what lies in whole pages."""
    start, stop = round_up(start, PAGE_BYTES), round_down(stop, PAGE_BYTES)
    if start < stop:
        mapping.free(start, stop - start)
