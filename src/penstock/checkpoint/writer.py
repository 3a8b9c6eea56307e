"""Data files, written while their checksums are computed; blocks that the base has are not written.

A file with encoded tensors has a header that is known last: its blocks fill as bytes come, and the first
of them waits.

[Note: unchanged blocks]
    With a base, the blocks of a file are compared with those of the base's file of that name, by checksum
    and length, before anything is written: 128 bits that agree by accident are less likely than any fault
    of the device. A file all of whose blocks agree is linked, not written. One that differs somewhere is
    written whole; where the file system can share data between files (XFS, btrfs), only its blocks that
    differ are. A linked file that is damaged later is damaged in all checkpoints that have it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from penstock.checkpoint.disk import Directory, Disk
from penstock.checkpoint.frames import ALIGNMENT_BYTES, Encoder
from penstock.checkpoint.manifest import FRAME_BYTES, FileEntry, Manifest, TensorEntry, blocks_of
from penstock.checkpoint.regions import Region
from penstock.checkpoint.streams import BlockWrites, Buffers, Regions, digest, fill
from penstock.checkpoint.tensors import FilePlan, Leaf, header_of
from penstock.checkpoint.values import name_of
from penstock.codec.base import HEADER_BYTES, Bytes
from penstock.core.errors import CheckpointError, TransferError
from penstock.core.threads import all_at_once
from penstock.core.units import round_up
from penstock.io.files import DirectFile, open_at
from penstock.store.pool import Block
from penstock.store.window import TransferWindow


class FileSpan(NamedTuple):
    """A stretch of a file, valid until the next one is asked for.

    Attributes:
        address: Where it is in memory.
        nbytes: How long it is.
        read_end: Bytes of the plain file before this are not read any more.
    """

    address: int
    nbytes: int
    read_end: int


class EncodedBody:
    """Body of a file, then its header: lengths are known only afterwards.

    Attributes:
        header_bytes: What the header takes, whatever comes.
        most_bytes: The longest that the file can be.
    """

    def __init__(
        self,
        plan: FilePlan,
        leaves: Sequence[Leaf],
        regions: Sequence[tuple[int, Region]],
        encoder: Encoder,
    ) -> None:
        """Make nothing yet.

        Args:
            plan: The file as it would be without a codec.
            leaves: All of the state's.
            regions: What is in that file, the header first.
            encoder: Makes frames.
        """
        self._places: dict[int, tuple[int, int]] = {}
        self._numbers = plan.leaves
        self._leaves = [leaves[index] for index in plan.leaves]
        by_place = dict(regions[1:])
        self._regions: list[tuple[int, Region | None]] = []
        offset = len(plan.header)
        for leaf in self._leaves:
            self._regions.append((offset, by_place[offset] if leaf.nbytes else None))
            offset += leaf.nbytes
        self._encoder = encoder
        self._pays = [
            region is not None and encoder.pays(region, name_of(leaf.tensor.dtype))
            for leaf, (_, region) in zip(self._leaves, self._regions, strict=True)
        ]
        longest = {
            leaf.name: _most_bytes(leaf.nbytes)
            for leaf, pays in zip(self._leaves, self._pays, strict=True)
            if pays
        }
        self.header_bytes = len(header_of(self._leaves, longest))
        self.most_bytes = self.header_bytes + sum(
            longest.get(leaf.name, leaf.nbytes) for leaf in self._leaves
        )

    def spans(self) -> Iterator[FileSpan]:
        """All of it but the header, in order. Raises CheckpointError if a tensor was changed."""
        offset = self.header_bytes
        for index, number in enumerate(self._numbers):
            begin = offset
            start, region = self._regions[index]
            if region is not None:
                for memory, end in self._made(index, region):
                    offset += memory.size
                    yield FileSpan(memory.ctypes.data, memory.size, start + end)
            self._places[number] = begin, offset - begin if self._pays[index] else 0

    def enter(self, entries: list[TensorEntry]) -> None:
        """Say where its tensors are, in what a manifest says of all; when all spans were made."""
        for number, (offset, stored) in self._places.items():
            entry = replace(entries[number], offset_bytes=offset)
            if stored:
                entry = replace(entry, codec=self._encoder.name, stored_bytes=stored)
            entries[number] = entry

    def header(self) -> bytes:
        """The header; call it when all spans were made."""
        encoded = {
            leaf.name: self._places[number][1]
            for number, leaf in zip(self._numbers, self._leaves, strict=True)
            if self._places[number][1]
        }
        return header_of(self._leaves, encoded, self.header_bytes)

    def _made(self, index: int, region: Region) -> Iterator[tuple[Bytes, int]]:
        if self._pays[index]:
            return self._encoder.frames(region, name_of(self._leaves[index].tensor.dtype))
        return _pieces(region)


def _most_bytes(nbytes: int) -> int:
    return round_up(nbytes + HEADER_BYTES * -(-nbytes // FRAME_BYTES), ALIGNMENT_BYTES)


def _pieces(region: Region) -> Iterator[tuple[Bytes, int]]:
    """A tensor's bytes as they are, piece by piece, and where each ends."""
    memory = np.empty(min(FRAME_BYTES, region.nbytes), np.uint8)
    for start in range(0, region.nbytes, FRAME_BYTES):
        stop = min(start + FRAME_BYTES, region.nbytes)
        region.copy_out(start, stop, memory.ctypes.data)
        yield memory[: stop - start], stop


class Blocks:
    """Blocks of a file that fill as bytes come. The first is kept until the header is known.

    Attributes:
        nbytes: How long the file is so far.
        differs: Whether a block is not as in the base.
    """

    def __init__(
        self,
        out: BlockWrites,
        block_bytes: int,
        header_bytes: int,
        file: DirectFile | None,
        base: FileEntry | None,
    ) -> None:
        """Begin behind the header.

        Args:
            out: Takes blocks to the device.
            block_bytes: How long they are.
            header_bytes: How long the header is.
            file: Where they go; None: nowhere, they are compared.
            base: What they are compared with.
        """
        self.nbytes = header_bytes
        self.differs = False
        self._out = out
        self._size = block_bytes
        self._first = header_bytes // block_bytes
        self._file = file
        self._known = () if base is None else base.sums
        self._sums: dict[int, str] = {}
        self._block: Block | None = None
        self._kept: Block | None = None

    def put(self, address: int, nbytes: int) -> None:
        """Add bytes. Raises TransferError."""
        while nbytes:
            if self._block is None:
                self._block = self._out.room()
            at = self.nbytes % self._size
            count = min(nbytes, self._size - at)
            ctypes.memmove(self._block.address + at, address, count)
            self.nbytes += count
            address += count
            nbytes -= count
            if self.nbytes % self._size == 0:
                self._close()

    def end(self, header: bytes) -> tuple[str, ...]:
        """The checksums of all blocks; those with the header are the last to be written."""
        if self._block is not None:
            self._close()
        for index, begin in enumerate(range(0, len(header), self._size)):
            part = header[begin : begin + self._size]
            block = None
            if index == self._first:
                block, self._kept = self._kept, None
            if block is None:
                block = self._out.room()
            ctypes.memmove(block.address, part, len(part))
            self._send(index, block)
        block, self._kept = self._kept, None
        if block is not None:  # the header ends where a block does
            self._send(self._first, block)
        return tuple(self._sums[index] for index in range(len(self._sums)))

    def give_back(self) -> None:
        """Free the buffer of a block that was not sent."""
        for block in (self._block, self._kept):
            if block is not None:
                self._out.give(block)
        self._block = self._kept = None

    def _close(self) -> None:
        block, self._block = self._block, None
        assert block is not None
        index = (self.nbytes - 1) // self._size
        if index == self._first:
            self._kept = block
        else:
            self._send(index, block)

    def _send(self, index: int, block: Block) -> None:
        begin = index * self._size
        nbytes = min(self._size, self.nbytes - begin)
        found = self._sums[index] = digest(block.address, nbytes)
        if self._file is not None:
            self._out.send(self._file, begin, nbytes, block)
            return
        self._out.give(block)
        self.differs |= index >= len(self._known) or self._known[index] != found


def agrees(body: EncodedBody, out: BlockWrites, block_bytes: int, known: FileEntry) -> bool:
    """Return whether a file with encoded tensors is known, by its checksums; nothing is written.

    Args:
        body: What is in it.
        out: Has blocks; nothing is sent.
        block_bytes: How long they are.
        known: The file.
    """
    blocks = Blocks(out, block_bytes, body.header_bytes, None, known)
    try:
        for span in body.spans():
            blocks.put(span.address, span.nbytes)
            if blocks.differs:
                return False
        sums = blocks.end(body.header())
    finally:
        blocks.give_back()
    return (blocks.nbytes, sums) == (known.nbytes, known.sums)


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

    def entry(self, name: str) -> FileEntry | None:
        """Return the entry of that name, if there is one."""
        return next((each for each in self.manifest.files if each.name == name), None)

    def file(self, name: str) -> DirectFile | None:
        """Its file of that name, open; None if that cannot be."""
        try:
            return open_at(self.directory.fd, name, "r", path=self.directory.join(name))
        except TransferError:
            return None


class Watcher(Protocol):
    """Observer of writes: it may change their priority, and learns which bytes may change now."""

    def begins(self, window: TransferWindow[Any]) -> None:
        """Note that writes go through a window from now on."""

    def released(self, file: int, end: int) -> None:
        """Of a file, by its number, the bytes before ``end`` are not read any more."""


class _Nobody:
    def begins(self, window: TransferWindow[Any]) -> None:
        pass

    def released(self, file: int, end: int) -> None:
        pass


class FilesWriter:
    """Writes data files into a directory. Not thread-safe; ``abandon`` it if anything raises.

    Attributes:
        entries: What was written, complete after ``finish``.
        written_bytes: What went to the device.
        reused_bytes: What of it went to space that a retired checkpoint had.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        buffers: Buffers,
        *,
        base: Base | None = None,
        watcher: Watcher | None = None,
        spare: Collection[str] = (),
    ) -> None:
        """Begin with no file.

        Args:
            disk: The operating system's.
            directory: Where.
            buffers: Of the length of the blocks.
            base: An earlier checkpoint.
            watcher: Observer of the writes.
            spare: Files that are there to be written over.
        """
        self.entries: list[FileEntry] = []
        self.written_bytes = self.reused_bytes = 0
        self._spare = frozenset(spare)
        self._reused = set[str]()
        self._disk = disk
        self._directory = directory
        self._out = BlockWrites(buffers)
        self._block_bytes = buffers.block_bytes
        self._base = base
        self._watcher: Watcher = _Nobody() if watcher is None else watcher
        self._watcher.begins(self._out)
        self._open: list[_Open] = []
        self._early: dict[str, DirectFile] = {}

    def expect(self, name: str, nbytes: int) -> None:
        """Make a file early, while nothing is on its way: a journal is slow beside many writes.

        Raises TransferError, or NoSpaceError.
        """
        if self._base is None and len(self._early) < _MOST_OPEN:
            self._early[name] = self._make(name, nbytes)

    def make(self, name: str, nbytes: int) -> DirectFile:
        """A new file, a spare one, or the one that was made early. Raises TransferError."""
        early = self._early.pop(name, None)
        return self._make(name, nbytes) if early is None else early

    def _make(self, name: str, nbytes: int) -> DirectFile:
        file = self._disk.reuse(self._directory, name, nbytes) if name in self._spare else None
        if file is None:
            return self._disk.create(self._directory, name, nbytes)
        self._reused.add(name)
        return file

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
        base = None if self._base is None else self._base.entry(name)
        if base is not None and base.nbytes != nbytes:
            base = None
        file = _File(self, name, nbytes, regions, base)
        return self._added(FileEntry(name=name, nbytes=nbytes, sums=tuple(file.write())))

    def add_encoded(self, name: str, plain_bytes: int, body: EncodedBody) -> FileEntry:
        """Write a file with encoded tensors, as ``add``.

        Args:
            name: Of the file.
            plain_bytes: How long it would be without a codec.
            body: What is in it.
        """
        base = None if self._base is None else self._base.entry(name)
        return self._added(_Encoded(self, name, plain_bytes, body).write(base))

    def _added(self, entry: FileEntry) -> FileEntry:
        self.entries.append(entry)
        if entry.name in self._reused:
            self.reused_bytes += entry.nbytes
        while len(self._open) > _MOST_OPEN:
            self._finish_oldest()
        return entry

    def linked(self, name: str, nbytes: int) -> bool:
        """Return whether the base's file of that name, of that length, could be had here as well."""
        assert self._base is not None
        source = self._base.file(name)
        if source is None:
            return False
        is_whole = source.size_bytes == nbytes
        source.close()
        return is_whole and self._disk.link(self._base.directory, self._directory, name)

    def finish(self, also: Callable[[], None] | None = None) -> None:
        """Wait until all files are on the device. Raises TransferError.

        The system waits for all at once, for then a journal and a device's cache are flushed once and not
        for each: so what ``also`` waits for is waited for beside them, in another thread.
        """
        self._out.finish()
        waits: list[Callable[[], None]] = [
            partial(self._disk.finish, each.file, each.nbytes) for each in self._open
        ]
        if also is not None:
            waits.append(also)
        all_at_once("penstock-sync", waits)
        while self._open:
            self._open.pop().file.close()

    def abandon(self) -> None:
        """Leave everything as it is; nothing is on its way any more."""
        self._out.cancel()
        while self._open:
            self._open.pop().file.close()
        while self._early:
            self._early.popitem()[1].close()

    def _finish_oldest(self) -> None:
        oldest = self._open[0]
        self._out.finish()
        self._disk.finish(oldest.file, oldest.nbytes)
        oldest.file.close()
        self._open.pop(0)


@dataclass(slots=True, eq=False)
class _Open:
    """A file on its way: it is to have this length when its blocks are written."""

    file: DirectFile
    nbytes: int


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
            found = fill(self._regions, self._starts, offset, end, block.address)
        except BaseException:
            out.give(block)
            raise
        sums.append(found)
        same = self._base is not None and self._base.sums[index] == found
        if self._file is None or (same and self._shares):
            out.give(block)
        else:
            self._writer.written_bytes += end - offset
            out.send(self._file, offset, end - offset, block)
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
        writer._open.append(_Open(file, self._nbytes))
        self._file = file
        self._shares = self._clone(file)

    def _clone(self, file: DirectFile) -> bool:
        writer = self._writer
        if self._base is None or writer._base is None:
            return False
        source = writer._base.file(self._name)
        if source is None:
            return False
        try:
            return source.size_bytes == self._nbytes and writer._disk.clone(source, file)
        finally:
            source.close()

    def _link(self, sums: Sequence[str]) -> None:
        if self._writer.linked(self._name, self._nbytes):
            return
        self._create()
        if not self._shares:
            self._write_again(sums)


class _Encoded:
    """A file whose length and header are known only when all else in it has been made."""

    def __init__(self, writer: FilesWriter, name: str, plain_bytes: int, body: EncodedBody) -> None:
        self._writer = writer
        self._name = name
        self._plain_bytes = plain_bytes
        self._body = body
        self._number = len(writer.entries)

    def write(self, base: FileEntry | None) -> FileEntry:
        writer = self._writer
        entry = None
        if base is not None and agrees(self._body, writer._out, writer._block_bytes, base):
            entry = base if writer.linked(self._name, base.nbytes) else None
        entry = self._made() if entry is None else entry
        writer._watcher.released(self._number, self._plain_bytes)
        return entry

    def _made(self) -> FileEntry:
        writer = self._writer
        opened = _Open(writer.make(self._name, self._body.most_bytes), 0)
        writer._open.append(opened)
        size, header_bytes = writer._block_bytes, self._body.header_bytes
        blocks = Blocks(writer._out, size, header_bytes, opened.file, None)
        try:
            for span in self._body.spans():
                blocks.put(span.address, span.nbytes)
                writer._watcher.released(self._number, span.read_end)
            sums = blocks.end(self._body.header())
        finally:
            blocks.give_back()
        opened.nbytes = blocks.nbytes
        writer.written_bytes += blocks.nbytes
        return FileEntry(name=self._name, nbytes=blocks.nbytes, sums=sums)
