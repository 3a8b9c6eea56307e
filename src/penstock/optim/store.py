"""Records of an optimizer's tiles on flash: which one is the newest, how long it is, what it must be.

[Note: records]
    A record has one place, or two where steps are durable (:mod:`penstock.store.blob`). A record that
    was squeezed (:mod:`squeeze`) takes the beginning of its place. Its length is kept in memory, and its
    checksum in the tier's ticket; the journal has both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ChecksumError, TransferError
from penstock.io.engine import Engine, Priority, Transfer
from penstock.observe.clients import OPTIMIZER, ClientRecorder
from penstock.optim.config import StatesConfig
from penstock.optim.params import Tile
from penstock.optim.squeeze import extent
from penstock.store.base import Ticket, Tier
from penstock.store.blob import ReservedPlace, ReservedTier
from penstock.store.checksums import Sum

_REMEDY: Final = ", and load a state dict or continue from the last durable step"


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Newest record of a tile, as a journal names it."""

    slot: int
    checksum: Sum | None
    squeezed_bytes: int


@dataclass(frozen=True, slots=True)
class _Copy:
    """Contents of one place of a tile."""

    ticket: Ticket
    squeezed_bytes: int
    """Exact length if it is squeezed, else 0."""


class RecordStore:
    """Records of an optimizer's tiles. Transfers of one tile never overlap. Otherwise thread-safe.

    Attributes:
        tier: Moves the records; a wrapper may be put around it.
        filled: Numbers of the tiles that have a record, on flash or in memory; for the pipeline.
        written: Bytes written in all.
        read: Bytes read in all.
    """

    def __init__(self, config: StatesConfig, engine: Engine, names: Callable[[Tile], str]) -> None:
        """Check the directories; make no file yet.

        Args:
            config: Names the directories.
            engine: Moves the bytes.
            names: Returns what is in a tile, for errors.

        Raises:
            ConfigError: A directory is missing, named twice, not writable, or in memory.
        """
        self._files = ReservedTier(
            config.directories,
            engine=engine,
            recorder=ClientRecorder(config.directories[0]),
            name=OPTIMIZER,
            remedy=_REMEDY,
            allow_memory_filesystem=config.allow_memory_filesystem,
        )
        self.tier: Tier = self._files
        self.filled: set[int] = set()
        self.written = 0
        self.read = 0
        self._names = names
        self._slots = 2 if config.durable else 1
        self._is_durable = config.durable
        self._places: dict[tuple[int, int], ReservedPlace] = {}  # by tile and slot, as what follows
        self._copies: dict[tuple[int, int], _Copy] = {}
        self._newest: dict[int, int] = {}  # by tile: slot of its newest record
        self._committed: dict[int, int] = {}  # the same, of the records that a journal names
        # written before a sync that failed: a later one says nothing of them
        self._doubtful: set[tuple[int, int]] = set()
        self._since_sync: set[tuple[int, int]] = set()

    @property
    def files(self) -> ReservedTier:
        """Files and places of the records."""
        return self._files

    def add(self, tiles: Sequence[Tile]) -> None:
        """Reserve the places of some more tiles; nothing is kept if that fails.

        Raises:
            NoSpaceError: With what is needed, what is free, and what would fit.
            TransferError: A file cannot be made.
        """
        keys = [(tile, slot) for tile in tiles for slot in range(self._slots)]
        places = self._files.reserve(
            [tile.record_bytes for tile, _ in keys],
            file_name=f"penstock-states-{len(self._files.named)}.slab"
            if self._is_durable
            else None,
            advice=lambda needed, free: _advice(needed, free, tiles),
        )
        for (tile, slot), place in zip(keys, places, strict=True):
            self._places[tile.index, slot] = place

    def start_read(self, tile: Tile, address: int, keep_alive: object) -> Transfer:
        """Begin to read the newest record to its buffer.

        The transfer fails with ChecksumError if the bytes are not those that were written.
        """
        copy = self._copies[tile.index, self._slot(tile)]
        start, nbytes = extent(tile, copy.squeezed_bytes)
        self.read += nbytes
        return self.tier.read(
            copy.ticket, address + start, keep_alive=keep_alive, priority=Priority.PREFETCH
        )

    def start_write(
        self, tile: Tile, address: int, keep_alive: object, squeezed_bytes: int
    ) -> Transfer:
        """Begin to write a record, not over one that a journal names. It is the newest when that is done.

        Args:
            tile: The tile.
            address: Address of its buffer, which must not change until the transfer is done.
            keep_alive: Owner of the buffer.
            squeezed_bytes: Result of ``Squeezer.squeeze``.
        """
        slot = 0 if self._slots == 1 else 1 - self._committed.get(tile.index, 1)
        key = tile.index, slot
        start, nbytes = extent(tile, squeezed_bytes)
        ticket = self.tier.write(
            address + start,
            nbytes,
            keep_alive=keep_alive,
            label=self._label(tile),
            priority=Priority.PREFETCH,  # both ways, so that neither starves
            at=self._places[key],
            is_private=True,
        )
        self._replace(key, _Copy(ticket, squeezed_bytes))
        self.written += nbytes
        self._doubtful.discard(key)
        self._since_sync.add(key)

        def note(done: Transfer) -> None:
            if done.error is None:
                self._newest[tile.index] = slot

        ticket.written.add_done_callback(note)
        return ticket.written

    def damage(self, tile: Tile, facts: str) -> ChecksumError:
        """Return the error that a tile's newest record is not what was written."""
        return self.tier.damage(self._copies[tile.index, self._slot(tile)].ticket, facts)

    def squeezed_bytes(self, tile: Tile) -> int:
        """Return the exact length of the newest record if it is squeezed, else 0."""
        copy = self._copies.get((tile.index, self._slot(tile)))
        return 0 if copy is None else copy.squeezed_bytes

    def record_bytes(self, tile: Tile) -> int:
        """Return the bytes on flash of the newest record; its full length if there is none."""
        return extent(tile, self.squeezed_bytes(tile))[1]

    def sync(self) -> None:
        """Wait until all that was written is on the device.

        Raises:
            TransferError: The device did not take it.
        """
        try:
            self._files.sync()
        except TransferError:
            self._doubtful |= self._since_sync
            raise
        self._since_sync.clear()

    def close(self) -> None:
        """Close the files; those without a name are then gone."""
        self.tier.close()

    # -- what a journal names ---------------------------------------------------------------------

    def places(self) -> dict[int, RecordPlace]:
        """Return the newest record on flash of each tile that has one."""
        found = {}
        for index, slot in self._newest.items():
            copy = self._copies[index, slot]
            found[index] = RecordPlace(slot, copy.ticket.checksum, copy.squeezed_bytes)
        return found

    def commit(self) -> None:
        """Protect the newest records, which a journal names now, from the next writes."""
        self._committed = dict(self._newest)

    def protect(self, places: Mapping[int, RecordPlace]) -> None:
        """Protect records that a journal names from the next writes, though they are not read."""
        self._committed = {index: place.slot for index, place in places.items()}

    def restore(self, places: Mapping[int, RecordPlace], tiles: Sequence[Tile]) -> None:
        """Take these as the newest records, and as those that a journal names.

        Args:
            places: By number of a tile.
            tiles: All tiles.

        Raises:
            ChecksumError: A record cannot have that length.
        """
        for index, place in places.items():
            tile, squeezed = tiles[index], place.squeezed_bytes
            nbytes = extent(tile, squeezed)[1]
            if squeezed and not 0 < nbytes < tile.record_bytes:
                raise ChecksumError(
                    f"tile {index}: {squeezed} bytes cannot be the length of a record that takes"
                    f" {tile.record_bytes} when it is not squeezed; the journal is damaged"
                )
            key = index, place.slot
            ticket = self.tier.adopt(
                self._places[key], nbytes, label=self._label(tile), checksum=place.checksum
            )
            self._replace(key, _Copy(ticket, squeezed))
        self.protect(places)
        self._newest = dict(self._committed)
        self.filled = set(places)

    def is_doubtful(self, tile: Tile) -> bool:
        """Return whether the newest record may not be on the device, since a sync failed after it."""
        return (tile.index, self._slot(tile)) in self._doubtful

    def _slot(self, tile: Tile) -> int:
        return self._newest.get(tile.index, 0)

    def _replace(self, key: tuple[int, int], copy: _Copy) -> None:
        before = self._copies.get(key)
        self._copies[key] = copy
        if before is not None:
            self.tier.discard(before.ticket)

    def _label(self, tile: Tile) -> str:
        return f"tile {tile.index} ({self._names(tile)})"


def _advice(needed: int, free: int, tiles: Sequence[Tile]) -> str:
    elements = sum(tile.elements for tile in tiles)
    fit = int(elements * free / needed)
    each = needed / elements
    return (
        f"the states of {elements} parameters take {each:.2f} bytes each, and what is free would do for"
        f" {fit} parameters, or for {free / elements:.2f} bytes each: free some space, name more"
        " directories, or use a smaller format (exact 8 or 12, split 10.1, bf16 4 or 6, int8 2 or 4 bytes"
        " a parameter)"
    )
