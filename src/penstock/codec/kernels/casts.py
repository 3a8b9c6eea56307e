"""Casts between float32 and narrower floats, on their bits.

[Note: casts on bits]
    Numba has no 16-bit floats, so a cast is integer arithmetic on the float32's bits, without a branch:
    rounding to nearest even is adding just under half of the last bit that stays (and that bit itself)
    before the rest is shifted out, and the carry runs into the exponent as it must. A result that is
    subnormal in the narrow format is rounded by adding a power of two whose last bit is the narrow
    format's smallest value. No operation takes or gives a subnormal float32 that matters, so that a
    thread which flushes them to zero makes the same bytes.

    Every operation is wrapped in ``np.uint32``, because Numba would widen the result to 64 bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.codec.base import Words

_U32: Final = np.uint32
_SIGN: Final = np.uint32(0x80000000)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)
_NAN: Final = np.uint32(0x7FC00000)

_HALF: Final = np.float32(0.5)  # its last bit is float16's smallest value, 2^-24
_HALF_BITS: Final = np.uint32(0x3F000000)
_NORMAL16: Final = np.uint32(0x38800000)  # 2^-14: below it, float16 is subnormal
_REBIAS16: Final = np.uint32(0x38000000)  # 127 - 15 in the exponent
_OFFSET16: Final = np.uint32(0x38800000)  # one more, so that a subnormal gets a leading one
_NORMAL16_FLOAT: Final = np.float32(2.0**-14)

# the same numbers as uint32, because Numba takes a literal for 64 bits
_K1: Final = np.uint32(1)
_K13: Final = np.uint32(13)
_K16: Final = np.uint32(16)


@njit(nogil=True, cache=True)
def as_float(bits: Any) -> Any:
    """Return the float32 with these bits; inlined."""
    return np.uint32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def as_bits(value: Any) -> Any:
    """Return the bits of a float32; inlined."""
    return np.float32(value).view(np.uint32)


@njit(nogil=True, cache=True)
def to_float16(source: Words, out: Words) -> None:
    """Round float32 bits, uint32[n], to float16 bits, uint16[n]; too large a value saturates."""
    for i in range(source.size):
        bits = _U32(source[i])
        magnitude = _U32(bits & _MAGNITUDE)
        odd = _U32(_U32(magnitude >> _K13) & _K1)
        rounded = _U32(_U32(_U32(magnitude - _REBIAS16) + _U32(0xFFF)) + odd)
        normal = min(_U32(rounded >> _K13), _U32(0x7BFF))
        small = _U32(as_bits(as_float(magnitude) + _HALF) - _HALF_BITS)
        result = small if magnitude < _NORMAL16 else normal
        result = _U32(0x7C00) if magnitude == _INFINITY else result
        result = _U32(0x7E00) if magnitude > _INFINITY else result
        out[i] = np.uint16(result | _U32(_U32(bits & _SIGN) >> _K16))


@njit(nogil=True, cache=True)
def from_float16(source: Words, out: Words) -> None:
    """Widen float16 bits, uint16[n], to float32 bits, uint32[n]; every NaN becomes the quiet one."""
    for i in range(source.size):
        bits = _U32(source[i])
        magnitude = _U32(bits & _U32(0x7FFF))
        moved = _U32(magnitude << _K13)
        normal = _U32(moved + _REBIAS16)
        small = as_bits(as_float(moved + _OFFSET16) - _NORMAL16_FLOAT)
        result = small if magnitude < _U32(0x400) else normal
        result = _INFINITY if magnitude == _U32(0x7C00) else result
        result = _NAN if magnitude > _U32(0x7C00) else result
        out[i] = _U32(result | _U32(_U32(bits & _U32(0x8000)) << _K16))


@njit(nogil=True, cache=True)
def to_bfloat16(source: Words, out: Words) -> None:
    """Round float32 bits, uint32[n], to bfloat16 bits, uint16[n]; too large a value saturates."""
    for i in range(source.size):
        bits = _U32(source[i])
        magnitude = _U32(bits & _MAGNITUDE)
        odd = _U32(_U32(magnitude >> _K16) & _K1)
        rounded = _U32(_U32(_U32(magnitude + _U32(0x7FFF)) + odd) >> _K16)
        result = min(rounded, _U32(0x7F7F))
        result = _U32(0x7F80) if magnitude == _INFINITY else result
        result = _U32(0x7FC0) if magnitude > _INFINITY else result
        out[i] = np.uint16(result | _U32(_U32(bits & _SIGN) >> _K16))


@njit(nogil=True, cache=True)
def from_bfloat16(source: Words, out: Words) -> None:
    """Widen bfloat16 bits, uint16[n], to float32 bits, uint32[n]."""
    for i in range(source.size):
        out[i] = _U32(_U32(source[i]) << _K16)


@njit(nogil=True, cache=True)
def largest_magnitude(source: Words) -> Any:
    """Return the bits of the largest finite magnitude in ``source``, float32; 0 if none is finite."""
    top = _U32(0)
    for i in range(source.size):
        magnitude = _U32(source[i] & _MAGNITUDE)
        top = max(top, magnitude if magnitude < _INFINITY else _U32(0))
    return top
