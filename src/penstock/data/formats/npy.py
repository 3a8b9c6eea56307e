"""NumPy's ``.npy``: a sample is a row, ``array[i]``."""

from __future__ import annotations

import math
import os
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from penstock.core.errors import DatasetError
from penstock.core.files import open_regular
from penstock.core.units import MAX_BYTES
from penstock.data.formats.base import IndexingJob, truncated
from penstock.data.index import IndexBuilder


def build(job: IndexingJob) -> IndexBuilder:
    """Index ``.npy`` files, all of one dtype and row shape: a regular run for each file."""
    builder = IndexBuilder("npy", ("array",))
    for number, path in enumerate(job.paths()):
        start, shape, dtype = _header(path)
        facts = {"dtype": dtype.str, "shape": list(shape[1:])}
        if builder.meta and builder.meta != facts:
            raise DatasetError(f"{path!r} has rows {facts}, the files before it {builder.meta}")
        builder.meta = facts
        nbytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        size, needs = os.path.getsize(path), start + shape[0] * nbytes
        if size < needs:
            raise truncated(path, size, needs, f"its array of shape {shape}")
        builder.regular(number, shape[0], (start, nbytes, nbytes))
    return builder


def _header(path: str) -> tuple[int, tuple[int, ...], np.dtype[Any]]:
    with open(path, "rb", opener=open_regular) as file:
        try:
            start, shape, fortran, dtype = read_header(file)
        except ValueError as error:
            raise DatasetError(f"{path!r} is no .npy file: {error}") from error
    if fortran and len(shape) > 1:
        raise DatasetError(
            f"{path!r} is in Fortran order: its rows are not in one piece; save it in C"
        )
    if dtype.hasobject or not shape:
        raise DatasetError(
            f"{path!r} holds {dtype} of shape {shape}: its samples are no ranges of bytes"
        )
    return start, shape, dtype


def read_header(file: IO[bytes]) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    """Return where an array begins, its shape, whether it is in Fortran order, and its dtype.

    Args:
        file: At the beginning of what ``numpy.save`` wrote.

    Raises:
        ValueError: It is not that.
    """
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except OSError:
        raise
    except Exception as error:  # NumPy parses it as Python: there is no list of what that raises
        raise ValueError(f"its header is damaged: {error}") from error
    nbytes = math.prod(filter(None, shape)) * max(1, dtype.itemsize)
    if min(shape, default=0) < 0 or nbytes > MAX_BYTES:
        raise ValueError(f"its header is damaged: no array has the shape {shape}")
    return file.tell(), shape, fortran, dtype
