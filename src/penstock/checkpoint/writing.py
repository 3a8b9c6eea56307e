"""Data files, written while their checksums are taken; what the checkpoint before has is not written.

[Note: unchanged blocks]
    With a base, the blocks of a file are compared with those of the base's file of that name, by checksum
    and length, before anything is written: 128 bits that agree by accident are less likely than any fault
    of the device. A file all of whose blocks agree is linked, not written. One that differs somewhere is
    written whole; where the file system can share data between files (XFS, btrfs), only its blocks that
    differ are. A linked file that is damaged later is damaged in all checkpoints that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final, Protocol

from penstock.checkpoint.disk import Directory, Disk
from penstock.checkpoint.manifest import FileEntry, Manifest, blocks_of
from penstock.checkpoint.streams import Buffers, Outbound, Regions, digest, fill
from penstock.core.errors import CheckpointError, TransferError
from penstock.io.engine import Transfer
from penstock.io.files import DirectFile, open_at

_MOST_OPEN: Final = 64
"""Files are waited for together at the end, for then a journal is written once. Not all can be open."""


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """An earlier checkpoint, whose unchanged files are kept.

    Attributes:
        directory: Its directory.
        manifest: Its manifest.
    """

    directory: Directory
    manifest: Manifest

    def entry(self, name: str, nbytes: int) -> FileEntry | None:
        """What it has of that name and length."""
        for each in self.manifest.files:
            if each.name == name and each.nbytes == nbytes:
                return each
        return None


class Watcher(Protocol):
    """Who wants to know what may change now."""

    def filling(self) -> AbstractContextManager[object]:
        """Tensors are read within this."""

    def released(self, file: int, end: int) -> None:
        """Of a file, by its number, the bytes before ``end`` are not read any more."""


class _Nobody:
    def filling(self) -> AbstractContextManager[object]:
        return nullcontext()

    def released(self, file: int, end: int) -> None:
        pass


class FilesWriter:
    """Writes data files into a directory. Not thread-safe; ``abandon`` it if anything raises.

    Attributes:
        entries: What was written, complete after ``finish``.
        written_bytes: What went to the device.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        buffers: Buffers,
        *,
        base: Base | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        """Begin with no file.

        Args:
            disk: The operating system's.
            directory: Where.
            buffers: Of the length of the blocks.
            base: An earlier checkpoint.
            watcher: Told which bytes are not read any more.
        """
        self.entries: list[FileEntry] = []
        self.written_bytes = 0
        self._disk = disk
        self._directory = directory
        self._out = Outbound(buffers)
        self._block_bytes = buffers.block_bytes
        self._base = base
        self._watcher: Watcher = _Nobody() if watcher is None else watcher
        self._open: list[tuple[DirectFile, int, list[Transfer]]] = []
        self._early: dict[str, DirectFile] = {}

    def expect(self, name: str, nbytes: int) -> None:
        """Make a file early, while nothing is on its way: a journal is slow beside many writes.

        Raises TransferError, or NoSpaceError.
        """
        if self._base is None and len(self._early) < _MOST_OPEN:
            self._early[name] = self._disk.create(self._directory, name, nbytes)

    def make(self, name: str, nbytes: int) -> DirectFile:
        """A new file, or the one that was made early. Raises TransferError."""
        early = self._early.pop(name, None)
        return self._disk.create(self._directory, name, nbytes) if early is None else early

    def add(self, name: str, nbytes: int, regions: Regions) -> FileEntry:
        """Write a file; it is on the device after ``finish`` only.

        Args:
            name: Of the file.
            nbytes: Its length.
            regions: What is in it, without a gap.

        Raises:
            TransferError: It cannot be made or written.
            CheckpointError: A tensor changed meanwhile.
        """
        base = None if self._base is None else self._base.entry(name, nbytes)
        file = _File(self, name, nbytes, regions, base)
        entry = FileEntry(name=name, nbytes=nbytes, sums=tuple(file.write()))
        self.entries.append(entry)
        while len(self._open) > _MOST_OPEN:
            self._finish_oldest()
        return entry

    def finish(self) -> None:
        """Wait until all files are on the device. Raises TransferError."""
        while self._open:
            self._finish_oldest()
        self._out.settle()

    def abandon(self) -> None:
        """Leave everything as it is; nothing is on its way any more."""
        self._out.settle()
        while self._open:
            self._open.pop()[0].close()
        while self._early:
            self._early.popitem()[1].close()

    def _finish_oldest(self) -> None:
        file, nbytes, transfers = self._open[0]
        for transfer in transfers:
            transfer.wait()
        self._disk.finish(file, nbytes)
        file.close()
        self._open.pop(0)


class _File:
    """One file on its way."""

    def __init__(
        self, writer: FilesWriter, name: str, nbytes: int, regions: Regions, base: FileEntry | None
    ) -> None:
        self._writer = writer
        self._name = name
        self._nbytes = nbytes
        self._regions = regions
        self._starts = [start for start, _ in regions]
        self._base = base
        self._number = len(writer.entries)
        self._file: DirectFile | None = None
        self._transfers: list[Transfer] = []
        self._shares = False

    def write(self) -> list[str]:
        sums: list[str] = []
        if self._base is None:
            self._create()
        for index, offset in enumerate(blocks_of(self._nbytes, self._writer._block_bytes)):
            same = self._block(offset, index, sums)
            if self._file is None and not same:
                self._create()
                if not self._shares:
                    self._write_again(sums[:-1])
                self._block(offset, index, sums[:-1])
            if self._file is not None:
                self._writer._watcher.released(self._number, self._end(offset))
        if self._file is None:
            self._link(sums)
        self._writer._watcher.released(self._number, self._nbytes)
        return sums

    def _end(self, offset: int) -> int:
        return min(offset + self._writer._block_bytes, self._nbytes)

    def _block(self, offset: int, index: int, sums: list[str]) -> bool:
        """Add a block's checksum, and write it if need be; whether it is as in the base."""
        out, end = self._writer._out, self._end(offset)
        block = out.room()
        try:
            with self._writer._watcher.filling():
                fill(self._regions, self._starts, offset, end, block.address)
            found = digest(block.address, end - offset)
        except BaseException:
            out.give(block)
            raise
        sums.append(found)
        same = self._base is not None and self._base.sums[index] == found
        if self._file is None or (same and self._shares):
            out.give(block)
        else:
            self._writer.written_bytes += end - offset
            self._transfers.append(out.send(self._file, offset, end - offset, block))
        return same

    def _write_again(self, sums: Sequence[str]) -> None:
        """Write the first blocks, which were only compared."""
        again: list[str] = []
        for index, offset in enumerate(blocks_of(self._nbytes, self._writer._block_bytes)):
            if index == len(sums):
                break
            self._block(offset, index, again)
        if again != list(sums):
            raise CheckpointError(
                f"a tensor in {self._name!r} was changed while it was saved; save between two steps, or"
                " with wait=False and the optimizers that change it"
            )

    def _create(self) -> None:
        writer = self._writer
        file = writer.make(self._name, self._nbytes)
        writer._open.append((file, self._nbytes, self._transfers))
        self._file = file
        self._shares = self._clone(file)

    def _clone(self, file: DirectFile) -> bool:
        writer = self._writer
        if self._base is None or writer._base is None:
            return False
        source = self._open_base(writer._base)
        if source is None:
            return False
        try:
            return source.size_bytes == self._nbytes and writer._disk.clone(source, file)
        finally:
            source.close()

    def _open_base(self, base: Base) -> DirectFile | None:
        directory = base.directory
        try:
            return open_at(directory.fd, self._name, "r", path=directory.join(self._name))
        except TransferError:
            return None

    def _link(self, sums: Sequence[str]) -> None:
        writer = self._writer
        assert writer._base is not None
        source = self._open_base(writer._base)
        if source is not None:
            is_whole = source.size_bytes == self._nbytes
            source.close()
            if is_whole and writer._disk.link(
                writer._base.directory, writer._directory, self._name
            ):
                return
        self._create()
        if not self._shares:
            self._write_again(sums)
