"""Files of tiles' records: preallocated, overwritten in place, in one or several directories.

[Note: records]
    A record has one place, or two where steps are durable. With several directories it is cut into as
    many parts, equal but for 4 KiB, the first in the first directory and so on: every transfer uses
    all of them. In memory the parts are one piece. A record that was squeezed (:mod:`squeeze`) takes the
    beginning of its place; how long it is, is kept in memory. So is a checksum of each record, when it
    is written, to be compared when it is read; how much of the record it covers is the knob
    ``PENSTOCK_VERIFY``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core import knobs
from penstock.core.errors import (
    ChecksumError,
    TransferError,
    transfer_error,
)
from penstock.core.fs import check_directories, check_space, sync_directory
from penstock.core.units import round_up
from penstock.io.engine import Engine, Op, Priority, Request, Transfer
from penstock.io.files import DirectFile, open_path, open_unlinked
from penstock.io.traffic_report import reported
from penstock.observe.clients import OPTIMIZER
from penstock.optim.formats import RECORD_BYTES
from penstock.optim.layout import Tile
from penstock.optim.squeeze import extent
from penstock.store import checksums
from penstock.store.joint import submit_all

Sum = tuple[Literal["full", "off", "sampled"], int]
"""A checksum, and which kind it is: an earlier run may have used another."""


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Newest record of a tile, as a journal names it."""

    slot: int
    checksum: Sum | None
    squeezed_bytes: int


MakeFile = Callable[[str, int], DirectFile]
"""Opens a file for so many more records, in a directory, given the number of files there are."""


def named_file(directory: str, number: int) -> DirectFile:
    """A file for some records that outlives the process; what is in it already stays."""
    path = os.path.join(directory, f"penstock-states-{number}.slab")
    file = open_path(path, "r+" if os.path.exists(path) else "x+")
    try:
        # a journal that names it may be in another directory; one that is there may be so for a process
        # that was killed before it came to this
        sync_directory(directory)
    except OSError as error:
        file.close()
        raise transfer_error(
            errno=error.errno or errno.EIO, op="sync", path=path, offset_bytes=0, nbytes=0
        ) from error
    return file


class RecordStore:
    """Records of an optimizer's tiles. Transfers of one tile never overlap. Otherwise thread-safe.

    Attributes:
        directories: Absolute paths.
        filled: Numbers of the tiles that have a record, on flash or in memory; for the pipeline.
        written: Bytes written in all.
        read: Bytes read in all.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        engine: Engine,
        *,
        slots: int = 1,
        make_file: MakeFile | None = None,
        allow_memory_filesystem: bool = False,
    ) -> None:
        """Check the directories; make no file yet.

        Raises:
            ConfigError: A directory is missing, named twice, not writable, or in memory.
        """
        self.directories = check_directories(
            directories, "flash directory", allow_memory_filesystem=allow_memory_filesystem
        )
        self.engine = engine
        self.filled: set[int] = set()
        self.written = 0
        self.read = 0
        self._make_file = make_file or (lambda path, _: open_unlinked(path))
        self._files: list[list[DirectFile]] = []
        self._places: dict[int, tuple[int, int]] = {}  # tile: number of its files, offset there
        self._sums: dict[tuple[int, int], Sum] = {}
        self._squeezed: dict[tuple[int, int], int] = {}  # lengths of records that are
        self._kind = knobs.verify()
        self._slots = slots
        self._newest: dict[int, int] = {}  # by tile: slot of its newest record
        self._committed: dict[int, int] = {}  # the same, of the records that a journal names
        # written before a sync that failed: a later one says nothing of them
        self._doubtful: set[tuple[int, int]] = set()
        self._since_sync: set[tuple[int, int]] = set()

    def add(self, tiles: Sequence[Tile]) -> None:
        """Reserve the places of some more tiles; nothing is kept if that fails.

        Raises:
            NoSpaceError: With what is needed, what is free, and what would fit.
            TransferError: A file cannot be made.
        """
        offset, places = 0, {}
        for tile in tiles:
            places[tile.index] = (len(self._files), offset)
            offset += self._part_bytes(tile) * self._slots
        if not offset:
            return
        made: list[DirectFile] = []
        try:
            for path in self.directories:
                made.append(self._make_file(path, len(self._files)))  # noqa: PERF401  (closed below)
            self._check_space(offset, made, tiles)
            for file in made:
                if file.size_bytes < offset:
                    file.preallocate(offset)
        except BaseException:
            for file in made:
                file.close()
            raise
        self._files.append(made)
        self._places.update(places)

    def start_read(self, tile: Tile, address: int, keep_alive: object) -> Transfer:
        """Begin to read the newest record to its buffer; ``verify`` it when that is done."""
        self.read += self.record_bytes(tile)
        return self._move("read", tile, address, keep_alive, self._slot(tile))

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
        self._expect(tile, slot, None, squeezed_bytes)
        start, nbytes = self._extent(tile, slot)
        checksum = checksums.by_name(self._kind)
        if checksum is not None:
            self._sums[tile.index, slot] = self._kind, checksum(address + start, nbytes)
        self.written += nbytes
        self._doubtful.discard((tile.index, slot))
        self._since_sync.add((tile.index, slot))
        transfer = self._move("write", tile, address, keep_alive, slot)

        def note(done: Transfer) -> None:
            if done.error is None:
                self._newest[tile.index] = slot

        transfer.add_done_callback(note)
        return transfer

    def verify(self, tile: Tile, address: int, names: Callable[[], str]) -> None:
        """Compare the newest record, as it was read, with its checksum.

        Raises:
            ChecksumError: They differ; with the tile, the parameters in it (``names``), file, offset.
        """
        slot = self._slot(tile)
        known: Sum = self._sums.get((tile.index, slot), ("off", 0))
        kind, expected = known
        checksum = checksums.by_name(kind)
        if checksum is None or self._kind == "off":
            return
        start, nbytes = self._extent(tile, slot)
        found = checksum(address + start, nbytes)
        if found != expected:
            facts = f"have checksum {found:#018x}, written were {expected:#018x}"
            raise self.damage(tile, names, facts)

    def damage(self, tile: Tile, names: Callable[[], str], facts: str) -> ChecksumError:
        """Return the error that a tile's newest record is not what was written."""
        return ChecksumError(
            f"tile {tile.index} ({names()}): {self.record_bytes(tile)} bytes read from"
            f" {self._where(tile)} {facts}; the device or its memory is faulty: stop using it, and"
            " load a state dict or continue from the last durable step"
        )

    def squeezed_bytes(self, tile: Tile) -> int:
        """Return the exact length of the newest record if it is squeezed, else 0."""
        return self._squeezed.get((tile.index, self._slot(tile)), 0)

    def record_bytes(self, tile: Tile) -> int:
        """Return the bytes on flash of the newest record; its full length if there is none."""
        return self._extent(tile, self._slot(tile))[1]

    # -- what a journal names ---------------------------------------------------------------------

    def places(self) -> dict[int, RecordPlace]:
        """Return the newest record on flash of each tile that has one."""
        return {
            index: RecordPlace(
                slot, self._sums.get((index, slot)), self._squeezed.get((index, slot), 0)
            )
            for index, slot in self._newest.items()
        }

    def commit(self) -> None:
        """Protect the newest records, which a journal names now, from the next writes."""
        self._committed = dict(self._newest)

    def protect(self, places: Mapping[int, RecordPlace]) -> None:
        """Protect records that a journal names from the next writes, though nobody reads them."""
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
            self._expect(tiles[index], place.slot, place.checksum, place.squeezed_bytes)
        self.protect(places)
        self._newest = dict(self._committed)
        self.filled = set(places)

    def is_doubtful(self, tile: Tile) -> bool:
        """Return whether the newest record may not be on the device, since a sync failed after it."""
        return (tile.index, self._slot(tile)) in self._doubtful

    def _slot(self, tile: Tile) -> int:
        return self._newest.get(tile.index, 0)

    def _expect(self, tile: Tile, slot: int, checksum: Sum | None, squeezed_bytes: int) -> None:
        place = tile.index, slot
        if squeezed_bytes and not 0 < extent(tile, squeezed_bytes)[1] < tile.record_bytes:
            raise ChecksumError(
                f"tile {tile.index}: {squeezed_bytes} bytes cannot be the length of a record that takes"
                f" {tile.record_bytes} when it is not squeezed; the journal is damaged"
            )
        self._sums.pop(place, None)
        self._squeezed.pop(place, None)
        if checksum is not None:
            self._sums[place] = checksum
        if squeezed_bytes:
            self._squeezed[place] = squeezed_bytes

    def sync(self) -> None:
        """Wait until all that was written is on the device.

        Raises:
            TransferError: The device did not take it.
        """
        for file in (file for files in self._files for file in files):
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                self._doubtful |= self._since_sync
                raise TransferError(
                    errno=error.errno or errno.EIO,
                    op="sync",
                    path=file.path,
                    offset_bytes=0,
                    nbytes=file.size_bytes,
                ) from error
        self._since_sync.clear()

    def _where(self, tile: Tile) -> str:
        """Return files and offsets of the newest record, for error messages."""
        number, offset = self._places[tile.index]
        offset += self._slot(tile) * self._part_bytes(tile)
        return ", ".join(f"offset {offset} of {file.path!r}" for file in self._files[number])

    def close(self) -> None:
        """Close the files; those without a name are then gone."""
        for file in (file for files in self._files for file in files):
            file.close()

    def _extent(self, tile: Tile, slot: int) -> tuple[int, int]:
        return extent(tile, self._squeezed.get((tile.index, slot), 0))

    def _move(self, op: Op, tile: Tile, address: int, keep_alive: object, slot: int) -> Transfer:
        start, nbytes = self._extent(tile, slot)
        number, offset = self._places[tile.index]
        offset += slot * self._part_bytes(tile)
        part = self._share(nbytes)
        requests = []
        for index, file in enumerate(self._files[number]):
            skip = index * part
            if skip < nbytes:
                requests.append(
                    Request(
                        op=op,
                        file=file,
                        offset_bytes=offset,
                        address=address + start + skip,
                        nbytes=min(part, nbytes - skip),
                        keep_alive=keep_alive,
                        priority=Priority.PREFETCH,  # both ways: so that neither starves
                    )
                )
        return reported(
            submit_all(self.engine, requests), op, OPTIMIZER, self._files[number][0].path
        )

    def _part_bytes(self, tile: Tile) -> int:
        return self._share(tile.record_bytes)

    def _share(self, nbytes: int) -> int:
        """Return the most that each directory holds of ``nbytes``."""
        return round_up(-(-nbytes // len(self.directories)), RECORD_BYTES)

    def _check_space(
        self, each_bytes: int, files: Sequence[DirectFile], tiles: Sequence[Tile]
    ) -> None:
        there = [512 * os.fstat(file.fd).st_blocks for file in files]  # of durable ones, all may be
        missing = [max(0, each_bytes - nbytes) for nbytes in there]
        check_space(
            zip(self.directories, missing, strict=True),
            lambda needed, free: _advice(needed, free, tiles),
        )


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
