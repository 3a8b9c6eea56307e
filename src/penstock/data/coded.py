"""Samples in a coding, one by one: images, members by their extension, MosaicML's rows, row groups."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, DatasetError, PenstockError
from penstock.data.formats.base import need
from penstock.data.formats.npy import read_header
from penstock.data.sample import Decode, Sample

_IMAGES: Final = frozenset(
    {"bmp", "gif", "jpeg", "jpg", "pgm", "png", "ppm", "tif", "tiff", "webp"}
)
_NUMBERS: Final = frozenset({"class", "cls", "cls2", "count", "id", "index", "inx"})


def image(data: memoryview | bytes) -> NDArray[np.uint8]:
    """An image as uint8 ``[height, width, 3]``, by Pillow. Raises DatasetError: it is damaged."""
    pillow = need("PIL.Image", "decoding images")
    try:
        with pillow.open(io.BytesIO(data)) as opened:
            return np.array(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise DatasetError(f"an image of {len(data)} bytes does not decode: {error}") from error


def told(decode: Decode) -> Decode:
    """Return the same function, which raises DatasetError for everything that is wrong with a sample."""
    return partial(_told, decode)


def _told(decode: Decode, sample: Sample) -> Any:
    try:
        return decode(sample)
    except (PenstockError, MemoryError):
        raise
    except Exception as error:  # there is no list of what other packages raise
        raise DatasetError(
            f"sample {sample.index} of {sample.path!r} is damaged: {type(error).__name__}: {error}"
        ) from error


def image_and_label(sample: Sample) -> Any:
    """Pixels, and the label if there are labels."""
    pixels = image(sample.data)
    return pixels if sample.label is None else (pixels, sample.label)


def webdataset(sample: Sample) -> dict[str, Any]:
    """The members of a key, each decoded as its extension says."""
    return {
        name: _by_extension(name, data) for name, data in sample.fields.items() if data is not None
    }


def _by_extension(name: str, data: memoryview) -> Any:
    last = name.rpartition(".")[2].lower()
    if last in _IMAGES:
        return image(data)
    if last in _NUMBERS:
        return int(bytes(data))
    if last in ("json", "jsn"):
        return json.loads(bytes(data))
    if last in ("txt", "text", "transcript"):
        return str(data, "utf-8")
    if last == "npy":
        return _array(data)
    return bytes(data)


def _array(data: memoryview) -> NDArray[Any]:
    """Decode what ``numpy.save`` wrote, in no more memory than there are bytes."""
    start, shape, fortran, dtype = read_header(io.BytesIO(data))
    if dtype.hasobject:
        raise ValueError(f"an array of {dtype} would run code")
    values = np.frombuffer(data, dtype, math.prod(shape), start)
    return values.copy().reshape(shape, order="F" if fortran else "C")


def mds(meta: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
    """A row of MosaicML's. Raises DatasetError: it is damaged."""
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
        kind, _, rest = encoding.partition(":")
        found[name] = _MDS_VALUES[kind](data[at : at + nbytes], rest)
        at += nbytes
    return found


def check_mds(meta: Mapping[str, Any]) -> None:
    """Raise ConfigError unless all columns can be decoded."""
    for name, encoding in zip(meta["names"], meta["encodings"], strict=True):
        if encoding.partition(":")[0] not in _MDS_VALUES:
            raise ConfigError(
                f"the MDS encoding {encoding!r} of the column {name!r} is not known here: pass decode=, a"
                " function of the sample's bytes"
            )


def _mds_array(data: memoryview, kind: str) -> NDArray[Any]:
    """Decode an array whose dtype code and shape precede the values unless the encoding names them."""
    dtype, _, sizes = kind.partition(":")
    if not dtype:
        dtype, data = f"<{'uif'[data[0] % 8]}{data[0] // 8}", data[1:]
    shape = [int(size) for size in sizes.split(",")] if sizes else None
    if shape is None:
        axes, width = data[0] >> 2, 1 << (data[0] & 3)
        shape = np.frombuffer(data[1 : 1 + axes * width], f"<u{width}").tolist()
        data = data[1 + axes * width :]
    return np.frombuffer(data, dtype).copy().reshape(shape)


def _mds_pixels(data: memoryview, _: str) -> NDArray[np.uint8]:
    """As Pillow has them in memory, behind width, height, and the length of the mode's name."""
    width, height, letters = np.frombuffer(data[:12], "<u4").tolist()
    mode, pixels = str(data[12 : 12 + letters], "ascii"), data[12 + letters :]
    pillow = need("PIL.Image", "decoding images")
    return np.array(pillow.frombytes(mode, (width, height), bytes(pixels)).convert("RGB"))


def _mds_number(dtype: str) -> _MdsValue:
    return lambda data, _: np.frombuffer(data, dtype)[0].item()


_MdsValue = Callable[[memoryview, str], Any]
_MDS_VALUES: Final[Mapping[str, _MdsValue]] = {
    "bytes": lambda data, _: bytes(data),
    "str": lambda data, _: str(data, "utf-8"),
    "json": lambda data, _: json.loads(bytes(data)),
    "int": _mds_number("<i8"),
    **{f"{k}{8 * n}": _mds_number(f"<{k[0]}{n}") for k in ("int", "uint") for n in (1, 2, 4, 8)},
    **{f"float{8 * n}": _mds_number(f"<f{n}") for n in (2, 4, 8)},
    "str_int": lambda data, _: int(bytes(data)),
    "str_float": lambda data, _: float(bytes(data)),
    "str_decimal": lambda data, _: Decimal(str(data, "ascii")),
    "ndarray": _mds_array,
    "jpeg": lambda data, _: image(data),
    "png": lambda data, _: image(data),
    "pil": _mds_pixels,
}
"""By the encoding's name: the value of a column's bytes and of what follows the name."""


def row_group(sample: Sample) -> Any:
    """A ``pyarrow.Table``."""
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
