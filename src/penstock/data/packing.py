"""Writing the packed format: any data set's samples as they are, aligned and with checksums."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, TransferError, transfer_error
from penstock.core.files import absolute_path
from penstock.core.fs import replace_durably
from penstock.core.units import round_up
from penstock.data.build import Opened
from penstock.data.formats import Progress
from penstock.data.formats.packed import HEADER_BYTES, SUFFIX, Tables, encode_header
from penstock.data.group import SampleGroup
from penstock.data.index import ABSENT, Index
from penstock.data.scan import scan
from penstock.io.engine import Priority, Request, Transfer
from penstock.io.files import MAX_GRANULE_BYTES, DirectFile, open_path
from penstock.io.traffic_report import reported
from penstock.observe.clients import DATA
from penstock.store.arena import Arena
from penstock.store.engine import shared_engine
from penstock.store.window import TransferWindow

_BLOCK_BYTES: Final = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFile:
    """File that was written."""

    path: str
    records: int
    data_bytes: int
    """Of all records, without what aligns them."""
    file_bytes: int
    align_bytes: int


def pack(
    opened: Opened,
    path: str | os.PathLike[str],
    *,
    align_bytes: int | None = None,
    progress: Progress = lambda _: None,
) -> PackedFile:
    """Write a data set as one packed file, atomically: it is there whole, or not at all.

    Args:
        opened: The data set.
        path: Of the file; ends in ``.pstk``, and must not exist.
        align_bytes: Each record begins at a multiple of this, a power of two. None: 4096 for records of
            16 KiB and more on average, and for those that are whole pages; else 64.
        progress: Told the share that is done.

    Raises:
        ConfigError: The path or the alignment makes no sense, or the set is Parquet.
        NoSpaceError: The file system is full; nothing is left behind.
        TransferError: A sample cannot be read, or the file not be written.
        ChecksumError: A sample is damaged.
    """
    where = absolute_path(path, "the packed file")
    if not where.endswith(SUFFIX) or os.path.exists(where):
        raise ConfigError(f"{where!r} must end in {SUFFIX} and not exist yet")
    if "parquet" in (opened.index.format, opened.index.meta.get("source")):
        raise ConfigError(
            f"{opened.root!r} is Parquet: a row group decodes by the footer of its file, which a packed"
            " file has not; train from it as it is, or write its rows in another format first"
        )
    align = _alignment(opened.index) if align_bytes is None else align_bytes
    if align < 1 or align & (align - 1):
        raise ConfigError(f"records cannot be aligned to {align} bytes: it is no power of two")
    temporary = f"{where}.{os.getpid()}.tmp"
    try:
        written = _write(opened, temporary, where, align, progress)
        replace_durably(temporary, where)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and not isinstance(error, TransferError):
            code = error.errno or errno.EIO
            raise transfer_error(
                errno=code, op="write", path=where, offset_bytes=0, nbytes=0
            ) from error
        raise
    return written


def _write(
    opened: Opened, temporary: str, where: str, align: int, progress: Progress
) -> PackedFile:
    index = opened.index
    facts = _facts(index, align)
    start = len(encode_header(facts))
    tables = Tables(
        offsets=np.zeros(index.samples, np.int64),
        lengths=np.full((index.samples, len(index.fields)), ABSENT, np.uint32),
        sums=np.zeros(index.samples, np.uint64),
        labels=index.labels,
    )
    with _Writer(temporary, start) as writer:
        for group in scan(opened):
            _write_group(writer, group, tables, align)
            progress(int(group.samples[-1] + 1) / index.samples)
        data_bytes = writer.data_bytes
        writer.align(MAX_GRANULE_BYTES)
        text = tables.to_bytes()
        facts |= {"tables_offset": writer.at, "tables_sum": xxhash.xxh3_64_intdigest(text)}
        writer.add(np.frombuffer(text, np.uint8))
        file_bytes = writer.finish(encode_header(facts, start))
    return PackedFile(
        path=where,
        records=index.samples,
        data_bytes=data_bytes,
        file_bytes=file_bytes,
        align_bytes=align,
    )


def _facts(index: Index, align: int) -> dict[str, Any]:
    """Return the header's facts, with the largest numbers, so that it does not grow."""
    packed = index.format == "packed"
    return {
        "format": index.meta["source"] if packed else index.format,
        "fields": list(index.fields),
        "meta": index.meta["meta"] if packed else dict(index.meta),
        "records": index.samples,
        "align_bytes": align,
        "labels": len(index.labels) > 0,
        "tables_offset": 2**62,
        "tables_sum": 2**64 - 1,
    }


def _write_group(writer: _Writer, group: SampleGroup, tables: Tables, align: int) -> None:
    if group.bad:
        raise next(iter(group.bad.values()))
    memory = group.memory.bytes
    for row, sample in enumerate(group.samples.tolist()):
        writer.align(align)
        tables.offsets[sample] = writer.at
        digest = xxhash.xxh3_64()
        for column in range(group.nbytes.shape[1]):
            nbytes = int(group.nbytes[row, column])
            if nbytes < 0:
                continue
            begin = int(group.offset[row, column])
            data = memory[begin : begin + nbytes]
            digest.update(data.data)
            writer.add(data)
            tables.lengths[sample, column] = nbytes
            writer.data_bytes += nbytes
        tables.sums[sample] = digest.intdigest()


def _alignment(index: Index) -> int:
    mean = index.data_bytes // index.samples
    regular = not len(index.offsets) and not mean % MAX_GRANULE_BYTES
    return MAX_GRANULE_BYTES if regular or mean >= 4 * MAX_GRANULE_BYTES else 64


class _Writer:
    """Bytes to a file past the page cache: one block is filled while the other is written."""

    def __init__(self, path: str, start: int) -> None:
        self.at = start
        self.data_bytes = 0
        self._file: DirectFile = open_path(path, "x+")
        self._engine = shared_engine()
        self._arena = Arena(2 * _BLOCK_BYTES, owner="data packing")
        self._address: list[int] = []
        self._memory: list[NDArray[np.uint8]] = []
        for _ in range(2):
            block = self._arena.allocate(_BLOCK_BYTES, force=True)
            assert block is not None, "the arena has room for two"
            self._address.append(block.address)
            self._memory.append(block.lend(0, _BLOCK_BYTES))
        self._block_start = start
        self._free = [1]
        self._turn = 0  # the block that is filled
        self._writes = TransferWindow[int](
            release=self._free.append, priority=Priority.WRITE_BEHIND
        )

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._writes.cancel()
        self._memory.clear()
        self._file.close()
        self._arena.close()

    def align(self, multiple: int) -> None:
        gap = round_up(self.at, multiple) - self.at
        if gap:
            self.add(np.zeros(gap, np.uint8))

    def add(self, data: NDArray[np.uint8]) -> None:
        while len(data):
            filled = self.at - self._block_start
            part = data[: _BLOCK_BYTES - filled]
            self._memory[self._turn][filled : filled + len(part)] = part
            self.at += len(part)
            data = data[len(part) :]
            if self.at - self._block_start == _BLOCK_BYTES:
                self._flush(_BLOCK_BYTES)

    def finish(self, header: bytes) -> int:
        """Write what is left and the header, and wait for the device; how long the file is."""
        rest = self.at - self._block_start
        if rest:
            padded = round_up(rest, MAX_GRANULE_BYTES)
            self._memory[self._turn][rest:padded] = 0
            self._flush(padded)
        end = round_up(self.at, MAX_GRANULE_BYTES)
        assert len(header) % HEADER_BYTES == 0
        for offset in range(0, len(header), _BLOCK_BYTES):
            part = header[offset : offset + _BLOCK_BYTES]
            self._memory[self._turn][: len(part)] = np.frombuffer(part, np.uint8)
            self._write(offset, len(part))
        self._writes.finish()
        os.fsync(self._file.fd)
        return end

    def _flush(self, nbytes: int) -> None:
        self._write(self._block_start, nbytes)
        self._block_start += _BLOCK_BYTES

    def _write(self, offset: int, nbytes: int) -> None:
        """Begin to write the block that was filled, and have another one to fill."""
        turn = self._turn

        def submit(priority: Priority) -> Transfer:
            transfer = self._engine.submit(
                Request(
                    op="write",
                    file=self._file,
                    offset_bytes=offset,
                    address=self._address[turn],
                    nbytes=nbytes,
                    keep_alive=self._memory[turn],
                    priority=priority,
                )
            )
            return reported(transfer, "write", DATA, self._file.path)

        self._writes.begin(turn, submit)
        following = self._writes.take(lambda: self._free.pop() if self._free else None)
        assert following is not None, "one of two blocks is always free, or in flight"
        self._turn = following
