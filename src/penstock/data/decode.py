"""From bytes in the read memory to values: whole batches of arrays at once, or sample by sample.

A decoded value is a copy, something made from the bytes, or a block that was lent for it.

[Note: copies and the lock]
    NumPy lets go of the interpreter's lock while it copies from one range to another, and not while it
    picks a few items by number. Whoever held it for half a millisecond would hold up the thread of the
    engine, and flash would have nothing to do meanwhile. So what is long is copied range by range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, DatasetError, PenstockError
from penstock.data.coded import check_mds, image_and_label, mds, row_group, told, webdataset
from penstock.data.group import SampleGroup
from penstock.data.index import Index
from penstock.data.permutation import Numbers
from penstock.data.sample import Decode, Sample

LONG_BYTES: Final = 16 << 10
"""Pieces that are copied one by one."""
_LONGEST: Final = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
"""Of torch's numbers, bytes by NumPy's letter of their kind."""
T = TypeVar("T")
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
        """One value. Raises DatasetError: the bytes are not of the column's kind."""
        try:
            if self.kind == "str":
                return str(data, "utf-8")
            if self.kind == "bytes":
                return bytes(data)
            array = np.frombuffer(data, self.stored).copy()
            array = array if self.shape is None else array.reshape(self.shape)
        except ValueError as error:
            raise DatasetError(
                f"a value of {self.name!r}, {len(data)} bytes, is damaged: {error}"
            ) from error
        return self._checked(array if self.cast is None else array.astype(self.cast))

    def _checked(self, loaded: NDArray[Any]) -> NDArray[Any]:
        """The same. Raises DatasetError: a number is too large for what it was converted to."""
        wraps = self.cast == "int64" and self.stored.kind == "u" and self.stored.itemsize == 8
        if wraps and (loaded < 0).any():
            raise DatasetError(
                f"{self.name!r} has a number from 2^63 on, which does not fit int64: pass decode=, a"
                ' function of the sample\'s bytes, or "raw"'
            )
        return loaded

    def batch(self, group: SampleGroup, rows: Any, column: int, room: Room) -> Any:
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
            gather(group.memory.bytes, offsets, self.stored, found)
            self._checked(found)
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


def samples_of(index: Index, root: str, group: SampleGroup, rows: Sequence[int]) -> list[Sample]:
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


def _view(group: SampleGroup, row: int, column: int) -> memoryview | None:
    start, nbytes = int(group.offset[row, column]), int(group.nbytes[row, column])
    return None if nbytes < 0 else group.memory.bytes[start : start + nbytes].data


# -- what "auto" and "raw" mean ----------------------------------------------------------------------


def columns_of(index: Index) -> list[Column] | None:
    """The columns of formats whose values are stored as they are; None: samples are to be decoded."""
    return _known(lambda: _columns(index.format, index.meta, index.fields))


def raw_columns(index: Index) -> list[Column]:
    """Every field as bytes: arrays of uint8, where they are equally long."""
    return [Column(name=name) for name in index.fields]


def _columns(name: str, meta: Mapping[str, Any], fields: Sequence[str]) -> list[Column] | None:
    if name == "packed":
        return _columns(meta["source"], meta["meta"], fields)
    if name in ("npy", "tokens"):
        cast = "int64" if name == "tokens" else _native(meta["dtype"])
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


def _native(dtype: str) -> str | None:
    """To what an array is converted for torch. Raises ConfigError: to nothing."""
    stored = np.dtype(dtype)
    if stored.kind not in "biufc" or stored.itemsize > _LONGEST[stored.kind]:
        raise ConfigError(
            f"an array of {stored} makes no tensor: pass decode=, a function of the sample's bytes, or"
            ' "raw"'
        )
    return None if stored.isnative else stored.newbyteorder("=").str


def _arrow_column(field: str, kind: str) -> Column:
    what, _, dtype = kind.partition(" ")
    if what == "number":
        return Column(name=field, dtype=dtype, shape=())
    if what == "list":
        return Column(name=field, dtype=dtype)
    return Column(name=field, kind="str" if what == "str" else "bytes")


def decoder_of(index: Index) -> Decode:
    """How a sample of a format without columns is decoded. Raises ConfigError: a package is missing."""
    return _known(lambda: _decoder(index.format, index.meta))


def _known(look: Callable[[], T]) -> T:
    """Look up what an index says of values. Raises DatasetError: it makes no sense."""
    try:
        return look()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PenstockError):
            raise
        raise DatasetError(
            f"what the data set says of its values makes no sense ({type(error).__name__}: {error})"
        ) from error


def _decoder(name: str, meta: Mapping[str, Any]) -> Decode:
    if name == "packed" and meta["source"] != "parquet":
        return _decoder(meta["source"], meta["meta"])
    if name == "webdataset":
        return told(webdataset)
    if name == "mds":
        check_mds(meta)
        return told(partial(mds, meta))
    if name == "images":
        return told(image_and_label)
    if name == "parquet":
        return told(row_group)
    raise ConfigError(f"samples of the format {name} have no decoder: pass decode=, a function")
