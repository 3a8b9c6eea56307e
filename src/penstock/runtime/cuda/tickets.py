"""Values that the two directions of a CUDA mover share: tickets, targets, and their state."""

from __future__ import annotations

import errno as errnos
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.errors import NoSpaceError

if TYPE_CHECKING:
    import torch

    from penstock.io.engine import Transfer
    from penstock.runtime.cuda.lanes import Copy
    from penstock.runtime.cuda.link import CudaLink, Event, Stream
    from penstock.runtime.cuda.pinned import PinnedBlock, Slab
    from penstock.store.base import Ticket, Tier


@dataclass(slots=True, eq=False)
class CudaTicket:
    """A claim on the bytes of a device's storage. Guarded by the mover's lock; for reading only."""

    label: str
    nbytes: int
    device: torch.device
    tier: Tier
    written: Transfer
    """Settled when the source is no longer needed."""
    buffer: PinnedBlock | None = None
    """Pinned memory that the bytes are copied to, or in which they are: on the way to flash, or at rest
    in the host tier or because flash has failed."""
    on_flash: Ticket | None = None
    """The flash tier's own ticket, from the begin of the write."""
    source: torch.UntypedStorage | None = None
    """The storage, until GPU-direct I/O has ended."""
    digest: bytes | None = None
    """Digest that the device made of what GPU-direct I/O has written; None if nothing is compared."""
    cancelled: bool = False
    """True if a GPU-direct write was cancelled before it began."""
    discarded: bool = False


@dataclass(slots=True, eq=False)
class Fill:
    """How far a target is on its way. It has no reference to the memory, so a table may keep it."""

    stream: Stream
    """Stream on which the memory was allocated, or on which it was recomputed."""
    copy: Copy | None = None
    """The copy that fills it, from its issue until it has landed."""
    landed: bool = False
    made: Event | None = None
    """For what was recomputed on ``stream``, and not copied: reached when it is there."""

    def precede(self, link: CudaLink, stream: Stream) -> None:
        """Have ``stream`` wait, from now on, until the bytes are there."""
        copy = self.copy
        if copy is not None:
            link.wait(stream, copy.end)
        if self.made is not None and stream != self.stream:
            link.wait(stream, self.made)

    def settle(self, link: CudaLink) -> None:
        """Wait, in this thread, for the copy."""
        copy = self.copy
        if copy is not None:
            link.synchronize(copy.end)

    def is_others(self, stream: Stream) -> bool:
        """Return whether the memory may be of another stream, which the allocator must know."""
        return self.made is not None or stream != self.stream

    def used(self) -> None:
        """A stream comes after the copy, and the allocator knows of it: the copy need hold nothing."""
        copy = self.copy
        if copy is not None:
            copy.storage = None


@dataclass(slots=True, eq=False)
class CudaTarget:
    """Device memory on its way to becoming a restored storage."""

    storage: torch.UntypedStorage
    ready: Event
    """Reached when what used the memory before is done with it."""
    fill: Fill


def no_space(ticket: CudaTicket, slab: Slab | None, advice: str) -> NoSpaceError:
    """The error for a ticket that finds no room in ``slab``, or in its tier if that is ``None``."""
    return NoSpaceError(
        errno=errnos.ENOSPC,
        op="allocate",
        path=ticket.tier.spec.where if slab is None else "pinned host memory",
        offset_bytes=0,
        nbytes=ticket.nbytes,
        free_bytes=-1 if slab is None else slab.capacity_bytes - slab.used_bytes,
        advice=advice,
    )
