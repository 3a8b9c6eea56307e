"""Writing of data files and their checksums; blocks that the base has are not written.

The header of a file with encoded tensors is known last: its blocks fill as bytes come, and the first
block is kept until then.

[Note: unchanged blocks]
    With a base, the blocks of a file are compared with those of the base's file of that name, by checksum
    and length, before anything is written: 128 bits that match by accident are less likely than any fault
    of the device. A file all of whose blocks agree is linked, not written. One that differs somewhere is
    written whole; where the file system can share data between files (XFS, btrfs), only its blocks that
    differ are. A linked file that is damaged later is damaged in all checkpoints that have it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from penstock.checkpoint.disk import Directory, Disk
from penstock.checkpoint.frames import ALIGNMENT_BYTES, Encoder
from penstock.checkpoint.manifest import FRAME_BYTES, FileEntry, TensorEntry, blocks_of
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.checkpoint.regions import SourceRegion
from penstock.checkpoint.streams import (
    BlockWrites,
    Buffers,
    OutputFile,
    SourceRegions,
    digest,
    fill,
)
from penstock.checkpoint.tensors import FilePlan, Prepared, header_of
from penstock.codec.base import HEADER_BYTES, Bytes
from penstock.core.errors import CheckpointError, PenstockError
from penstock.core.threads import cancel_all, in_thread
from penstock.core.units import round_up
from penstock.io.files import DirectFile
from penstock.store.pool import Block
from penstock.store.window import TransferWindow


class EncodedBody:
    """Content of a file with encoded tensors: its body, then its header, as lengths are known last.

    Attributes:
        entries: Entries of its tensors by number, with their places, after ``pieces``.
        header_bytes: Length of the header, whatever the lengths of the tensors.
        most_bytes: Greatest length of the file.
    """

    def __init__(
        self,
        plan: FilePlan,
        entries: Sequence[TensorEntry],
        regions: SourceRegions,
        encoder: Encoder,
    ) -> None:
        """Encode nothing yet.

        Args:
            plan: The file as it would be without a codec.
            entries: All tensors of the state, with their places in that file.
            regions: Contents of that file, the header first.
            encoder: Makes frames.
        """
        self.entries: dict[int, TensorEntry] = {}
        self._plain = {index: entries[index] for index in plan.members}
        self._encoder = encoder
        self._regions = dict(regions[1:])
        longest = {}
        for index, entry in self._plain.items():
            region = self._regions.get(entry.offset_bytes) if entry.nbytes else None
            if region is not None and encoder.pays(region, entry.dtype):
                most = _most_bytes(entry.nbytes)
                longest[index] = replace(entry, codec=encoder.name, stored_bytes=most)
        self._pays = longest.keys()
        most_entries = [longest.get(index, entry) for index, entry in self._plain.items()]
        self.header_bytes = len(header_of(most_entries))
        self.most_bytes = self.header_bytes + sum(each.file_bytes for each in most_entries)

    def pieces(self) -> Iterator[tuple[Bytes, int]]:
        """Yield the body in order: a piece, valid until the next, and how far the plain file was read.

        Each call encodes the tensors again: a body is compared first, and then written. Raises
        CheckpointError if a tensor was changed.
        """
        offset = self.header_bytes
        for index, entry in self._plain.items():
            begin = offset
            pays = index in self._pays
            if entry.nbytes:
                region = self._regions[entry.offset_bytes]
                frames = self._encoder.frames(region, entry.dtype) if pays else _pieces(region)
                for memory, end in frames:
                    offset += memory.size
                    yield memory, entry.offset_bytes + end
            placed = replace(entry, offset_bytes=begin)
            if pays:
                placed = replace(placed, codec=self._encoder.name, stored_bytes=offset - begin)
            self.entries[index] = placed

    def header(self) -> bytes:
        """Return the header; call it after ``pieces``."""
        return header_of(list(self.entries.values()), self.header_bytes)


def _most_bytes(nbytes: int) -> int:
    return round_up(nbytes + HEADER_BYTES * -(-nbytes // FRAME_BYTES), ALIGNMENT_BYTES)


def _pieces(region: SourceRegion) -> Iterator[tuple[Bytes, int]]:
    """Yield a tensor's bytes as they are, piece by piece, and the end of each."""
    memory = np.empty(min(FRAME_BYTES, region.nbytes), np.uint8)
    for start in range(0, region.nbytes, FRAME_BYTES):
        stop = min(start + FRAME_BYTES, region.nbytes)
        region.copy_out(start, stop, memory.ctypes.data)
        yield memory[: stop - start], stop


class FileBlocks:
    """Blocks of one file: their checksums are noted and compared with the base's, and they are written.

    Attributes:
        file: The file; None as long as blocks are only compared.
        shares_base: Blocks that are as in the base are in the file already.
        written_bytes: Bytes that were sent to the file.
        take: Returns a block to fill; raises TransferError if an earlier one could not be written.
        free: Frees a block that is not put.
    """

    def __init__(self, out: BlockWrites, name: str, base: FileEntry | None) -> None:
        """Begin without a block.

        Args:
            out: Writes blocks, and has the memory for them.
            name: Name of the file.
            base: File of the base that the blocks are compared with.
        """
        self.file: OutputFile | None = None
        self.shares_base = False
        self.written_bytes = 0
        self.block_bytes = out.buffers.block_bytes
        self.take = out.take_block
        self.free = out.buffers.give
        self._out = out
        self._name = name
        self._base = base
        self._sums: dict[int, str] = {}

    def __len__(self) -> int:
        """Return the number of blocks with a checksum."""
        return len(self._sums)

    @property
    def sums(self) -> tuple[str, ...]:
        """Checksums of all blocks, in order."""
        return tuple(self._sums[index] for index in range(len(self._sums)))

    def put(self, index: int, nbytes: int, block: Block, checksum: str) -> bool:
        """Note a block's checksum, then write the block, or free it if the file has its bytes already.

        Args:
            index: Number of the block in the file.
            nbytes: Length of the block.
            block: Its memory, which is freed when it is written.
            checksum: Its checksum.

        Returns:
            Whether the base has the same bytes there.

        Raises:
            CheckpointError: Its checksum was another one when it was compared.
        """
        is_same = self._base is not None and self._base.has(index, checksum)
        if self._sums.setdefault(index, checksum) != checksum:
            self.free(block)
            raise CheckpointError(
                f"a tensor in {self._name!r} was changed while it was saved; save between two steps, or"
                " with wait=False and the optimizers that change it"
            )
        if self.file is None or (is_same and self.shares_base):
            self.free(block)
        else:
            self.written_bytes += nbytes
            self._out.send(self.file, index * self.block_bytes, nbytes, block)
        return is_same


class _StreamedBlocks(FileBlocks):
    """Blocks that fill as bytes come. The first is kept until the header is known.

    Attributes:
        nbytes: Length of the file so far.
        differs: A block is not as in the base.
    """

    def __init__(
        self, out: BlockWrites, name: str, base: FileEntry | None, header_bytes: int
    ) -> None:
        """Begin behind the header, of ``header_bytes``."""
        super().__init__(out, name, base)
        self.nbytes = header_bytes
        self.differs = False
        self._first = header_bytes // self.block_bytes
        self._block: Block | None = None
        self._kept: Block | None = None

    def append(self, memory: Bytes) -> None:
        """Add bytes. Raises TransferError."""
        address, nbytes = memory.ctypes.data, memory.size
        while nbytes:
            if self._block is None:
                self._block = self.take()
            at = self.nbytes % self.block_bytes
            count = min(nbytes, self.block_bytes - at)
            ctypes.memmove(self._block.address + at, address, count)
            self.nbytes += count
            address += count
            nbytes -= count
            if self.nbytes % self.block_bytes == 0:
                self._end_block()

    def end(self, header: bytes) -> None:
        """Add the last block, and those with the header."""
        if self._block is not None:
            self._end_block()
        for index, begin in enumerate(range(0, len(header), self.block_bytes)):
            part = header[begin : begin + self.block_bytes]
            block = None
            if index == self._first:
                block, self._kept = self._kept, None
            if block is None:
                block = self.take()
            ctypes.memmove(block.address, part, len(part))
            self._put(index, block)
        block, self._kept = self._kept, None
        if block is not None:  # the header ends where a block does
            self._put(self._first, block)

    def close(self) -> None:
        """Free the memory of blocks that were not put. Idempotent."""
        for block in (self._block, self._kept):
            if block is not None:
                self.free(block)
        self._block = self._kept = None

    def _end_block(self) -> None:
        block, self._block = self._block, None
        assert block is not None
        index = (self.nbytes - 1) // self.block_bytes
        if index == self._first:
            self._kept = block
        else:
            self._put(index, block)

    def _put(self, index: int, block: Block) -> None:
        nbytes = min(self.block_bytes, self.nbytes - index * self.block_bytes)
        self.differs |= not self.put(index, nbytes, block, digest(block.address, nbytes))


def agrees(body: EncodedBody, out: BlockWrites, known: FileEntry) -> bool:
    """Return whether a file with encoded tensors is known, by its checksums; nothing is written.

    Args:
        body: Content of the file.
        out: Has the memory for blocks.
        known: The known file.
    """
    blocks = _StreamedBlocks(out, known.name, known, body.header_bytes)
    try:
        for piece, _ in body.pieces():
            blocks.append(piece)
            if blocks.differs:
                return False
        blocks.end(body.header())
    finally:
        blocks.close()
    return (blocks.nbytes, blocks.sums) == (known.nbytes, known.sums)


_MOST_OPEN: Final = 64
"""Most files that are open."""


class Watcher(Protocol):
    """Observer of writes: it may change their priority, and learns which bytes may change now."""

    def begins(self, window: TransferWindow[Any]) -> None:
        """Note that writes go through a window from now on."""

    def released(self, file: int, end: int) -> None:
        """Note that the bytes before ``end`` of a file, by its number, are not read any more."""


class FilesWriter:
    """Writes data files into a directory. Not thread-safe.

    As a context manager it cancels what is in flight if the block raises.

    Attributes:
        entries: Entries of the files, complete after ``finish``.
        written_bytes: Bytes that went to the device.
        reused_bytes: Those of them that went to space of a retired checkpoint.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        buffers: Buffers,
        *,
        base: OpenCheckpoint | None = None,
        watcher: Watcher | None = None,
        spare: Collection[str] = (),
    ) -> None:
        """Begin with no file.

        Args:
            disk: Changes the directory.
            directory: The directory.
            buffers: Memory for blocks of the checkpoint's length; this closes it.
            base: An earlier checkpoint.
            watcher: Observer of the writes.
            spare: Names of files in the directory that may be overwritten.
        """
        self.entries: list[FileEntry] = []
        self.written_bytes = self.reused_bytes = 0
        self._spare = frozenset(spare)
        self._reused = set[str]()
        self._disk = disk
        self._directory = directory
        self._out = BlockWrites(buffers, disk.finish)
        self._base = base
        self._watcher = watcher
        if watcher is not None:
            watcher.begins(self._out)
        self._open: list[OutputFile] = []
        self._early: dict[str, DirectFile] = {}

    def __enter__(self) -> FilesWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._abandon()
        finally:
            self._out.buffers.close()

    def write_all(
        self,
        prepared: Prepared,
        regions: Sequence[SourceRegions],
        encoder: Encoder | None = None,
    ) -> list[TensorEntry]:
        """Write all files of a state; they are on the device only after ``finish``.

        Args:
            prepared: The state.
            regions: Contents of each file, without a codec.
            encoder: Makes frames of tensors.

        Returns:
            Entries of the tensors.

        Raises:
            TransferError: A file cannot be created or written.
            CheckpointError: A tensor was changed meanwhile.
        """
        entries = list(prepared.entries)
        if encoder is None and self._base is None:
            for plan in prepared.plans[:_MOST_OPEN]:  # now: a journal is slow beside many writes
                self._early[plan.name] = self._create(plan.name, plan.nbytes)
        for plan, each in zip(prepared.plans, regions, strict=True):
            if encoder is None:
                self._add(plan.name, plan.nbytes, each)
                continue
            body = EncodedBody(plan, entries, each, encoder)
            self._add_encoded(plan.name, plan.nbytes, body)
            for index, entry in body.entries.items():
                entries[index] = entry
        return entries

    def _add(self, name: str, nbytes: int, regions: SourceRegions) -> None:
        base = self._base_entry(name)
        if base is not None and base.nbytes != nbytes:
            base = None
        blocks = FileBlocks(self._out, name, base)
        number = len(self.entries)
        if base is None:
            blocks.file = self.make(name, nbytes)
        starts = [start for start, _ in regions]

        def put(index: int) -> bool:
            begin = index * blocks.block_bytes
            end = min(begin + blocks.block_bytes, nbytes)
            block = blocks.take()
            try:
                checksum = fill(regions, starts, begin, end, block.address)
            except BaseException:
                blocks.free(block)
                raise
            return blocks.put(index, end - begin, block, checksum)

        def make(compared: int) -> None:
            """Make the file, and write the blocks that were compared, unless it shares them."""
            blocks.file = self.make(name, nbytes)
            blocks.shares_base = self._clone(base, blocks.file.file)
            for index in () if blocks.shares_base else range(compared):
                put(index)

        for index, begin in enumerate(blocks_of(nbytes, blocks.block_bytes)):
            if not put(index) and blocks.file is None:
                make(index)
                put(index)
            if blocks.file is not None:
                self._released(number, min(begin + blocks.block_bytes, nbytes))
        if blocks.file is None and not self._link(base):
            make(len(blocks))
        self._released(number, nbytes)
        self._added(FileEntry(name=name, nbytes=nbytes, sums=blocks.sums), blocks)

    def _add_encoded(self, name: str, plain_bytes: int, body: EncodedBody) -> None:
        """Write a file with encoded tensors, which without a codec has ``plain_bytes``."""
        base, number = self._base_entry(name), len(self.entries)
        if base is not None and agrees(body, self._out, base) and self._link(base):
            self._released(number, plain_bytes)
            self._added(base)
            return
        blocks = _StreamedBlocks(self._out, name, None, body.header_bytes)
        blocks.file = self.make(name, body.most_bytes)
        try:
            for piece, read_end in body.pieces():
                blocks.append(piece)
                self._released(number, read_end)
            blocks.end(body.header())
        finally:
            blocks.close()
        blocks.file.nbytes = blocks.nbytes
        self._released(number, plain_bytes)
        self._added(FileEntry(name=name, nbytes=blocks.nbytes, sums=blocks.sums), blocks)

    def make(self, name: str, nbytes: int) -> OutputFile:
        """Return a new file, a spare one, or the one that was created early. Raises TransferError."""
        early = self._early.pop(name, None)
        file = self._create(name, nbytes) if early is None else early
        self._open.append(OutputFile(file, nbytes))
        return self._open[-1]

    def finish(self, *also: Callable[[], None]) -> None:
        """Wait until all files are on the device. Raises TransferError.

        Args:
            also: Other waits, each of which runs in a thread beside those for the files: a journal and a
                device's cache are then flushed once for several.
        """
        begun: list[Future[None]] = []
        try:
            for work in also:
                begun.append(Future())
                in_thread("penstock-sync", work, begun[-1])
            self._out.finish()
            while self._open:
                self._out.wait_for(self._open[0])
                self._open.pop(0)
            for each in begun:
                each.result()
        finally:
            cancel_all(begun)

    def _abandon(self) -> None:
        """Cancel what is in flight and close all files, whatever is in them. Idempotent."""
        self._out.cancel()
        cancel_all([each.synced for each in self._open if each.synced is not None])
        while self._open:
            self._open.pop().file.close()
        while self._early:
            self._early.popitem()[1].close()

    def _released(self, file: int, end: int) -> None:
        if self._watcher is not None:
            self._watcher.released(file, end)

    def _base_entry(self, name: str) -> FileEntry | None:
        files = () if self._base is None else self._base.manifest.files
        return next((each for each in files if each.name == name), None)

    def _create(self, name: str, nbytes: int) -> DirectFile:
        file = self._disk.reuse(self._directory, name, nbytes) if name in self._spare else None
        if file is None:
            return self._disk.create(self._directory, name, nbytes)
        self._reused.add(name)
        return file

    def _link(self, base: FileEntry | None) -> bool:
        """Link the base's file; return False if that is not possible, or it has been cut since."""
        assert self._base is not None
        assert base is not None
        if not self._disk.link(self._base.directory, self._directory, base.name):
            return False
        if self._disk.size_bytes(self._directory, base.name) == base.nbytes:
            return True
        self._disk.drop(self._directory, base.name)
        return False

    def _clone(self, base: FileEntry | None, file: DirectFile) -> bool:
        """Share the data of the base's file with a file; return False as ``_link``."""
        if self._base is None or base is None:
            return False
        index = self._base.manifest.files.index(base)
        try:
            source = self._base.file(index)
        except PenstockError:
            return False
        try:
            return self._disk.clone(source, file) and source.size_bytes == base.nbytes
        finally:
            self._base.close_file(index)

    def _added(self, entry: FileEntry, blocks: FileBlocks | None = None) -> None:
        self.entries.append(entry)
        if entry.name in self._reused:
            self.reused_bytes += entry.nbytes
        if blocks is not None:
            self.written_bytes += blocks.written_bytes
            if blocks.file is not None:
                self._out.end(blocks.file)
        while len(self._open) > _MOST_OPEN:
            self._out.wait_for(self._open[0])
            self._open.pop(0)
