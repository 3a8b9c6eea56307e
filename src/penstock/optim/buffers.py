"""Buffers that records pass through, and what each of them holds."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from penstock.optim.layout import Tile


class BufferPhase(enum.Enum):
    """Contents of a buffer."""

    FREE = "nothing"
    READING = "a record on its way in"
    CLEAN = "a record as it is on flash"
    DIRTY = "a record newer than on flash, or never written"
    BUSY = "a record that a visitor works on"
    WRITING = "a record on its way out"


class RecordBuffer:
    """Memory for one record. The pipeline's lock guards it, except for a visitor's use of the memory.

    Attributes:
        memory: uint8; the record of ``tile`` is its beginning.
        address: Address of ``memory``.
        tile: Tile whose record it holds; None: none.
        phase: Contents.
        before: Phase that BUSY came after.
        is_fresh: True if the record was never filled, so that its contents mean nothing.
        is_early: True if it was read ahead, and not visited yet.
        is_done: True if it was visited in this pass.
        leaves: True if the buffer becomes free once its record is written.
        squeezed_bytes: Length of the squeezed record at the end of the buffer; 0: it is not squeezed.
        error: Why it could not be read.
    """

    __slots__ = (
        *("address", "memory", "tile", "phase", "before", "error"),
        *("is_done", "is_early", "is_fresh", "leaves", "squeezed_bytes"),
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
        self.is_fresh = self.is_early = self.leaves = False
        self.squeezed_bytes = 0
        self.error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        """True if it holds a record that no visitor changes now."""
        return self.phase in (BufferPhase.CLEAN, BufferPhase.DIRTY, BufferPhase.WRITING)

    @property
    def is_moving(self) -> bool:
        """True if its record is on its way in or out."""
        return self.phase in (BufferPhase.READING, BufferPhase.WRITING)

    @property
    def is_rotating(self) -> bool:
        """True if tiles pass through it now, so that it is not one that keeps its tile."""
        is_open = self.phase in (BufferPhase.FREE, BufferPhase.READING)
        return is_open or self.leaves or self.is_early
