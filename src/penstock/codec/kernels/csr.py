"""The hot loops of the codec ``csr``: rows of 256 elements, a column and a value for each kept."""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from penstock.codec.base import Words

ROW: Final = 256


@numba.njit(nogil=True, cache=True)
def count(words: Words, counts: Words) -> int:
    """Fill ``counts`` (u16, one per row) with how many words of each row are not zero; their sum."""
    total: Any = 0
    for row in range(counts.size):
        kept: Any = 0
        for word in words[row * ROW : (row + 1) * ROW]:
            kept += np.int64(word != 0)
        counts[row] = kept
        total += kept
    return int(total)


@numba.njit(nogil=True, cache=True)
def pack(words: Words, counts: Words, values: Words, columns: Words) -> None:
    """Fill ``values`` and ``columns``, which are as long as ``counts`` sums up to.

    Without a branch per word, as in [Note: no branch per word] of the codec ``zero-value``.
    """
    place: Any = 0
    for row in range(counts.size):
        line = words[row * ROW : (row + 1) * ROW]
        end = place + np.int64(counts[row])
        if place + line.size <= values.size:  # words may be others now than when they were counted
            for column in range(line.size):
                values[place] = line[column]
                columns[place] = column
                place += np.int64(line[column] != 0)
        else:
            for column in range(line.size):
                if line[column] != 0 and place < end:
                    values[place] = line[column]
                    columns[place] = column
                    place += 1
        place = end


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
