"""Kernels of the codec ``narrow``: least and greatest, differences, and masks of two values."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.codec.base import Bytes, Words
from penstock.codec.kernels.bits import CHUNK, beyond, gather, spread

__all__ = ["add", "beyond", "pack_two", "subtract", "survey", "unpack_two", "widest"]

_WIDEST: Final = {1: 0, 2: 0xFF, 4: 0xFFFF, 8: 0xFFFF_FFFF}


def widest(itemsize: int) -> np.uint64:
    """Return the greatest difference that fits in fewer bytes than an element has."""
    return np.uint64(_WIDEST[itemsize])


@njit(nogil=True, cache=True)
def survey(words: Words, widest: np.uint64) -> Any:
    """Find least and greatest word; stop early if there are over two, farther apart than ``widest``.

    Args:
        words: Signed or unsigned, at least one.
        widest: The greatest difference of interest.

    Returns:
        The least and the greatest of the words seen, and True if there was no other.
    """
    of = words.dtype.type
    low = high = words[0]
    only_two = True
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        before_low, before_high = low, high
        for index in range(chunk.size):
            low = chunk[index] if chunk[index] < low else low
            high = chunk[index] if chunk[index] > high else high
        if only_two:
            others = of(0)
            for index in range(chunk.size):
                is_other = chunk[index] != low and chunk[index] != high
                others = of(others | (of(1) if is_other else of(0)))
            only_two = others == 0
            for before in (before_low, before_high):
                only_two &= before in (low, high)
        if not only_two and np.uint64(np.uint64(high) - np.uint64(low)) > widest:
            break
    return low, high, only_two


@njit(nogil=True, cache=True)
def subtract(words: Words, least: Any, out: Words) -> None:
    """Fill ``out`` with ``words - least``, unsigned, in its narrower type."""
    for index in range(words.size):
        out[index] = words[index] - least


@njit(nogil=True, cache=True)
def add(packed: Words, least: Any, words: Words) -> None:
    """Fill ``words`` with ``packed + least``, which wraps around."""
    for index in range(words.size):
        words[index] = least + words.dtype.type(packed[index])


@njit(nogil=True, cache=True)
def pack_two(words: Words, other: Any, bitmap: Bytes) -> None:
    """Fill ``bitmap``, rounded up to u64, with one bit per word that is set if it is ``other``."""
    flags = np.zeros(CHUNK, np.uint8)
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        count = chunk.size
        for index in range(count):
            flags[index] = np.uint8(chunk[index] == other)
        flags[count : (count + 7) // 8 * 8] = 0
        gather(flags.view(np.uint64), bitmap[start // 8 :], count)
    bitmap[(words.size + 7) // 8 :] = 0


@njit(nogil=True, cache=True)
def unpack_two(bitmap: Bytes, least: Any, other: Any, words: Words) -> None:
    """Fill ``words`` with ``other`` where ``bitmap`` has a bit, else with ``least``."""
    spread(bitmap, least, other, words)
