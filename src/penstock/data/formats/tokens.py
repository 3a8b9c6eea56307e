"""Raw token files, as nanoGPT's: a sample is a context of tokens and the one that follows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from penstock.core.errors import ConfigError, DatasetError
from penstock.data.formats.base import IndexingJob
from penstock.data.index import IndexBuilder

OPTIONS: Final[Mapping[str, Any]] = {
    "dtype": "uint16",
    "context": None,
    "stride": None,
    "extra": 1,
    "header_bytes": 0,
}
_MOST: Final = 2**40
"""Tokens of a sample, or bytes of a header."""


def build(job: IndexingJob) -> IndexBuilder:
    """Index files of one integer after another: a regular run for each; no window spans two files."""
    context, extra = job.options["context"], job.options["extra"]
    stride = context if job.options["stride"] is None else job.options["stride"]
    start = job.options["header_bytes"]
    if context is None:
        raise ConfigError(
            "a token file needs the option context=..., the tokens of a sample; others are stride=..."
            " (context if not given), extra=..., tokens beyond (1), and header_bytes=... (0)"
        )
    numbers = {"context": (context, 1), "stride": (stride, 1), "extra": (extra, 0)}
    for name, (value, least) in {**numbers, "header_bytes": (start, 0)}.items():
        if type(value) is not int or not least <= value <= _MOST:
            raise ConfigError(
                f"option {name} of a token file is {value!r}; it must be a whole number from {least} to"
                f" {_MOST}"
            )
    dtype = _dtype(job.options["dtype"])
    builder = IndexBuilder("tokens", ("tokens",))
    builder.meta = {"dtype": dtype.str, "shape": [context + extra]}
    length = (context + extra) * dtype.itemsize
    for number, path in enumerate(job.paths()):
        room = os.path.getsize(path) - start
        if room < 0 or room % dtype.itemsize:
            raise DatasetError(f"{path!r}: {room} bytes are no whole number of {dtype}")
        count = max(0, (room - length) // (stride * dtype.itemsize) + 1)
        builder.regular(number, count, (start, stride * dtype.itemsize, length))
    return builder


def _dtype(name: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except (TypeError, ValueError, OverflowError, SyntaxError) as error:
        raise ConfigError(f"dtype {name!r} of tokens is unknown") from error
    if dtype.kind not in "ui" or dtype.shape:
        raise ConfigError(f"dtype {name!r} of tokens is no integer")
    return dtype
