"""From bytes in the ring to values: whole batches of arrays at once, or sample by sample.

What is decoded is a copy, or something made from the bytes; or memory of the ring that was lent for it.

[Note: copies and the lock]
    NumPy lets go of the interpreter's lock while it copies from one range to another, and not while it
    picks a few items by number. Whoever held it for half a millisecond would hold up the thread of the
    engine, and flash would have nothing to do meanwhile. So what is long is copied range by range.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, DatasetError
from penstock.data.formats.base import need
from penstock.data.group import Group
from penstock.data.index import Index
from penstock.data.permutation import Numbers

LONG_BYTES: Final = 16 << 10
"""Pieces that are copied one by one."""
_IMAGES: Final = frozenset(
    {"bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"}
)
_NUMBERS: Final = frozenset({"cls", "cls2", "index", "inx", "id"})


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, as a decoding function gets it."""

    index: int
    """Its number in the data set."""
    fields: Mapping[str, memoryview | None]
    """The bytes of each field; None where it has none. They are there during the call only."""
    label: int | None
    """Its class, where the format has classes."""
    path: str
    """The file that it is in."""
    row: int
    """Its number among the file's samples."""

    @property
    def data(self) -> memoryview:
        """The bytes of the only field, or of the first that is there."""
        return next(each for each in self.fields.values() if each is not None)


Decode = Callable[[Sample], Any]
Room = Callable[[int], NDArray[np.uint8]]
"""Memory for so many bytes, contents undefined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A field whose values are arrays, text or bytes without any coding."""

    name: str
    kind: Literal["array", "str", "bytes"] = "array"
    dtype: str = "|u1"
    """Of an array; ``bfloat16`` is one, too."""
    shape: tuple[int, ...] | None = None
    """Of an array; None: one dimension, as long as the bytes are."""
    cast: str | None = None
    """To what it is converted."""

    @property
    def stored(self) -> np.dtype[Any]:
        """As what NumPy sees it."""
        return np.dtype("<u2" if self.dtype == "bfloat16" else self.dtype)

    @property
    def loaded(self) -> np.dtype[Any]:
        """As what it is delivered."""
        return self.stored if self.cast is None else np.dtype(self.cast)

    def value(self, data: memoryview) -> Any:
        """One value."""
        if self.kind == "str":
            return str(data, "utf-8")
        if self.kind == "bytes":
            return bytes(data)
        array = np.frombuffer(data, self.stored).copy()
        array = array if self.shape is None else array.reshape(self.shape)
        return array if self.cast is None else array.astype(self.cast)

    def batch(self, group: Group, rows: Any, column: int, room: Room) -> Any:
        """The values of some rows, numbers or a slice: one array if they are alike, else a list.

        Args:
            group: Has their bytes.
            rows: Numbers, or a slice.
            column: The number of the field.
            room: Where an array goes.
        """
        nbytes = group.nbytes[rows, column]
        if self.kind != "array" or not len(nbytes) or nbytes[0] < 0 or (nbytes != nbytes[0]).any():
            numbers = np.arange(len(group.samples))[rows].tolist()
            views = [_view(group, row, column) for row in numbers]
            return [None if view is None else self.value(view) for view in views]
        count, length, dtype = len(nbytes), int(nbytes[0]) // self.stored.itemsize, self.loaded
        offsets, whole = group.offset[rows, column], None
        if dtype == self.stored and (np.diff(offsets) == nbytes[0]).all():
            whole = group.lend(int(offsets[0]), count * int(nbytes[0]))
        if whole is not None:
            found = whole.view(dtype).reshape(count, length)
        else:
            found = room(count * length * dtype.itemsize).view(dtype).reshape(count, length)
            gather(group.ring.bytes, offsets, self.stored, found)
        return found if self.shape is None else found.reshape(count, *self.shape)


def gather(
    memory: NDArray[np.uint8], offsets: Numbers, stored: np.dtype[Any], found: NDArray[Any]
) -> None:
    """Copy pieces of equal length, one for each row of ``found``; see [Note: copies and the lock].

    Args:
        memory: Has the pieces.
        offsets: Where they begin.
        stored: Of what they are.
        found: ``[pieces, length]`` of the same or another dtype, in C order.
    """
    nbytes = found.shape[1] * stored.itemsize
    if not nbytes or not len(offsets):
        return
    start, steps = int(offsets[0]), np.diff(offsets)
    if (steps == nbytes).all():
        found[...] = (
            memory[start : start + found.shape[0] * nbytes].view(stored).reshape(found.shape)
        )
    elif found.dtype == stored and not (steps % nbytes).any():
        phase = start % nbytes
        rows = memory[phase : len(memory) - (len(memory) - phase) % nbytes].reshape(-1, nbytes)
        out = found.view(np.uint8)
        np.take(rows, offsets // nbytes, axis=0, out=out, mode="clip")  # "raise" would copy twice
    elif nbytes >= LONG_BYTES:
        for row, offset in zip(found, offsets.tolist(), strict=True):
            row[...] = memory[offset : offset + nbytes].view(stored)
    else:
        pieces = np.ndarray((len(memory) - nbytes + 1,), f"V{nbytes}", memory.data, strides=(1,))
        found[...] = pieces[offsets].view(stored).reshape(found.shape)


def samples_of(index: Index, root: str, group: Group, rows: Sequence[int]) -> list[Sample]:
    """Rows of a group as samples."""
    runs = np.searchsorted(index.runs["first"], group.samples, side="right") - 1
    inside = group.samples - index.runs["first"][runs]
    return [
        Sample(
            index=int(group.samples[row]),
            fields={name: _view(group, row, i) for i, name in enumerate(index.fields)},
            label=int(index.labels[group.samples[row]]) if len(index.labels) else None,
            path=f"{root}/{index.files.name(int(group.file[row]))}",
            row=int(inside[row]) if not index.runs["file_step"][runs[row]] else 0,
        )
        for row in rows
    ]


def _view(group: Group, row: int, column: int) -> memoryview | None:
    start, nbytes = int(group.offset[row, column]), int(group.nbytes[row, column])
    return None if nbytes < 0 else group.ring.bytes[start : start + nbytes].data


# -- what "auto" and "raw" mean ----------------------------------------------------------------------


def columns_of(index: Index) -> list[Column] | None:
    """The columns of formats whose values are stored as they are; None: samples are to be decoded."""
    return _columns(index.format, index.meta, index.fields)


def raw_columns(index: Index) -> list[Column]:
    """Every field as bytes: arrays of uint8, where they are equally long."""
    return [Column(name=name) for name in index.fields]


def _columns(name: str, meta: Mapping[str, Any], fields: Sequence[str]) -> list[Column] | None:
    if name == "packed":
        return _columns(meta["source"], meta["meta"], fields)
    if name in ("npy", "tokens"):
        cast = "int64" if name == "tokens" else None
        shape = tuple(meta["shape"])
        return [Column(name=fields[0], dtype=meta["dtype"], shape=shape, cast=cast)]
    if name == "safetensors":
        return [
            Column(name=field, dtype=facts["dtype"], shape=tuple(facts["shape"]))
            for field, facts in meta["fields"].items()
        ]
    if name == "arrow":
        return [_arrow_column(field, kind) for field, kind in meta["fields"].items()]
    return None


def _arrow_column(field: str, kind: str) -> Column:
    what, _, dtype = kind.partition(" ")
    if what == "number":
        return Column(name=field, dtype=dtype, shape=())
    if what == "list":
        return Column(name=field, dtype=dtype)
    return Column(name=field, kind="str" if what == "str" else "bytes")


def decoder_of(index: Index) -> Decode:
    """How a sample of a format without columns is decoded. Raises ConfigError: a package is missing."""
    return _decoder(index.format, index.meta)


def _decoder(name: str, meta: Mapping[str, Any]) -> Decode:
    if name == "packed" and meta["source"] != "parquet":
        return _decoder(meta["source"], meta["meta"])
    if name == "webdataset":
        return _webdataset
    if name == "mds":
        return partial(_mds, meta)
    if name == "images":
        return _image_and_label
    if name == "parquet":
        return _row_group
    raise ConfigError(f"samples of the format {name} have no decoder: pass decode=, a function")


def image(data: memoryview | bytes) -> NDArray[np.uint8]:
    """An image as uint8 ``[height, width, 3]``, by Pillow. Raises DatasetError: it is damaged."""
    pillow = need("PIL.Image", "decoding images")
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            return np.array(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DatasetError(f"an image of {len(data)} bytes does not decode: {error}") from error


def _image_and_label(sample: Sample) -> Any:
    pixels = image(sample.data)
    return pixels if sample.label is None else (pixels, sample.label)


def _webdataset(sample: Sample) -> dict[str, Any]:
    return {
        name: _by_extension(name, data) for name, data in sample.fields.items() if data is not None
    }


def _by_extension(name: str, data: memoryview) -> Any:
    last = name.rpartition(".")[2].lower()
    if last in _IMAGES:
        return image(data)
    if last in _NUMBERS:
        return int(bytes(data))
    if last == "json":
        return json.loads(bytes(data))
    if last in ("txt", "text", "transcript"):
        return str(data, "utf-8")
    if last == "npy":
        return np.load(io.BytesIO(data), allow_pickle=False)
    return bytes(data)


def _mds(meta: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    data, found = sample.data, {}
    sizes = list(meta["sizes"])
    at = 4 * sizes.count(None)
    lengths = iter(np.frombuffer(data[:at], "<u4").tolist())
    for name, encoding, size in zip(meta["names"], meta["encodings"], sizes, strict=True):
        nbytes = next(lengths) if size is None else size
        if at + nbytes > len(data):
            raise DatasetError(
                f"sample {sample.index} of {sample.path!r} is damaged: column {name!r} ends beyond it"
            )
        found[name] = _mds_value(encoding, data[at : at + nbytes])
        at += nbytes
    return found


def _mds_value(encoding: str, data: memoryview) -> Any:
    kind, _, rest = encoding.partition(":")
    if kind == "bytes":
        return bytes(data)
    if kind in ("str", "json"):
        text = str(data, "utf-8")
        return text if kind == "str" else json.loads(text)
    if kind in ("jpeg", "png"):
        return image(data)
    if kind == "int":
        return int(np.frombuffer(data, "<i8")[0])
    if kind == "ndarray" and rest.count(":") == 1:
        dtype, shape = rest.split(":")
        return np.frombuffer(data, dtype).copy().reshape([int(n) for n in shape.split(",")])
    if kind.startswith(("int", "uint", "float")) and not rest:
        return np.frombuffer(data, kind)[0].item()
    raise DatasetError(
        f"the MDS encoding {encoding!r} is not known here: pass decode=, a function of the sample's bytes"
    )


def _row_group(sample: Sample) -> Any:
    parquet = need("pyarrow.parquet", "decoding Parquet")
    source = _Window(sample)
    opened = parquet.ParquetFile(source.file, metadata=parquet.read_metadata(sample.path))
    try:
        return opened.read_row_group(sample.row, use_threads=False)
    finally:
        source.let_go()


class _Window:
    """A row group's bytes, at their places in a file of which nothing else is there."""

    def __init__(self, sample: Sample) -> None:
        pa = need("pyarrow", "decoding Parquet")
        parquet = need("pyarrow.parquet", "decoding Parquet")
        group = parquet.read_metadata(sample.path).row_group(sample.row)
        columns = [group.column(i) for i in range(group.num_columns)]
        pages = [c.data_page_offset for c in columns]
        pages += [c.dictionary_page_offset for c in columns if c.has_dictionary_page]
        self._start, self._data, self._at = min(pages), sample.data, 0
        self.closed = False
        self.file = pa.PythonFile(self, mode="r")

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._start + len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        start = self._at - self._start
        stop = len(self._data) if nbytes < 0 else start + nbytes
        if start < 0:
            raise DatasetError("a row group reaches for bytes outside of it")
        data = bytes(self._data[start:stop])
        self._at += len(data)
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def let_go(self) -> None:
        self._data = memoryview(b"")
