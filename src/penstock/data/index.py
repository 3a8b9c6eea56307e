"""Index of a data set's samples: small, checksummed, and the same for all formats.

[Note: samples and ranges]
    A sample has one or several *fields* (the members of a WebDataset sample, the columns of a table),
    each
    a range of bytes in one file. Samples come in *runs* within which they lie regularly: field ``f`` of
    sample ``k`` of the run begins at ``offset + k * stride``; or, where they do not, has an entry in a
    table. Files go up by ``file_step`` for each sample: 0, or 1 for a folder of images. So a set of
    equal records takes a few bytes whatever its size, and any other 12 bytes for each field.

On disk: ``PSTKIDX1``, the length of a JSON header (8 bytes), its XXH3 (8 bytes), the header, and the
arrays that it lists, each at a multiple of 64 bytes, little-endian. The header MUST have ``version`` 1,
``format``,
``fields``, ``options``, ``meta``, ``arrays`` (name: dtype, shape, offset) and ``checksum``, the XXH3 of
the arrays' bytes in the order of their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import ChecksumError, DatasetError, PenstockError
from penstock.core.files import parse_json
from penstock.core.units import round_up
from penstock.data.cache import keep, read_kept
from penstock.data.files import FileTable
from penstock.data.permutation import Numbers

_MAGIC: Final = b"PSTKIDX1"
_VERSION: Final = 1
_ALIGN: Final = 64
_AT_ONCE: Final = 1 << 16
"""Samples that are looked at together."""
ABSENT: Final = 2**32 - 1
"""Length of a field that a sample does not have."""
MOST_BYTES: Final = ABSENT - 1
"""The longest field."""
RUN: Final = np.dtype([("first", "<i8"), ("file", "<i8"), ("file_step", "<i8")])
COLUMN: Final = np.dtype([("offset", "<i8"), ("stride", "<i8"), ("nbytes", "<i8"), ("row", "<i8")])
"""Of a run and a field: regular if ``row`` is -1, else the table's entry of the run's first sample."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranges:
    """Places of some samples; arrays ``[samples]`` and ``[samples, fields]``."""

    file: Numbers
    offset: Numbers
    nbytes: Numbers
    """-1: the sample lacks the field."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Index:
    """See [Note: samples and ranges]."""

    format: str
    fields: tuple[str, ...]
    samples: int
    files: FileTable
    runs: NDArray[np.void]
    columns: NDArray[np.void]
    """``[runs, fields]``."""
    offsets: NDArray[np.int64]
    """The table's."""
    lengths: NDArray[np.uint32]
    labels: NDArray[np.int32]
    """Of each sample, where the format has classes; else empty."""
    sums: NDArray[np.uint64]
    """XXH3 of each sample, where the format has them; else empty."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the user chose, such as the length of a context."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Facts that decoding needs, such as a dtype."""

    def locate(self, samples: Numbers) -> Ranges:
        """Locate samples, each of which must be one of the set's."""
        run = np.searchsorted(self.runs["first"], samples, side="right") - 1
        inside = samples - self.runs["first"][run]
        file = self.runs["file"][run] + inside * self.runs["file_step"][run]
        columns = self.columns[run]
        offset = columns["offset"] + inside[:, None] * columns["stride"]
        nbytes = columns["nbytes"].copy()
        which = columns["row"] >= 0
        if which.any():
            rows = (columns["row"] + inside[:, None])[which]
            offset[which] = self.offsets[rows]
            lengths = self.lengths[rows].astype(np.int64)
            nbytes[which] = np.where(lengths == ABSENT, -1, lengths)
        return Ranges(file=file, offset=offset, nbytes=nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(array.nbytes for array in self._arrays().values())

    def longest(self) -> tuple[int, int]:
        """The longest sample, all its fields together, and how long it is."""
        best = (0, 0)
        for start in range(0, self.samples, _AT_ONCE):
            samples = np.arange(start, min(self.samples, start + _AT_ONCE))
            totals = np.maximum(self.locate(samples).nbytes, 0).sum(axis=1)
            top = int(totals.argmax())
            if totals[top] > best[1]:
                best = (start + top, int(totals[top]))
            if self.alike:
                break
        return best

    @cached_property
    def alike(self) -> bool:
        """Return whether each field is equally long in all samples."""
        lengths = self.columns["nbytes"]
        return bool((self.columns["row"] < 0).all() and (lengths == lengths[0]).all())

    @cached_property
    def data_bytes(self) -> int:
        """All fields of all samples."""
        ends = np.append(self.runs["first"][1:], self.samples) - self.runs["first"]
        regular = np.where(self.columns["row"] < 0, self.columns["nbytes"], 0)
        known = self.lengths[self.lengths != ABSENT]
        return int((regular.sum(axis=1) * ends).sum() + known.sum(dtype=np.int64))

    def check_within(self) -> None:
        """Raise DatasetError if a sample does not lie within its file."""
        firsts = self.runs["first"].tolist()
        for run, (first, stop) in enumerate(zip(firsts, [*firsts[1:], self.samples], strict=True)):
            regular = (self.columns[run]["row"] < 0).all() and not self.runs["file_step"][run]
            step = max(1, stop - first - 1) if regular else 1  # of a regular run the first and last
            for start in range(first, stop, _AT_ONCE * step):
                self._check_within(np.arange(start, min(stop, start + _AT_ONCE * step), step))

    def _check_within(self, samples: Numbers) -> None:
        found = self.locate(samples)
        room = self.files.sizes[found.file][:, None]
        bad = (found.nbytes > 0) & ((found.offset < 0) | (found.offset > room - found.nbytes))
        if bad.any():
            row, column = (int(each[0]) for each in np.nonzero(bad))
            raise DatasetError(
                f"sample {int(samples[row])} lies at {int(found.offset[row, column])} of"
                f" {self.files.name(int(found.file[row]))!r}, {int(found.nbytes[row, column])} bytes, and"
                f" the file has {int(room[row, 0])}: it is damaged or truncated; copy it again"
            )

    # -- on disk ----------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        """Keep it for later. Raises as ``penstock.data.cache.keep``."""
        keep(path, self._encode())

    @classmethod
    def load(cls, path: str) -> Index:
        """Read one.

        Raises:
            FileNotFoundError: There is none.
            ChecksumError: It is damaged.
            DatasetError: It is none, of a later version, or another user may have written it.
            TransferError: It cannot be read.
        """
        data = read_kept(path)
        try:
            return _decode(cls, data, path)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, PenstockError):
                raise
            raise _damaged(path, f"{type(error).__name__}: {error}") from error

    def _arrays(self) -> dict[str, NDArray[Any]]:
        table = self.files
        return {
            "columns": self.columns,
            "ends": table.ends,
            "heads": table.heads,
            "labels": self.labels,
            "lengths": self.lengths,
            "names": table.names,
            "offsets": self.offsets,
            "runs": self.runs,
            "sizes": table.sizes,
            "sums": self.sums,
            "times_ns": table.times_ns,
        }

    def _encode(self) -> bytes:
        body, arrays, checksum = bytearray(), {}, xxhash.xxh3_64()
        for name, array in self._arrays().items():
            body += bytes(-len(body) % _ALIGN)
            shape, kind = list(array.shape), array.dtype
            descr = kind.descr if kind.names else kind.str
            arrays[name] = {"dtype": descr, "shape": shape, "offset": len(body)}
            data = array.tobytes()
            checksum.update(data)
            body += data
        header = json.dumps(
            {
                "version": _VERSION,
                "format": self.format,
                "fields": self.fields,
                "samples": self.samples,
                "options": dict(self.options),
                "meta": dict(self.meta),
                "arrays": arrays,
                "checksum": checksum.intdigest(),
            }
        ).encode()
        digest = xxhash.xxh3_64_intdigest(header)
        front = _MAGIC + len(header).to_bytes(8, "little") + digest.to_bytes(8, "little") + header
        return front + bytes(-len(front) % _ALIGN) + bytes(body)


def _decode(cls: type[Index], data: bytearray, path: str) -> Index:
    if data[:8] != _MAGIC:
        raise DatasetError(
            f"{path!r} is no index of a data set: it begins with {bytes(data[:8])!r}"
        )
    length = int.from_bytes(data[8:16], "little")
    text = bytes(data[24 : 24 + length])
    if xxhash.xxh3_64_intdigest(text) != int.from_bytes(data[16:24], "little"):
        raise _damaged(path, "header")
    header = parse_json(text)
    if header["version"] != _VERSION:
        raise DatasetError(f"index {path!r} is of version {header['version']}; known is {_VERSION}")
    start = round_up(24 + length, _ALIGN)
    checksum, arrays = xxhash.xxh3_64(), {}
    for name, facts in header["arrays"].items():
        kind = facts["dtype"]
        dtype = np.dtype(kind if isinstance(kind, str) else [tuple(each) for each in kind])
        count = int(np.prod(facts["shape"], dtype=np.int64))
        offset = start + facts["offset"]
        if offset + count * dtype.itemsize > len(data):
            raise _damaged(path, name)
        array = np.frombuffer(data, dtype, count, offset).reshape(facts["shape"])
        checksum.update(np.ascontiguousarray(array).view(np.uint8).data if count else b"")
        arrays[name] = array
    if checksum.intdigest() != header["checksum"]:
        raise _damaged(path, "arrays")
    table = FileTable(**{n: arrays.pop(n) for n in ("names", "ends", "sizes", "times_ns", "heads")})
    return cls(
        format=header["format"],
        fields=tuple(header["fields"]),
        samples=header["samples"],
        files=table,
        options=header["options"],
        meta=header["meta"],
        **arrays,
    )


def _damaged(path: str, what: str) -> ChecksumError:
    return ChecksumError(
        f"the index {path!r} is damaged ({what}): remove it, or build it anew (rebuild=True)"
    )


class IndexBuilder:
    """Collects runs; the formats fill it, file by file, in order."""

    def __init__(self, format_name: str, fields: Sequence[str]) -> None:
        """Nothing is in it yet."""
        self.format = format_name
        self.fields = tuple(fields)
        self.samples = 0
        self.meta: dict[str, Any] = {}
        self.labels: Sequence[int] | NDArray[np.int32] = ()
        self.sums: list[NDArray[np.uint64]] = []
        self._runs: list[tuple[int, int, int]] = []
        self._columns: list[list[tuple[int, int, int, int]]] = []
        self._offsets: list[NDArray[np.int64]] = []
        self._lengths: list[NDArray[np.uint32]] = []
        self._rows = 0

    def regular(self, file: int, count: int, *columns: tuple[int, int, int]) -> None:
        """A run of equal samples: (offset, stride, nbytes) of each field."""
        self.mixed(file, count, columns)

    def table(self, file: int, offsets: Numbers, lengths: Numbers, *, file_step: int = 0) -> None:
        """A run of samples anywhere: ``[samples, fields]``; a length below 0: absent."""
        columns = [(offsets[:, i], lengths[:, i]) for i in range(len(self.fields))]
        self.mixed(file, len(offsets), columns, file_step=file_step)

    def mixed(self, file: int, count: int, columns: Sequence[Any], *, file_step: int = 0) -> None:
        """A run whose fields are regular, or are arrays (offsets, lengths)."""
        if not count:
            return
        made: list[tuple[int, int, int, int]] = []
        for column in columns:
            if len(column) == 3:
                made.append((*column, -1))
                continue
            offsets, lengths = column
            if int(lengths.max()) > MOST_BYTES:
                raise DatasetError(
                    f"sample {self.samples + int(lengths.argmax())} has a field of"
                    f" {int(lengths.max())} bytes; the most is {MOST_BYTES}"
                )
            self._offsets.append(np.ascontiguousarray(offsets, np.int64))
            self._lengths.append(np.where(lengths < 0, ABSENT, lengths).astype(np.uint32))
            made.append((0, 0, 0, self._rows))
            self._rows += count
        self._runs.append((self.samples, file, file_step))
        self._columns.append(made)
        self.samples += count

    def build(self, files: FileTable, options: Mapping[str, Any]) -> Index:
        """The index. Raises DatasetError: there is no sample."""
        if not self.samples:
            raise DatasetError(f"the data set ({self.format}, {len(files)} files) has no sample")
        return Index(
            format=self.format,
            fields=self.fields,
            samples=self.samples,
            files=files,
            runs=np.array(self._runs, RUN),
            columns=np.array(self._columns, COLUMN),
            offsets=_joined(self._offsets, np.int64),
            lengths=_joined(self._lengths, np.uint32),
            labels=np.asarray(self.labels, np.int32),
            sums=_joined(self.sums, np.uint64),
            options=dict(options),
            meta=self.meta,
        )


def _joined(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
