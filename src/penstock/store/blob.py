"""Bytes in files, striped over one or several directories: transfers, and places that are reserved.

:class:`FileTier` moves bytes between memory and the ranges of files that make up a place: one transfer,
however many ranges. :class:`penstock.store.flash.FlashTier` finds places as they are needed, in files
without a name. :class:`ReservedTier` has places that are reserved in advance, in files with or without a
name, whose bytes are overwritten in place for ever. Each reservation is a new file in every directory, in
which the places lie one behind the other. What a place holds is cut into as many parts as there are
directories, equal but for 4 KiB, the first in the first directory and so on: every transfer uses all of
them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, TypeAlias

from penstock.core.errors import TransferError, transfer_error
from penstock.core.fs import check_directories, check_space, sync_directory
from penstock.core.locks import Lock
from penstock.core.process import release_in_child
from penstock.core.units import round_up
from penstock.io.engine import Engine, File, Op, Priority, Request, Transfer
from penstock.io.files import MAX_GRANULE_BYTES, DirectFile, open_path, open_unlinked
from penstock.observe.recorder import Recorder
from penstock.store.base import Tier, TierSpec
from penstock.store.checksums import Kind

StrPath: TypeAlias = str | os.PathLike[str]

UNIT_BYTES: Final = MAX_GRANULE_BYTES
"""Offsets and lengths of parts are multiples of this, so that every file's alignment is kept."""


# -- transfers ----------------------------------------------------------------------------------


class FilePlace(Protocol):
    """Place of bytes in files."""

    def ranges(self, nbytes: int) -> Iterator[tuple[File, int, int]]:
        """Yield file, offset and length of each part of ``nbytes``, in the order of memory."""


class FileTier(Tier):
    """Bytes in files; subclasses have the places.

    Attributes:
        engine: Moves the bytes. Transfers in flight end on the engine on which they began.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        engine: Engine,
        recorder: Recorder,
        verify: Kind | None = None,
    ) -> None:
        """See ``Tier``."""
        super().__init__(spec, recorder=recorder, verify=verify)
        self.engine = engine

    def _write(
        self, place: FilePlace, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        return self._move("write", place.ranges(nbytes), address, keep_alive, priority)

    def _read(
        self, place: FilePlace, address: int, nbytes: int, keep_alive: object, priority: Priority
    ) -> Transfer:
        return self._move("read", place.ranges(nbytes), address, keep_alive, priority)

    def _move(
        self,
        op: Op,
        ranges: Iterable[tuple[File, int, int]],
        address: int,
        keep_alive: object,
        priority: Priority,
    ) -> Transfer:
        requests = []
        for file, offset_bytes, nbytes in ranges:
            requests.append(
                Request(
                    op=op,
                    file=file,
                    offset_bytes=offset_bytes,
                    address=address,
                    nbytes=nbytes,
                    keep_alive=keep_alive,
                    priority=priority,
                )
            )
            address += nbytes
        return submit_all(self.engine, requests)


def submit_all(engine: Engine, requests: Sequence[Request]) -> Transfer:
    """Begin all of ``requests``; returns at once.

    The transfer settles once, after every request has, with the first error that is not a
    cancellation if there was any. It can be cancelled while every request can still be withdrawn.

    Raises:
        PenstockError: The engine refused the first request; nothing was begun. (What is refused
            later fails the transfer instead, since then there is something in flight.)
    """
    if len(requests) == 1:
        return engine.submit(requests[0])
    return _Joint(engine, requests).transfer


class _Joint:
    """The state behind the transfer: it lives as long as requests are in flight."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._lock = Lock()
        self._requests: list[Request | None] = list(requests)  # None: over
        self._parts: list[Transfer | None] = [None] * len(requests)
        self._left = len(requests)
        self._error: BaseException | None = None
        self._withdrawing = False
        self._withdrawn: list[int] = []
        self.transfer = Transfer(
            sum(request.nbytes for request in requests),
            cancel=self._cancel,
            promote=self._promote,
        )
        for index, request in enumerate(requests):
            self._submit(index, request, must_begin=index == 0)

    def _submit(self, index: int, request: Request, *, must_begin: bool = False) -> None:
        try:
            part = self._engine.submit(request)
        except Exception as error:
            if must_begin:
                raise
            self._over(index, error)
            return
        with self._lock:
            self._parts[index] = part
        part.add_done_callback(partial(self._part_done, index))

    def _part_done(self, index: int, part: Transfer) -> None:
        with self._lock:
            if self._withdrawing and isinstance(part.error, CancelledError):
                self._withdrawn.append(index)
                return
        self._over(index, part.error)

    def _over(self, index: int, error: BaseException | None) -> None:
        with self._lock:
            self._requests[index] = self._parts[index] = None
            if self._error is None or (error and isinstance(self._error, CancelledError)):
                self._error = error
            self._left -= 1
            last = self._left == 0
        if last:
            self.transfer.settle(self._error)

    def _cancel(self, transfer: Transfer) -> bool:
        """Withdraw all parts, or none: what turns out to have company in flight is begun again."""
        with self._lock:
            if self._withdrawing or self._left < len(self._parts):
                return False
            self._withdrawing = True
            parts = list(self._parts)
        for part in parts:  # the one that will begin first comes first, so failing is cheap
            if part is None or not part.cancel():
                break
        with self._lock:
            withdrawn, self._withdrawn = self._withdrawn, []
            if len(withdrawn) == len(parts):
                self._requests.clear()
                return True
            self._withdrawing = False
            again = [(index, self._requests[index]) for index in withdrawn]
        for index, request in again:
            assert request is not None, "a withdrawn request was dropped"
            self._submit(index, request)
        return False

    def _promote(self, transfer: Transfer, priority: Priority) -> None:
        with self._lock:
            parts = list(self._parts)
            for index, request in enumerate(self._requests):  # for those that are begun again
                if request is not None and priority < request.priority:
                    self._requests[index] = replace(request, priority=priority)
        for part in parts:
            if part is not None:
                part.promote(priority)


# -- reserved places ----------------------------------------------------------------------------


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
        return ", ".join(f"offset {self.offset_bytes} of {file.path!r}" for file in self.files)


class ReservedTier(FileTier):
    """Bytes at places in files that belong to the caller, which writes with ``at=place``.

    Attributes:
        directories: Absolute paths.
        files: Files of each reservation, one in each directory.
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
        self.files: list[tuple[DirectFile, ...]] = []
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
                stay if it exists. None: it has no name, and its space is free when it is closed.
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
            self.files.append(tuple(made))
        return [ReservedPlace(tuple(made), offset) for offset in offsets]

    def sync(self) -> None:
        """Wait until all that was written is on the device.

        Raises:
            TransferError: The device did not take it.
        """
        for file in (file for files in self.files for file in files):
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
        for file in (file for files in self.files for file in files):
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
