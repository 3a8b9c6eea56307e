"""The memory that tiles pass through: buffers of one length, and which tile each of them holds.

Nothing here waits or moves a byte. The pipeline's lock guards all of it, but for a visitor's use of the
buffer that it was given.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import BudgetError
from penstock.core.units import format_bytes
from penstock.optim.layout import Tile
from penstock.store.arena import Arena


class BufferPhase(enum.Enum):
    """Contents of a buffer."""

    FREE = "nothing"
    READING = "a record on its way in"
    CLEAN = "a record as it is on flash"
    DIRTY = "a record newer than on flash, or never written"
    BUSY = "a record that a visitor works on"
    WRITING = "a record on its way out"


class RecordBuffer:
    """Memory for one record.

    Attributes:
        memory: uint8; the record of ``tile`` is its beginning.
        address: Where the record begins.
        tile: Whose record it is.
        phase: What is in it.
        before: The phase that BUSY came after.
        is_fresh: Whether the record was never filled, so that its contents mean nothing.
        is_early: Whether it was read ahead, and not visited yet.
        is_done: Whether it was visited in this pass.
        leaves: Whether it is free when it is written.
        squeezed_bytes: Length of the record at the end of its place, squeezed; 0: it is at the beginning.
        unseen: Whether it was read, and not yet compared with its checksum.
        error: Why it could not be read.
    """

    __slots__ = (
        *("address", "memory", "tile", "phase", "before", "error"),
        *("is_done", "is_early", "is_fresh", "leaves", "squeezed_bytes", "unseen"),
    )

    def __init__(self, address: int, memory: NDArray[np.uint8]) -> None:
        """Make an empty buffer."""
        self.address = address
        self.memory = memory
        self.before = BufferPhase.FREE
        self.is_done = False
        self.clear()

    def clear(self) -> None:
        """Mark the buffer as empty."""
        self.tile: Tile | None = None
        self.phase = BufferPhase.FREE
        self.is_fresh = self.is_early = self.leaves = self.unseen = False
        self.squeezed_bytes = 0
        self.error: BaseException | None = None

    @property
    def rests(self) -> bool:
        """Return whether it holds a record that nobody changes."""
        return self.phase in (BufferPhase.CLEAN, BufferPhase.DIRTY, BufferPhase.WRITING)

    @property
    def is_moving(self) -> bool:
        """Return whether its record is on its way in or out."""
        return self.phase in (BufferPhase.READING, BufferPhase.WRITING)


class BufferRing:
    """The buffers of a pipeline. Iterated over, it gives them all.

    Attributes:
        buffer_bytes: Length of a buffer.
    """

    def __init__(self, count: int, buffer_bytes: int) -> None:
        """Make buffers; memory becomes resident as it is first used. Raises as ``grow``."""
        self.buffer_bytes = buffer_bytes
        self._arenas: list[Arena] = []
        self._buffers: list[RecordBuffer] = []
        self._holding: dict[int, RecordBuffer] = {}
        self.grow(count)

    def __len__(self) -> int:
        """How many buffers there are."""
        return len(self._buffers)

    def __iter__(self) -> Iterator[RecordBuffer]:
        """All buffers, always in the same order."""
        return iter(self._buffers)

    def of(self, tile: Tile) -> RecordBuffer | None:
        """The buffer that holds a tile, or is about to."""
        return self._holding.get(tile.index)

    def first(self, phase: BufferPhase) -> RecordBuffer | None:
        """Some buffer in that phase."""
        return next((each for each in self._buffers if each.phase is phase), None)

    def give(self, buffer: RecordBuffer, tile: Tile) -> None:
        """A free buffer is a tile's from now on."""
        self._holding[tile.index] = buffer
        buffer.tile = tile
        buffer.is_done = buffer.leaves = buffer.unseen = False

    def free(self, buffer: RecordBuffer) -> None:
        """Forget what a buffer holds."""
        if buffer.tile is not None:
            self._holding.pop(buffer.tile.index, None)
        buffer.clear()

    def grow(self, count: int) -> None:
        """Make so many buffers more.

        Raises:
            BudgetError: There is no memory for them.
        """
        each = max(self.buffer_bytes, 4096)
        arena = Arena(count * each, owner="optimizer")
        self._arenas.append(arena)
        block = arena.allocate(count * each)  # one: no page is left over between two buffers
        if block is None:
            raise BudgetError(
                f"an optimizer's ring of {count} buffers of {format_bytes(self.buffer_bytes)}"
                " does not fit in memory; lower host_memory or the tile",
                slot="optimizer",
                limit_bytes=arena.capacity_bytes,
                least_bytes=count * self.buffer_bytes,
            )
        memory = block.lend(0, block.nbytes)
        for start in range(0, block.nbytes, each):
            self._buffers.append(RecordBuffer(block.address + start, memory[start : start + each]))

    def close(self) -> None:
        """Give the memory back; that of each buffer is free when nobody has an array of it."""
        self._buffers.clear()
        self._holding.clear()
        for arena in self._arenas:
            arena.close()
