"""What of a job is on flash, and in which writes it went there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.core.units import MIB
from penstock.io.pages import Pages
from penstock.swap.state import Held
from penstock.tier.base import Ticket

STAGED_BYTES: Final = 256 * MIB
"""How much of a device's memory waits in host memory to be written, or has been read for it."""
BUFFER_BYTES: Final = 2 * MIB
BUFFERS: Final = 8
"""Small pages go and come through so many. See [Note: small pages]."""


@dataclass(slots=True, eq=False)
class SwappedStorage:
    """A storage on flash."""

    held: Held
    recalled: bool = False
    """Whether a checkpoint has it; else parcels have."""
    gone: bool = False
    """Whether its memory may have been given back."""
    ahead: bool = False
    """Whether its bytes are there again, closed still, and on flash as well."""
    back: bool = False
    """Whether it is there again, or still."""


class Part(NamedTuple):
    """Bytes of a storage in a parcel."""

    away: SwappedStorage
    pages: Pages | None
    """Where they belong; None: to the whole of a device's storage."""
    offset: int = 0
    """Where in the parcel they begin."""


class WriteBatch(NamedTuple):
    """What went in one write: pages as they lay, or many small ones that were gathered."""

    parts: tuple[Part, ...]
    ticket: Ticket


def packed(parts: Iterable[tuple[SwappedStorage, Pages]]) -> Iterator[tuple[Part, ...]]:
    """Cut them such that they fill buffers, one after the other; the last may not be full."""
    buffer, filled = list[Part](), 0
    for away, pages in parts:
        done = 0
        while done < pages.nbytes:
            length = min(pages.nbytes - done, BUFFER_BYTES - filled)
            buffer.append(Part(away, Pages(pages.address + done, length), filled))
            done, filled = done + length, filled + length
            if filled == BUFFER_BYTES:
                yield tuple(buffer)
                buffer, filled = [], 0
    if buffer:
        yield tuple(buffer)
