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
from collections.abc import Callable, Sequence
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
    """The records of an optimizer's tiles. Reads and writes are one at a time for each tile.

    Attributes:
        directories: Absolute paths.
        slots: Places that each record has.
        written: What has been written in all, in bytes.
        read: What has been read in all, in bytes.
        doubtful: Number of a tile and its place, of records that were written before a sync that failed:
            a later one says nothing of them.
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
        self.slots = slots
        self.engine = engine
        self.written = 0
        self.read = 0
        self._make_file = make_file or (lambda path, _: open_unlinked(path))
        self._files: list[list[DirectFile]] = []
        self._places: dict[int, tuple[int, int]] = {}  # tile: number of its files, offset there
        self._sums: dict[tuple[int, int], Sum] = {}
        self._squeezed: dict[tuple[int, int], int] = {}  # lengths of records that are
        self._kind = knobs.verify()
        self.doubtful: set[tuple[int, int]] = set()
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
            offset += self._part_bytes(tile) * self.slots
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

    def start_read(self, tile: Tile, address: int, keep_alive: object, slot: int = 0) -> Transfer:
        """Begin to read a record to its buffer; ``verify`` it when that is done."""
        self.read += self.record_bytes(tile, slot)
        return self._move("read", tile, address, keep_alive, slot)

    def start_write(
        self,
        tile: Tile,
        address: int,
        keep_alive: object,
        slot: int = 0,
        *,
        squeezed_bytes: int = 0,
    ) -> Transfer:
        """Begin to write a record; the memory must not change until that is done.

        Args:
            tile: The tile.
            address: Of its buffer.
            keep_alive: Keeps the buffer's memory.
            slot: Which place.
            squeezed_bytes: What ``Squeezer.squeeze`` has returned.
        """
        self.expect(tile, slot, None, squeezed_bytes)
        start, nbytes = self._extent(tile, slot)
        checksum = checksums.by_name(self._kind)
        if checksum is not None:
            self._sums[tile.index, slot] = self._kind, checksum(address + start, nbytes)
        self.written += nbytes
        self.doubtful.discard((tile.index, slot))
        self._since_sync.add((tile.index, slot))
        return self._move("write", tile, address, keep_alive, slot)

    def verify(self, tile: Tile, address: int, slot: int, names: Callable[[], str]) -> None:
        """Compare what was read with what was written.

        Raises:
            ChecksumError: They differ; with the tile, the parameters in it (``names``), file, offset.
        """
        known: Sum = self._sums.get((tile.index, slot), ("off", 0))
        kind, expected = known
        checksum = checksums.by_name(kind)
        if checksum is None or self._kind == "off":
            return
        start, nbytes = self._extent(tile, slot)
        found = checksum(address + start, nbytes)
        if found != expected:
            facts = f"have checksum {found:#018x}, written were {expected:#018x}"
            raise self.damage(tile, slot, names, facts)

    def damage(self, tile: Tile, slot: int, names: Callable[[], str], facts: str) -> ChecksumError:
        """The error that a record is not what was written there."""
        return ChecksumError(
            f"tile {tile.index} ({names()}): {self.record_bytes(tile, slot)} bytes read from"
            f" {self.where(tile, slot)} {facts}; the device or its memory is faulty: stop using it, and"
            " load a state dict or continue from the last durable step"
        )

    def squeezed_bytes(self, tile: Tile, slot: int) -> int:
        """The exact length of what was last written there, if it was squeezed; otherwise 0."""
        return self._squeezed.get((tile.index, slot), 0)

    def record_bytes(self, tile: Tile, slot: int) -> int:
        """How long what was last written there is."""
        return self._extent(tile, slot)[1]

    def sum_of(self, tile: Tile, slot: int) -> Sum | None:
        """The checksum of what was last written there."""
        return self._sums.get((tile.index, slot))

    def expect(self, tile: Tile, slot: int, checksum: Sum | None, squeezed_bytes: int) -> None:
        """Say what a record is, as a journal has it.

        Args:
            tile: The tile.
            slot: Which place.
            checksum: None: it is not known.
            squeezed_bytes: Its exact length if it is squeezed, 0 if it is not.

        Raises:
            ChecksumError: It cannot have that length.
        """
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
                self.doubtful |= self._since_sync
                raise TransferError(
                    errno=error.errno or errno.EIO,
                    op="sync",
                    path=file.path,
                    offset_bytes=0,
                    nbytes=file.size_bytes,
                ) from error
        self._since_sync.clear()

    def where(self, tile: Tile, slot: int = 0) -> str:
        """For error messages: file and offset."""
        number, offset = self._places[tile.index]
        offset += slot * self._part_bytes(tile)
        return ", ".join(f"offset {offset} of {file.path!r}" for file in self._files[number])

    def close(self) -> None:
        """Close the files; those without a name are then gone."""
        for file in (file for files in self._files for file in files):
            file.close()

    def _extent(self, tile: Tile, slot: int) -> tuple[int, int]:
        return extent(tile, self.squeezed_bytes(tile, slot))

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
