"""The clear twin of the kernels of the codec ``csr``."""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Words
from penstock.codec.kernels.csr import ROW


def count(words: Words, counts: Words) -> int:
    """As the kernel's."""
    rows = np.flatnonzero(words) // ROW
    counts[:] = np.bincount(rows, minlength=counts.size)
    return int(rows.size)


def pack(words: Words, counts: Words, values: Words, columns: Words) -> None:
    """As the kernel's."""
    places = np.flatnonzero(words)
    values[:] = words[places]
    columns[:] = places % ROW


def check(counts: Words, columns: Words, elements: int) -> bool:
    """As the kernel's."""
    ends = np.cumsum(counts, dtype=np.int64)
    rows = np.split(columns.astype(np.int64), ends[:-1]) if counts.size else []
    lengths = np.minimum(ROW, elements - ROW * np.arange(counts.size))
    return all(
        (np.diff(row) > 0).all() and (row < length).all()
        for row, length in zip(rows, lengths, strict=True)
    )


def unpack(counts: Words, values: Words, columns: Words, words: Words) -> None:
    """As the kernel's."""
    words[:] = 0
    rows = np.repeat(np.arange(counts.size), counts)
    words[rows * ROW + columns] = values
