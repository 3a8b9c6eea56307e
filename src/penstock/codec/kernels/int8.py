"""Kernels of blockwise int8.

The inner loops have no branch. A value is rounded to nearest even by adding 1.5 * 2^23, whose last bit is
1: the low bits are then the integer.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.codec.base import Words
from penstock.codec.kernels.casts import as_bits, as_float, largest_magnitude

_BLOCK: Final = 256
_STEPS: Final = np.float32(126)
_LARGEST: Final = np.float32(3.4028234663852886e38)
_INFINITY: Final = np.float32(np.inf)
_NAN: Final = np.float32(np.nan)
_ROUND: Final = np.float32(12582912.0)
_ROUND_BITS: Final = np.int32(0x4B400000)


@njit(nogil=True, cache=True, error_model="numpy")
def to_int8(source: Words, scales: Words, codes: Words, least: Any) -> None:
    """Encode float32 bits, uint32[n], to one step per 256, float32, at least ``least``, and int8[n].

    See [Note: int8] in ``penstock.codec.int8``.
    """
    for block in range(scales.size):
        start = block * _BLOCK
        part = source[start : start + _BLOCK]
        top = as_float(largest_magnitude(part))
        step = max(np.float32(top / _STEPS), least)
        scales[block] = step
        _block_to_int8(part.view(np.float32), codes[start : start + _BLOCK], step)


@njit(nogil=True, cache=True, error_model="numpy")
def _block_to_int8(source: Words, codes: Words, step: Any) -> None:
    for i in range(source.size):
        value = source[i]
        finite = abs(value) <= _LARGEST
        scaled = np.float32((value if finite else np.float32(0)) / step)
        code = np.int32(as_bits(scaled + _ROUND)) - _ROUND_BITS
        beyond = np.int32(-127) if value < np.float32(0) else np.int32(-128)
        beyond = np.int32(127) if value > np.float32(0) else beyond
        codes[i] = np.int8(code if finite else beyond)


@njit(nogil=True, cache=True)
def from_int8(scales: Words, codes: Words, out: Words) -> None:
    """Decode the result of ``to_int8`` to float32[n]."""
    for block in range(scales.size):
        start = block * _BLOCK
        part = codes[start : start + _BLOCK]
        _block_from_int8(part, out[start : start + _BLOCK], scales[block])


@njit(nogil=True, cache=True)
def _block_from_int8(codes: Words, out: Words, step: Any) -> None:
    for i in range(out.size):
        code = np.int32(codes[i])
        value = np.float32(np.float32(code) * step)
        value = min(max(value, -_LARGEST), _LARGEST)
        value = _INFINITY if code == 127 else value
        value = -_INFINITY if code == -127 else value
        out[i] = _NAN if code == -128 else value
