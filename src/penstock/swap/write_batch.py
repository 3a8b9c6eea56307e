"""Storages of a job that are on flash, and the batches in which they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.core.units import MIB
from penstock.io.pages import PageRange
from penstock.store.base import Ticket
from penstock.swap.state import SuspendableStorage

STAGED_BYTES: Final = 256 * MIB
"""Maximum device memory that is staged in host memory at once, for writing or after reading."""
BUFFER_BYTES: Final = 2 * MIB
BUFFERS: Final = 8
"""Number of buffers for small pages; see [Note: small pages]."""


@dataclass(slots=True, eq=False)
class SwappedStorage:
    """A storage whose bytes are on flash."""

    held: SuspendableStorage
    recalled: bool = False
    """True if a checkpoint has it, and not write batches."""
    freed: bool = False
    """True if its memory may have been freed."""
    prefetched: bool = False
    """True if its bytes are prefetched: resident, not accessible, and still on flash."""
    restored: bool = False
    """True if it has been restored, or was never freed."""


class Part(NamedTuple):
    """Bytes of a storage in a write batch."""

    swapped: SwappedStorage
    pages: PageRange | None
    """Target pages; None for the whole of a device's storage."""
    offset: int = 0
    """Offset in the batch."""


class WriteBatch(NamedTuple):
    """Contents of one write: pages in place, or many small pages that were gathered."""

    parts: tuple[Part, ...]
    ticket: Ticket


def packed(parts: Iterable[tuple[SwappedStorage, PageRange]]) -> Iterator[tuple[Part, ...]]:
    """Cut pages so that the parts fill one buffer after the other; the last may not be full."""
    buffer, filled = list[Part](), 0
    for swapped, pages in parts:
        done = 0
        while done < pages.nbytes:
            length = min(pages.nbytes - done, BUFFER_BYTES - filled)
            buffer.append(Part(swapped, PageRange(pages.address + done, length), filled))
            done, filled = done + length, filled + length
            if filled == BUFFER_BYTES:
                yield tuple(buffer)
                buffer, filled = [], 0
    if buffer:
        yield tuple(buffer)
