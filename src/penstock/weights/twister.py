"""The Mersenne twister of torch's CPU generator, without its numbers: the state after many of them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

_LENGTH: Final = 624
_AHEAD: Final = 397
_UPPER: Final = np.uint32(0x8000_0000)
_LOWER: Final = np.uint32(0x7FFF_FFFF)
_MATRIX: Final = np.uint32(0x9908_B0DF)
_ZERO: Final = np.uint32(0)
_ONE: Final = np.uint32(1)


@njit(nogil=True, cache=True, inline="always")
def _renewed(word: np.uint32, following: np.uint32, other: np.uint32) -> np.uint32:
    mixed = (word & _UPPER) | (following & _LOWER)
    return other ^ (mixed >> _ONE) ^ ((_ZERO - (mixed & _ONE)) & _MATRIX)


@njit(nogil=True, cache=True)
def twist(words: NDArray[np.uint32], times: int) -> None:
    """Renew all words of a state, in place, several times (Matsumoto and Nishimura 1998, section 2).

    Args:
        words: ``uint32[624]``.
        times: How often; each is 624 numbers of 32 bits.
    """
    for _ in range(times):
        for i in range(_LENGTH - _AHEAD):
            words[i] = _renewed(words[i], words[i + 1], words[i + _AHEAD])
        for i in range(_LENGTH - _AHEAD, _LENGTH - 1):
            words[i] = _renewed(words[i], words[i + 1], words[i + _AHEAD - _LENGTH])
        words[_LENGTH - 1] = _renewed(words[_LENGTH - 1], words[0], words[_AHEAD - 1])
