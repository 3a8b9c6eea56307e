"""Reading of checkpoints, which are not trusted: each block is checked before it is used."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from penstock.checkpoint.disk import Directory, Disk
from penstock.checkpoint.frames import Decoding
from penstock.checkpoint.manifest import FILE_NAME, MAX_BYTES, Manifest
from penstock.checkpoint.regions import Region, TargetRegion
from penstock.checkpoint.streams import Buffers, TargetRegions, digest, empty
from penstock.checkpoint.values import FormError
from penstock.core.errors import (
    CheckpointError,
    CodecError,
    DamagedError,
    TransferError,
    transfer_error,
)
from penstock.core.files import open_regular
from penstock.io.engine import Engine, Priority, Transfer
from penstock.io.files import DirectFile, open_at
from penstock.store.pool import Block
from penstock.store.window import TransferWindow


class _BlockRead(NamedTuple):
    """A block on its way to memory."""

    file: int
    offset: int
    nbytes: int
    memory: Block


class OpenCheckpoint:
    """A checkpoint open for reading.

    Attributes:
        path: Path of its directory.
        manifest: Its manifest; each file exists and has the length in it.
        directory: Its directory, open.
    """

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        """Read the manifest, and check that the files exist.

        Raises:
            CheckpointError: There is no checkpoint.
            DamagedError: It is torn or damaged; names the file.
            TransferError: It cannot be read.
        """
        self.path = path
        self.directory = _open(path, Disk() if disk is None else disk)
        self._files: dict[int, DirectFile] = {}
        try:
            self.manifest = _manifest(self.directory)
            for index in range(len(self.manifest.files)):
                self._check(index)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close everything. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self.directory.close()

    def file(self, index: int) -> DirectFile:
        """Return a data file, open. Raises DamagedError, or TransferError."""
        found = self._files.get(index)
        if found is None:
            name = self.manifest.files[index].name
            path = self.directory.join(name)
            try:
                found = open_at(self.directory.fd, name, "r", path=path)
            except TransferError as error:
                _say_if_lost(error, path)
                raise
            self._files[index] = found
        return found

    def close_file(self, index: int) -> None:
        """Close a data file if it is open."""
        file = self._files.pop(index, None)
        if file is not None:
            file.close()

    def read(
        self,
        targets: Mapping[int, TargetRegions],
        *,
        engine: Engine | None = None,
        everything: bool = False,
        keep_open: bool = False,
    ) -> None:
        """Fill some regions. A block reaches them only after its checksum was found right.

        Args:
            targets: Regions to fill, by file.
            engine: Moves blocks; the engine of this process if None.
            everything: Check also the blocks of these files that no region lies in.
            keep_open: Leave files open that were read, to be read again once they are removed.

        Raises:
            DamagedError: A block is not what was written, or the device has lost it; says which. Blocks
                before it have been handed over.
            TransferError: The device refuses.
        """
        size = self.manifest.block_bytes
        starts = {index: [start for start, _ in each] for index, each in targets.items()}
        places = (
            (index, number * size)
            for index in sorted(targets)
            for number in (
                range(len(self.manifest.files[index].sums))
                if everything
                else _touched(targets[index], size)
            )
        )

        def complete(block: _BlockRead) -> None:
            index, offset, nbytes, memory = block
            if not keep_open:
                self._close_before(index)  # blocks come in order: nothing of those is on its way
            address = memory.address
            if not self.manifest.files[index].has(offset // size, digest(address, nbytes)):
                raise self._damaged(block, _OTHERS.format("their checksum differs"), targets)
            try:
                empty(targets[index], starts[index], offset, offset + nbytes, address)
            except CodecError as error:
                raise self._damaged(block, _OTHERS.format(error), targets) from error

        def fail(block: _BlockRead, error: Exception) -> None:
            if isinstance(error, TransferError) and error.errno in _LOST:
                raise self._damaged(block, _unreadable(error), targets) from error
            raise error

        with (
            Buffers(size, engine) as buffers,
            TransferWindow(
                complete=complete, fail=fail, release=lambda block: buffers.give(block.memory)
            ) as window,
        ):
            for index, offset in places:
                memory = buffers.take(window)
                nbytes = min(size, self.manifest.files[index].nbytes - offset)
                block = _BlockRead(index, offset, nbytes, memory)
                window.begin(block, partial(self._begin, buffers, block))

    def verify(self, *, engine: Engine | None = None) -> list[DamagedError]:
        """Read everything and decode encoded tensors; return the first damage of each file.

        Raises TransferError.
        """
        found = []
        encoded: dict[int, list[tuple[int, TargetRegion]]] = {}
        for each in self.manifest.tensors:
            if each.codec and each.nbytes:
                frames = each.offset_bytes, Decoding(each, None)
                encoded.setdefault(each.file, []).append(frames)
        for index in range(len(self.manifest.files)):
            regions = sorted(encoded.get(index, ()), key=lambda each: each[0])
            try:
                self.read({index: regions}, engine=engine, everything=True)
            except DamagedError as error:
                found.append(error)
            self.close_file(index)
        return found

    def _begin(self, buffers: Buffers, block: _BlockRead, priority: Priority) -> Transfer:
        index, offset, nbytes, memory = block
        return buffers.move("read", self.file(index), offset, nbytes, memory, priority=priority)

    def _close_before(self, index: int) -> None:
        """Close earlier files: of thousands, not all can be open."""
        for each in [each for each in self._files if each < index]:
            self.close_file(each)

    def _check(self, index: int) -> None:
        entry = self.manifest.files[index]
        path = self.directory.join(entry.name)
        try:
            facts = os.stat(entry.name, dir_fd=self.directory.fd, follow_symlinks=False)
        except OSError as error:
            raise DamagedError(
                f"{path!r} is missing: {error.strerror}; {_ADVICE}", path=path
            ) from None
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError(f"{path!r} is no regular file; {_ADVICE}", path=path)
        if facts.st_size != entry.nbytes:
            raise DamagedError(
                f"{path!r} is {facts.st_size} bytes long and was written with {entry.nbytes}; {_ADVICE}",
                path=path,
            )

    def _damaged(
        self, block: _BlockRead, why: str, targets: Mapping[int, TargetRegions]
    ) -> DamagedError:
        index, offset, nbytes, _ = block
        path = self.directory.join(self.manifest.files[index].name)
        owners = [each for each in self.manifest.tensors if each.owner < 0 and each.nbytes]
        names = [
            each.name
            for each in owners
            if each.file == index
            and each.offset_bytes < offset + nbytes
            and offset < each.offset_bytes + each.file_bytes
        ]
        filled = {(key, start) for key, regions in targets.items() for start, _ in regions}
        return DamagedError(
            f"{path!r}: the {nbytes} bytes at offset {offset} ({some(names) or 'the header'}) {why};"
            f" {_ADVICE}",
            path=path,
            overwritten=[
                each.name
                for each in owners
                if (each.file, each.offset_bytes) in filled
                and (each.file, each.offset_bytes) < (index, offset)
            ],
        )


def some(names: Sequence[str]) -> str:
    """Return the first names of many."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


_ADVICE: Final = "the checkpoint is torn or damaged: load another, and look at the device"
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO})
"""No such file, a link, or no regular one."""
_OTHERS: Final = "are not what was written there: {}"
_LOST: Final = frozenset(
    {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG}
)
"""Error numbers for bytes that a device or its file system cannot return, or not unchanged."""


def _unreadable(error: OSError) -> str:
    return f"cannot be read ({os.strerror(error.errno or errno.EIO)})"


def _say_if_lost(error: OSError, path: str) -> None:
    """Raise DamagedError if the device has lost a part of the checkpoint."""
    if error.errno in _LOST:
        raise DamagedError(f"{path!r} {_unreadable(error)}; {_ADVICE}", path=path) from error


def _open(path: str, disk: Disk) -> Directory:
    if not os.path.isdir(path):
        raise CheckpointError(
            f"there is no checkpoint at {path!r}: it is {'a file' if os.path.exists(path) else 'missing'}"
        )
    try:
        return disk.open(path)
    except TransferError as error:
        _say_if_lost(error, path)
        raise


def _manifest(directory: Directory) -> Manifest:
    path = directory.join(FILE_NAME)
    try:
        data = _small_file(directory.fd)
    except OSError as error:
        _say_if_lost(error, path)
        code = error.errno or errno.EIO
        if code in _NOT_THERE:
            raise DamagedError(
                f"{directory.path!r} holds no checkpoint, or not all of one: {path!r} cannot be opened"
                f" ({os.strerror(code)}); load another",
                path=path,
            ) from error
        raise transfer_error(errno=code, op="read", path=path, offset_bytes=0, nbytes=0) from error
    if len(data) > MAX_BYTES:
        raise DamagedError(f"{path!r} is longer than {MAX_BYTES} bytes; {_ADVICE}", path=path)
    try:
        return Manifest.decode(data)
    except FormError as error:
        raise DamagedError(f"{path!r}: {error}; {_ADVICE}", path=path) from error


def _small_file(directory_fd: int) -> bytes:
    fd = open_regular(FILE_NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory_fd)
    with open(fd, "rb") as file:
        data = file.read(min(os.fstat(fd).st_size, MAX_BYTES) + 1)
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return data


def _touched(regions: Iterable[tuple[int, Region]], block_bytes: int) -> Iterable[int]:
    """Return the numbers of the blocks that some regions lie in."""
    spans = [(start, start + region.nbytes) for start, region in regions if region.nbytes]
    wanted = set[int]()
    for start, end in spans:
        wanted.update(range(start // block_bytes, -(-end // block_bytes)))
    return sorted(wanted)


@dataclass(frozen=True, slots=True)
class Health:
    """Result of ``verify``.

    Attributes:
        path: Path of the checkpoint.
        nbytes: Bytes of its data.
        damage: Descriptions of damage; empty if it is whole.
    """

    path: str
    nbytes: int = 0
    damage: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Return whether all of it is as it was written."""
        return not self.damage
