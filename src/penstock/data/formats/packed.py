"""Penstock's own format: aligned records, each with a checksum. See docs/data-format.md."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import ChecksumError, DatasetError
from penstock.core.files import parse_json
from penstock.core.units import round_up
from penstock.data.files import read_range
from penstock.data.formats.base import IndexingJob, truncated
from penstock.data.index import ABSENT, IndexBuilder

MAGIC: Final = b"PSTKDATA"
VERSION: Final = 1
HEADER_BYTES: Final = 4096
SUFFIX: Final = ".pstk"
_MOST_HEADER_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """Tables behind the records: their offsets, lengths of fields, and checksums."""

    offsets: NDArray[np.int64]
    """``[records]``."""
    lengths: NDArray[np.uint32]
    """``[records, fields]``."""
    sums: NDArray[np.uint64]
    """``[records]``: XXH3 of each record, all its fields."""
    labels: NDArray[np.int32]
    """``[records]``; or of no record, where there are no classes."""

    def to_bytes(self) -> bytes:
        """As in a file."""
        parts = (self.offsets.astype("<i8"), self.sums.astype("<u8"))
        more = (self.lengths.astype("<u4"), self.labels.astype("<i4"))
        return b"".join(part.tobytes() for part in (*parts, *more))


def build(job: IndexingJob) -> IndexBuilder:
    """Index ``.pstk`` files with the same fields: a run for each, regular if its records are equal."""
    builder: IndexBuilder | None = None
    labels: list[NDArray[np.int32]] = []
    for number, path in enumerate(job.paths()):
        header, tables = read_tables(path)
        if builder is None:
            builder = IndexBuilder("packed", header["fields"])
            builder.meta = {"source": header["format"], "meta": header["meta"]}
        if list(builder.fields) != header["fields"]:
            raise DatasetError(f"{path!r} has fields {header['fields']}, others before it")
        add_records(builder, number, tables)
        builder.sums.append(tables.sums)
        labels.append(tables.labels)
    assert builder is not None, "there is a file"
    builder.labels = np.concatenate(labels)
    return builder


def add_records(builder: IndexBuilder, number: int, tables: Tables) -> None:
    """Add a file's records as a run."""
    lengths = np.where(tables.lengths == ABSENT, -1, tables.lengths.astype(np.int64))
    held = np.maximum(lengths, 0)
    begins = tables.offsets[:, None] + np.cumsum(held, axis=1) - held
    steps = np.diff(tables.offsets)
    alike = (lengths == lengths[:1]).all() and (steps == steps[:1]).all() if len(lengths) else False
    if not alike or (lengths < 0).any():
        builder.table(number, begins, lengths)
        return
    step = int(steps[0]) if len(steps) else 0
    columns = [(int(begins[0, i]), step, int(lengths[0, i])) for i in range(lengths.shape[1])]
    builder.regular(number, len(lengths), *columns)


def encode_header(facts: Mapping[str, Any], room_bytes: int = 0) -> bytes:
    """Encode the header before the records: whole blocks of 4096 bytes, ``room_bytes`` at least."""
    text = json.dumps({"version": VERSION, **facts}).encode()
    digest = xxhash.xxh3_64_intdigest(text)
    front = MAGIC + len(text).to_bytes(8, "little") + digest.to_bytes(8, "little") + text
    return front.ljust(round_up(max(room_bytes, len(front)), HEADER_BYTES), b"\0")


def read_tables(path: str) -> tuple[dict[str, Any], Tables]:
    """Header and tables of a file.

    Raises:
        DatasetError: It is none, truncated, or of a later version.
        ChecksumError: Header or tables are damaged.
    """
    front = read_range(path, 0, HEADER_BYTES)
    if front[:8] != MAGIC or len(front) < HEADER_BYTES:
        raise DatasetError(f"{path!r} is no packed data set: it begins with {front[:8]!r}")
    text = read_range(path, 24, min(int.from_bytes(front[8:16], "little"), _MOST_HEADER_BYTES))
    if xxhash.xxh3_64_intdigest(text) != int.from_bytes(front[16:24], "little"):
        raise ChecksumError(f"the header of {path!r} is damaged: copy the file again")
    header: dict[str, Any] = parse_json(text)
    try:
        return _tables(path, header)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(
            f"the header of {path!r} makes no sense ({type(error).__name__}: {error}); pack it again"
        ) from error


def _tables(path: str, header: dict[str, Any]) -> tuple[dict[str, Any], Tables]:
    if header["version"] != VERSION:
        raise DatasetError(f"{path!r} is of version {header['version']}; known is {VERSION}")
    if not isinstance(header["fields"], list) or not isinstance(header["meta"], dict):
        raise ValueError("fields is no list, or meta no object")
    if not all(isinstance(each, str) for each in (header["format"], *header["fields"])):
        raise ValueError("the names of the format and the fields are no strings")
    records, fields, start = header["records"], len(header["fields"]), header["tables_offset"]
    labels = records if header["labels"] else 0
    nbytes = records * (8 + 8 + 4 * fields) + 4 * labels
    size = os.path.getsize(path)
    if min(records, start) < 0:
        raise ValueError(f"there are {records} records, and tables at {start}")
    if size < start + nbytes:
        raise truncated(path, size, start + nbytes, "its tables")
    data = read_range(path, start, nbytes)
    if xxhash.xxh3_64_intdigest(data) != header["tables_sum"]:
        raise ChecksumError(f"the tables of {path!r} are damaged: copy the file again")
    return header, Tables(
        offsets=np.frombuffer(data, "<i8", records),
        sums=np.frombuffer(data, "<u8", records, 8 * records),
        lengths=np.frombuffer(data, "<u4", records * fields, 16 * records).reshape(records, fields),
        labels=np.frombuffer(data, "<i4", labels, records * (16 + 4 * fields)),
    )
