"""Packing of eight flags in a byte.

[Note: eight flags at once]
    Flags are one byte each, in a buffer that stays in the first cache, because a processor compares or
    selects with 64 of those at once. Eight of them that are 0 or 1, as a u64, are multiplied so that flag
    ``k`` meets bit ``56 + k`` and no carry gets there: ``flags * 0x0102040810204080 >> 56`` is a byte.
    To unpack, the byte is copied to all eight, and each keeps its own bit.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.codec.base import Bytes, Words

CHUNK: Final = 4096
"""Elements whose flags are in the buffer at once; a multiple of 64."""

_GATHER: Final = np.uint64(0x0102040810204080)
_TOP: Final = np.uint64(56)
_COPY: Final = np.uint64(0x0101010101010101)
_OWN: Final = np.uint64(0x8040201008040201)


@njit(nogil=True, cache=True)
def gather(flags: Words, bitmap: Bytes, count: int) -> None:
    """Pack the first ``count`` flags, 0 or 1, u64 of eight each, to the front of ``bitmap``.

    Flags from ``count`` on, to a multiple of eight, must be 0.
    """
    for index in range((count + 7) // 8):
        bitmap[index] = np.uint8((flags[index] * _GATHER) >> _TOP)


@njit(nogil=True, cache=True)
def beyond(bitmap: Bytes, count: int) -> bool:
    """Return True if a bit from ``count`` on is set, in a bitmap with at least ``count`` bits."""
    whole = count // 8
    if whole == bitmap.size:
        return False
    found = np.uint8(bitmap[whole] >> np.uint8(count % 8))
    for index in range(whole + 1, bitmap.size):
        found |= bitmap[index]
    return bool(found != 0)


@njit(nogil=True, cache=True)
def spread(bitmap: Bytes, clear: Any, set_: Any, words: Words) -> None:
    """Fill ``words`` with ``set_`` where ``bitmap`` has a bit, else with ``clear``, all of one type."""
    flags = np.empty(CHUNK, np.uint8)
    eights = flags.view(np.uint64)
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        part = bitmap[start // 8 :]
        for index in range((chunk.size + 7) // 8):
            eights[index] = (np.uint64(part[index]) * _COPY) & _OWN
        for index in range(chunk.size):
            chunk[index] = set_ if flags[index] != 0 else clear
