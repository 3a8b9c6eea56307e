"""Tickets of encoded storages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from penstock.core.errors import ConfigError
from penstock.io.engine import Transfer
from penstock.runtime.storage import Encoding
from penstock.store.base import Ticket, Tier, Window


@dataclass(slots=True, eq=False)
class EncodedTicket:
    """A claim on the frames of a storage that a tier holds. Fields are for reading only."""

    label: str
    """Name of the storage in errors and traces."""
    nbytes: int
    """Length of the storage."""
    window: Window
    """Memory of the storage: ``CpuMover.allocate`` asks for its place in a cache line."""
    encoding: Encoding
    piece_bytes: int
    """How much of the storage is in each frame but the last; whole pages."""
    written: Transfer
    """Settled once all frames are written; or with the first error, when nothing of it moves any more."""
    device: torch.device
    """The storage's."""
    parts: list[Ticket] = field(default_factory=list)
    """The tier's own tickets, frame by frame; grows until it is written."""
    frame_bytes: int = 0
    """Length of the frames together; grows until it is written."""
    raw: set[int] = field(default_factory=set)
    """Pieces of a device's that went as they were, for want of memory to encode them in."""
    discarded: bool = False

    @property
    def source_bytes(self) -> int:
        """Length of what is encoded, to compare ``frame_bytes`` with."""
        return self.nbytes

    @property
    def pieces(self) -> int:
        """How many frames there are, or will be."""
        return -(-self.nbytes // self.piece_bytes)

    def range_of(self, index: int) -> tuple[int, int]:
        """Return a piece's offset in the storage, and its length."""
        start = index * self.piece_bytes
        return start, min(self.piece_bytes, self.nbytes - start)

    def check_readable(self, tier: Tier) -> None:
        """Raise ConfigError if it has not been written to ``tier``, or has been discarded."""
        if self.discarded or not self.written.done or self.written.error is not None:
            raise ConfigError(
                f"{self.label}: read from tier {tier.spec.name} although it is not, or no longer,"
                " written; wait for ticket.written, and discard a ticket last"
            )
