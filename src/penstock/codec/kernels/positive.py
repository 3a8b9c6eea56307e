"""Kernels of the codec ``positive``: a comparison and a bit. See [Note: eight flags at once]."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from penstock.codec.base import Bytes, Words
from penstock.codec.kernels.bits import CHUNK, beyond, gather, spread

__all__ = ["beyond", "pack", "unpack"]


@njit(nogil=True, cache=True)
def pack(words: Words, infinity: Any, bitmap: Bytes) -> None:
    """Store one bit per word that is set unless the float is ``<= 0``.

    Args:
        words: Floats as u16, u32 or u64.
        infinity: The word of minus infinity; of the same type.
        bitmap: One bit per word, rounded up to a multiple of eight bytes; filled.
    """
    flags = np.zeros(CHUNK, np.uint8)
    top = words.dtype.type(infinity)
    sign = words.dtype.type(words.dtype.type(1) << words.dtype.type(words.itemsize * 8 - 1))
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        count = chunk.size
        for index in range(count):
            word = chunk[index]
            flags[index] = np.uint8(((word != 0) & (word < sign)) | (word > top))
        flags[count : (count + 7) // 8 * 8] = 0
        gather(flags.view(np.uint64), bitmap[start // 8 :], count)
    bitmap[(words.size + 7) // 8 :] = 0


@njit(nogil=True, cache=True)
def unpack(bitmap: Bytes, one: Any, words: Words) -> None:
    """Fill ``words`` with ``one`` where ``bitmap`` has a bit, else with 0."""
    spread(bitmap, words.dtype.type(0), words.dtype.type(one), words)
