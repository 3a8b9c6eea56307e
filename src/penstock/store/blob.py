"""Bytes at places that are reserved in files, with or without a name, and overwritten in place for ever.

:class:`penstock.store.flash.FlashTier` finds places as they are needed; :class:`ReservedTier` has them in
advance. Each reservation is a new file in every directory, in which the places lie one behind the other.
What a place holds is cut into as many parts as there are directories, equal but for 4 KiB, the first in
the first directory and so on: every transfer uses all of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from weakref import WeakSet

from penstock.core.errors import TransferError, file_label, transfer_error
from penstock.core.fs import check_directories, check_space, sync_directory
from penstock.core.process import release_in_child
from penstock.core.units import round_up
from penstock.io.engine import Engine
from penstock.io.files import MAX_GRANULE_BYTES, DirectFile, open_path, open_unlinked
from penstock.observe.recorder import Recorder
from penstock.store.base import Tier, TierSpec

StrPath: TypeAlias = str | os.PathLike[str]

UNIT_BYTES: Final = MAX_GRANULE_BYTES
"""Offsets and lengths of parts are multiples of this, so that every file's alignment is kept."""


@dataclass(frozen=True, slots=True)
class ReservedPlace:
    """The same range of one file in each directory."""

    files: tuple[DirectFile, ...]
    offset_bytes: int

    def ranges(self, nbytes: int) -> Iterator[tuple[DirectFile, int, int]]:
        """Yield file, offset and length of each part of ``nbytes``, in the order of memory."""
        part = part_bytes(nbytes, len(self.files))
        for index, file in enumerate(self.files):
            if index * part < nbytes:
                yield file, self.offset_bytes, min(part, nbytes - index * part)

    def __str__(self) -> str:
        return ", ".join(
            f"offset {self.offset_bytes} of {file_label(file.path)}" for file in self.files
        )


class ReservedTier(Tier):
    """Bytes at places in files that belong to the caller, which writes with ``at=place``.

    A file without a name is closed, and its space free, when no place in it is referred to any more.

    Attributes:
        directories: Absolute paths.
        named: Named files of each reservation, one in each directory.
    """

    def __init__(
        self,
        directories: StrPath | Sequence[StrPath],
        *,
        engine: Engine,
        recorder: Recorder,
        name: str,
        remedy: str,
        allow_memory_filesystem: bool = False,
    ) -> None:
        """Check the directories; make no file yet.

        Args:
            directories: One directory, or several to spread every write over.
            engine: Moves the bytes. It is not closed with the tier.
            recorder: Gets counters and spans.
            name: Name in errors and traces.
            remedy: Advice in errors when bytes are lost.
            allow_memory_filesystem: Accept directories in memory.

        Raises:
            ConfigError: A directory is missing, named twice, not writable, or in memory.
        """
        self.directories = check_directories(
            directories, "flash directory", allow_memory_filesystem=allow_memory_filesystem
        )
        spec = TierSpec(
            name=name,
            kind="flash",
            capacity_bytes=0,
            granule_bytes=UNIT_BYTES,
            where=", ".join(self.directories),
            remedy=remedy,
        )
        super().__init__(spec, engine=engine, recorder=recorder)
        self.named: list[tuple[DirectFile, ...]] = []
        self._unnamed: WeakSet[DirectFile] = WeakSet()
        release_in_child(self, ReservedTier._close)

    def reserve(
        self,
        lengths: Sequence[int],
        *,
        file_name: str | None,
        advice: Callable[[int, int], str],
    ) -> list[ReservedPlace]:
        """Reserve places, one behind the other; nothing is kept if that fails.

        Args:
            lengths: Most bytes that each will hold.
            file_name: Name of the file in each directory, which outlives the process and whose contents
                stay if it exists. None: it has no name.
            advice: As of ``check_space``.

        Raises:
            NoSpaceError: With the bytes that are needed and free, and the advice.
            TransferError: A file cannot be made.
        """
        offsets, end = [], 0
        for nbytes in lengths:
            offsets.append(end)
            end += part_bytes(nbytes, len(self.directories))
        made: list[DirectFile] = []
        if end:
            try:
                for path in self.directories:
                    made.append(_open(path, file_name))  # noqa: PERF401  (closed below)
                self._check_space(end, made, advice)
                for file in made:
                    if file.size_bytes < end:
                        file.preallocate(end)
            except BaseException:
                for file in made:
                    file.close()
                raise
            if file_name is None:
                self._unnamed.update(made)
            else:
                self.named.append(tuple(made))
        return [ReservedPlace(tuple(made), offset) for offset in offsets]

    def sync(self) -> None:
        """Wait until all that was written to named files is on the device.

        Raises:
            TransferError: The device did not take it.
        """
        for file in (file for files in self.named for file in files):
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                raise TransferError(
                    errno=error.errno or errno.EIO,
                    op="sync",
                    path=file.path,
                    offset_bytes=0,
                    nbytes=file.size_bytes,
                ) from error

    def _allocate(self, nbytes: int) -> ReservedPlace:
        raise AssertionError(f"{nbytes} bytes were written to {self.spec.name} at no place")

    def _discard(self, place: ReservedPlace) -> None:
        return  # it stays reserved

    def _close(self) -> None:
        for file in (*(file for files in self.named for file in files), *self._unnamed):
            file.close()

    def _check_space(
        self, nbytes: int, files: Sequence[DirectFile], advice: Callable[[int, int], str]
    ) -> None:
        present = [512 * os.fstat(file.fd).st_blocks for file in files]  # of named ones, all may be
        missing = [max(0, nbytes - each) for each in present]
        check_space(zip(self.directories, missing, strict=True), advice)


def part_bytes(nbytes: int, directories: int) -> int:
    """Return the most that each of several directories holds of ``nbytes``."""
    return round_up(-(-nbytes // directories), UNIT_BYTES)


def _open(directory: str, name: str | None) -> DirectFile:
    if name is None:
        return open_unlinked(directory)
    path = os.path.join(directory, name)
    file = open_path(path, "r+" if os.path.exists(path) else "x+")
    try:
        # whatever refers to it may be in another directory; a process that made it may have been killed
        # before it came to this
        sync_directory(directory)
    except OSError as error:
        file.close()
        raise transfer_error(
            errno=error.errno or errno.EIO, op="sync", path=path, offset_bytes=0, nbytes=0
        ) from error
    return file
