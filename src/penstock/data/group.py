"""Samples in memory, until their batches are copied, decoded or dropped.

[Note: lent memory]
    Samples are read into blocks of an arena. A batch that lies there in one piece need not be copied: it
    is *lent*, as a view of its block, which is free again when the group and all such views are dropped.
    While a user keeps batches, their blocks cannot be read into. So if these fill the arena, the loader
    goes on with another one (``renew``). The idle pages of the old one are freed at once, and the rest
    when the batches are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.units import round_down
from penstock.data.permutation import Numbers
from penstock.io.mapping import PAGE_BYTES, memory_at
from penstock.store.account import host_account
from penstock.store.arena import Arena
from penstock.store.pool import Block

ALIGNED_BYTES: Final = 64
"""Alignment of torch's own memory: with another, kernels may compute other bits."""
LEAST_LENT_BYTES: Final = 16 << 10
"""Less is copied in no more time, and would keep a group from being used again."""


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """Memory of some extents of a group."""

    offset: int
    """Offset in the arena."""
    array: NDArray[np.uint8]
    """The memory, which is free when this array and all views of it are dropped."""


class ReadMemory:
    """Memory that samples are read into. Used by one thread at a time; blocks are freed in any.

    Attributes:
        limit_bytes: Most bytes to be resident. If it is lowered, idle pages are freed by ``trim``.
        account: Account of what is resident, except for blocks that are only lent after ``renew`` or
            ``close``.
        arena: The memory.
        bytes: The same as an array, which does not keep it.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Reserve address space; nothing is resident yet."""
        self.limit_bytes = round_down(limit_bytes, PAGE_BYTES)
        self._begin(self.limit_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of groups and lent batches."""
        return self.arena.used_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that are resident."""
        return self.arena.touched_bytes

    def take(self, sizes: Numbers) -> tuple[Numbers, list[ReadBlock]] | None:
        """Find places for extents, in one block or, if none is long enough, in several.

        Args:
            sizes: Lengths of the extents, each of which lies in one piece.

        Returns:
            Offsets in the arena, and the blocks; None if they do not fit now. If nothing is in use, they
            never will, or the process's account refuses.
        """
        if not self.used_bytes and self.arena.capacity_bytes != self.limit_bytes:
            self.renew()
        total = int(sizes.sum())
        self.trim()
        if self.used_bytes + total > self.limit_bytes or self.limit_bytes < self.held_bytes:
            return None
        places = self._places(sizes)
        if places is None and not self.used_bytes and total < self.arena.capacity_bytes:
            self._end()
            self._begin(total)  # without a huge page that is used in part, the account may admit it
            places = self._places(sizes)
        return places

    def trim(self) -> None:
        """Free idle pages beyond the limit, which may have been lowered."""
        if self.held_bytes > self.limit_bytes:
            self.arena.trim(self.held_bytes - self.limit_bytes)

    def renew(self) -> None:
        """Go on with another arena. Nothing may be in flight, nor in use unless it is lent."""
        self._end()
        self._begin(self.limit_bytes)

    def close(self) -> None:
        """Free the memory, that of lent batches when they are dropped. Nothing may be in flight."""
        self._end()

    def _begin(self, capacity_bytes: int) -> None:
        self.account = host_account().child("data loader")
        self.arena = Arena(capacity_bytes, account=self.account, owner="reads")
        self.bytes = memory_at(self.arena.address, self.arena.capacity_bytes)

    def _end(self) -> None:
        self.arena.trim()
        self.arena.close()
        self.account.close()

    def _places(self, sizes: Numbers) -> tuple[Numbers, list[ReadBlock]] | None:
        ends = np.cumsum(sizes)
        offsets = ends - sizes
        blocks: list[Block] = []
        first = 0
        try:
            while first < len(sizes):
                count, start = len(sizes) - first, int(offsets[first])
                while (block := self._block(int(ends[first + count - 1]) - start)) is None:
                    if count == 1:
                        return None
                    count = -(-count // 2)
                blocks.append(block)
                offsets[first : first + count] += block.place - start
                first += count
            places = [ReadBlock(each.place, each.lend(0, each.nbytes)) for each in blocks]
            blocks.clear()
            return offsets, places
        finally:
            for each in blocks:
                each.free()  # at once: a lent block is freed only when the caller's lock is released

    def _block(self, nbytes: int) -> Block | None:
        return self.arena.allocate(nbytes, wait=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleGroup:
    """Samples in memory, until ``free``."""

    samples: Numbers
    offset: Numbers
    """``[samples, fields]``: offset in ``memory.bytes``."""
    nbytes: Numbers
    """``[samples, fields]``; -1: the sample lacks the field."""
    file: Numbers
    memory: ReadMemory
    blocks: list[ReadBlock]
    lends: bool
    """True if ``lend`` may be called: no byte is in two samples, and there is room for other groups."""
    bad: dict[int, Exception] = field(default_factory=dict)
    """Errors of samples that could not be read, by row."""

    def lend(self, offset: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Return the bytes of some rows as an array that outlives the group, or None if to be copied.

        The bytes are the caller's then: lend none of them twice. See [Note: lent memory].
        """
        if not self.lends or nbytes < LEAST_LENT_BYTES or offset % ALIGNED_BYTES:
            return None
        for block in self.blocks:
            start = offset - block.offset
            if start >= 0 and start + nbytes <= len(block.array):
                return block.array[start : start + nbytes]
        return None

    def free(self) -> None:
        """Free the memory, except for what is lent."""
        self.blocks.clear()
        self.memory.trim()
