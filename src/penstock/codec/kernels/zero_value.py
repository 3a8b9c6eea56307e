"""Kernels of the codec ``zero-value``: a bitmap and the words that are not zero.

[Note: no branch per word]
    Half of the words of an activation may be zero, in an order that a processor cannot predict. So each
    word is written to the next free place, zero or not, and the place advances by one only if it was
    not: the next word overwrites a zero. The place is a sum over all words so far, and would be one long
    dependency chain; it is cut every 64 words, since the bitmap's word gives the advance.

    Blocks for which ``packed`` has no room for every word, kept or not, use the loop with branches: the
    write after the last kept word must not hit anything else. Words are read twice, so they may differ
    the second time if another thread overwrites them meanwhile; then the frame is worthless, but no
    other memory is touched. Decoding reads at most one word past the last, and multiplies by the bit:
    LLVM turns a choice or a mask into a branch, which took eight times as long.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from penstock.codec.base import Words

_ONE = np.uint64(1)
_BLOCK = 64


@numba.njit(nogil=True, cache=True, inline="always")
def ones(bits: Any) -> Any:
    """Return the number of set bits of a u64; compiles to one instruction."""
    bits = bits - ((bits >> np.uint64(1)) & np.uint64(0x5555555555555555))
    two = np.uint64(0x3333333333333333)
    bits = (bits & two) + ((bits >> np.uint64(2)) & two)
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((bits * np.uint64(0x0101010101010101)) >> np.uint64(56))


@numba.njit(nogil=True, cache=True)
def pack(words: Words, bitmap: Words, packed: Words) -> int:
    """Split ``words`` into ``bitmap`` and the front of ``packed``.

    Args:
        words: u8, u16, u32 or u64, any number.
        bitmap: u64, one bit per word, rounded up.
        packed: Room for the kept words, of the same type.

    Returns:
        Number of kept words; -1 if they are more than ``packed`` holds.
    """
    place: Any = 0
    for block in range(bitmap.size):
        start = block * _BLOCK
        length = min(_BLOCK, words.size - start)
        bits = np.uint64(0)
        for index in range(length):
            bits |= np.uint64(words[start + index] != 0) << np.uint64(index)
        bitmap[block] = bits
        end = place + ones(bits)
        if place + length <= packed.size:
            for index in range(length):
                word = words[start + index]
                packed[place] = word
                place += np.int64(word != 0)
        elif end > packed.size:
            return -1
        else:
            for index in range(length):
                if (bits >> np.uint64(index)) & _ONE:
                    packed[place] = words[start + index]
                    place += 1
        place = end
    return int(place)


@numba.njit(nogil=True, cache=True)
def count(bitmap: Words, elements: int) -> int:
    """Return the number of set bits in a bitmap of ``elements``; -1 if one is set beyond them."""
    total: Any = 0
    for bits in bitmap:
        total += ones(bits)
    left = elements % _BLOCK
    if left and bitmap[-1] >> np.uint64(left) != 0:
        return -1
    return int(total)


@numba.njit(nogil=True, cache=True)
def unpack(bitmap: Words, packed: Words, words: Words) -> None:
    """Fill ``words`` with ``packed`` where ``bitmap`` has bits, and zero elsewhere.

    Unchecked: ``bitmap`` must have exactly ``packed.size`` bits set, none beyond ``words.size``.
    """
    place: Any = 0
    for block in range(bitmap.size):
        start = block * _BLOCK
        length = min(_BLOCK, words.size - start)
        bits = bitmap[block]
        end = place + ones(bits)
        if end < packed.size:
            for index in range(length):
                bit = (bits >> np.uint64(index)) & _ONE
                words[start + index] = packed[place] * words.dtype.type(bit)
                place += np.int64(bit)
        elif bits == 0:
            words[start : start + length] = 0
        else:
            for index in range(length):
                if (bits >> np.uint64(index)) & _ONE:
                    words[start + index] = packed[place]
                    place += 1
                else:
                    words[start + index] = 0
        place = end
