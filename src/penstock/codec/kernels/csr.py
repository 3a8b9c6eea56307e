"""The hot loops of the codec ``csr``: rows of 256 elements, and of its version 1, with columns."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from penstock.codec.base import Words
from penstock.codec.kernels.zero_value import ones

ROW: Final = 256
_WORDS: Final = ROW // 64


@numba.njit(nogil=True, cache=True)
def count_rows(bitmap: Words, counts: Words) -> None:
    """Fill ``counts`` (u16, one per row) with how many bits are set in each row's four words."""
    for row in range(counts.size):
        kept: Any = 0
        for bits in bitmap[row * _WORDS : (row + 1) * _WORDS]:
            kept += ones(bits)
        counts[row] = kept


@numba.njit(nogil=True, cache=True)
def counts_agree(bitmap: Words, counts: Words) -> bool:
    """Whether ``counts`` are what ``count_rows`` makes of the bitmap."""
    wrong = False
    for row in range(counts.size):
        kept: Any = 0
        for bits in bitmap[row * _WORDS : (row + 1) * _WORDS]:
            kept += ones(bits)
        wrong |= kept != np.int64(counts[row])
    return not wrong


@numba.njit(nogil=True, cache=True)
def check(counts: Words, columns: Words, elements: int) -> bool:
    """Whether columns rise within each row and lie in it.

    ``counts`` must sum up to ``columns.size``. A row that counts more than it is long cannot rise.
    """
    place: Any = 0
    for row in range(counts.size):
        end = place + np.int64(counts[row])
        length = min(ROW, elements - row * ROW)
        if end > place and columns[end - 1] >= length:
            return False
        falling = False
        for index in range(place + 1, end):
            falling |= columns[index] <= columns[index - 1]
        if falling:
            return False
        place = end
    return True


@numba.njit(nogil=True, cache=True)
def unpack(counts: Words, values: Words, columns: Words, words: Words) -> None:
    """Put each value in its column, and zero elsewhere. Does not check: see ``check``."""
    place: Any = 0
    for row in range(counts.size):
        line = words[row * ROW : (row + 1) * ROW]
        line[:] = 0
        end = place + np.int64(counts[row])
        for index in range(place, end):
            line[columns[index]] = values[index]
        place = end
