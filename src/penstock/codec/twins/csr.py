"""The clear twin of the kernels of the codec ``csr``."""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Words
from penstock.codec.kernels.csr import ROW


def count_rows(bitmap: Words, counts: Words) -> None:
    """As the kernel's."""
    bits = np.unpackbits(bitmap.view(np.uint8), bitorder="little")
    rows = np.pad(bits, (0, -bits.size % ROW)).reshape(-1, ROW)
    counts[:] = rows.sum(1, dtype=np.uint16)


def counts_agree(bitmap: Words, counts: Words) -> bool:
    """As the kernel's."""
    found = np.empty_like(counts)
    count_rows(bitmap, found)
    return np.array_equal(found, counts)


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
