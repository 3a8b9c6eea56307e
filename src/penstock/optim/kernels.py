"""How compact states are packed and unpacked, on the bits.

[Note: split masters]
    A float32 master of a bfloat16 weight is the weight and 16 bits more. The weight is the master
    rounded, not cut off, so that training with it is what training with ``weight.copy_(master)`` is.
    The 16 bits are the lower half of the master. If that half is 0x8000 or more, the weight was
    rounded up, and the master's upper half is the weight less one; with ties to even, a lower half of
    exactly 0x8000 may also have been rounded down. For ``split``, which keeps torch's rounding, those
    few are marked in a bitmap, one bit a parameter. The compact formats round ties away from zero
    instead and have no bitmap.

[Note: rounding by a counter]
    What is rounded at random depends on nothing but a key and the index of the element in its
    parameter: not on tiles, threads or the order of things. The key is made of the seed, the step,
    the parameter and the state. The expectation of what is stored is what was to be stored, so a
    variance that grows by a thousandth of its last bit grows all the same.

[Note: 8-bit floats]
    256 elements share an exponent, a byte: that of the largest finite magnitude among them (of the
    next binade, if rounding that one up would leave its own). A code is the float32's bits, shifted
    until 3 bits of the fraction are left, less what makes the largest of that exponent the largest
    code. A signed code has a sign and 7 bits of magnitude, thus 16 binades; an unsigned one has 8
    bits, thus 32. Code 0 is zero. Below the least code, a signed value is rounded to that or to zero
    at random; an unsigned one, which is divided by, is never rounded to zero. What is not finite gets
    the largest code: the weight that belongs to it is not finite any more, or was left alone.

As in the codecs: every operation is wrapped in ``np.uint32``, for Numba would widen it to 64 bits. So it
does with the difference of two ``np.int32``.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

_U32: Final = np.uint32
_U16: Final = np.uint16
_K1: Final = np.uint32(1)
_K15: Final = np.uint32(15)
_K16: Final = np.uint32(16)
_K20: Final = np.uint32(20)
_K23: Final = np.uint32(23)
_K24: Final = np.uint32(24)
_LOW: Final = np.uint32(0xFFFF)
_HALF: Final = np.uint32(0x8000)
_SIGN: Final = np.uint32(0x80000000)
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)
_NAN: Final = np.uint32(0x7FC00000)
_FRACTION: Final = np.uint32(0xFFFFF)
_BLOCK: Final = 256


@njit(nogil=True, cache=True)
def join(weights: Any, low: Any, out: Any) -> None:
    """Masters, float32 bits, of weights that were rounded with ties away from zero.

    ``weights`` and ``low`` are uint16[n], ``out`` uint32[n].
    """
    for i in range(out.size):
        half = _U32(low[i])
        out[i] = _U32(_U32(_U32(_U32(weights[i]) - _U32(half >> _K15)) << _K16) | half)


@njit(nogil=True, cache=True)
def cut(masters: Any, weights: Any, low: Any) -> None:
    """The inverse of ``join``; every NaN becomes the quiet one."""
    for i in range(masters.size):
        bits = _U32(masters[i])
        bits = _NAN if _U32(bits & _MAGNITUDE) > _INFINITY else bits
        weights[i] = _U16(_U32(bits + _HALF) >> _K16)
        low[i] = _U16(bits & _LOW)


@njit(nogil=True, cache=True)
def join_even(weights: Any, low: Any, ties: Any, out: Any) -> None:
    """As ``join``, of weights rounded with ties to even; ``ties``, uint8[ceil(n / 8)], is the bitmap."""
    for i in range(out.size):
        half = _U32(low[i])
        out[i] = _U32(_U32(_U32(_U32(weights[i]) - _U32(half >> _K15)) << _K16) | half)
    for byte in range(ties.size):
        if ties[byte]:
            _restore(ties[byte], out[8 * byte : 8 * byte + 8])


@njit(nogil=True, cache=True)
def _restore(marks: Any, out: Any) -> None:
    for bit in range(out.size):
        if (marks >> bit) & 1:
            out[bit] = _U32(_U32(out[bit]) + _U32(0x10000))


@njit(nogil=True, cache=True)
def cut_even(masters: Any, weights: Any, low: Any, ties: Any) -> None:
    """The inverse of ``join_even``; every NaN becomes the quiet one."""
    for i in range(masters.size):
        bits = _U32(masters[i])
        bits = _NAN if _U32(bits & _MAGNITUDE) > _INFINITY else bits
        odd = _U32(_U32(bits >> _K16) & _K1)
        weights[i] = _U16(_U32(_U32(bits + _U32(0x7FFF)) + odd) >> _K16)
        low[i] = _U16(bits & _LOW)
    ties[:] = 0
    for start in range(0, masters.size, _BLOCK):
        _mark(masters[start : start + _BLOCK], ties[start // 8 : (start + _BLOCK) // 8])


@njit(nogil=True, cache=True)
def _mark(masters: Any, ties: Any) -> None:
    count = _U32(0)
    for i in range(masters.size):
        count += _U32(1) if _U32(masters[i] & _U32(0x1FFFF)) == _HALF else _U32(0)
    if count:
        for i in range(masters.size):
            bits = _U32(masters[i])
            if _U32(bits & _U32(0x1FFFF)) == _HALF and _U32(bits & _MAGNITUDE) < _INFINITY:
                ties[i // 8] |= np.uint8(1 << (i % 8))


@njit(nogil=True, cache=True)
def _random(key: Any, index: Any) -> Any:
    """32 bits of a key and a counter; the mixer is "lowbias32" of C. Wellons, by search."""
    x = _U32(_U32(_U32(index) * _U32(0x9E3779B1)) + _U32(key))
    x = _U32(_U32(x ^ _U32(x >> _K16)) * _U32(0x7FEB352D))
    x = _U32(_U32(x ^ _U32(x >> _K15)) * _U32(0x846CA68B))
    return _U32(x ^ _U32(x >> _K16))


@njit(nogil=True, cache=True)
def to_bfloat16(source: Any, out: Any, key: Any, first: Any) -> None:
    """Round float32 bits, uint32[n], to bfloat16 bits, uint16[n], at random; ``first``: [0]'s index.

    A finite value stays finite.
    """
    for i in range(source.size):
        bits = _U32(source[i])
        magnitude = _U32(bits & _MAGNITUDE)
        chance = _U32(_random(key, _U32(_U32(first) + _U32(i))) >> _K16)
        rounded = min(_U32(_U32(magnitude + chance) >> _K16), _U32(0x7F7F))
        rounded = _U32(0x7F80) if magnitude == _INFINITY else rounded
        rounded = _U32(0x7FC0) if magnitude > _INFINITY else rounded
        out[i] = _U16(rounded | _U32(_U32(bits & _SIGN) >> _K16))


@njit(nogil=True, cache=True)
def from_bfloat16(source: Any, out: Any) -> None:
    """Widen bfloat16 bits, uint16[n], to float32 bits, uint32[n]."""
    for i in range(source.size):
        out[i] = _U32(_U32(source[i]) << _K16)


@njit(nogil=True, cache=True)
def to_float8(  # noqa: PLR0917  (Numba has no keywords)
    source: Any, codes: Any, exponents: Any, key: Any, first: Any, is_signed: bool
) -> None:
    """Float32 bits, uint32[n], to codes, uint8[n], and an exponent for each 256, uint8."""
    for block in range(exponents.size):
        start = block * _BLOCK
        part = source[start : start + _BLOCK]
        top = _U32(0)
        for i in range(part.size):
            magnitude = _U32(part[i] & _MAGNITUDE)
            top = max(top, magnitude if magnitude < _INFINITY else _U32(0))
        exponent = min(_U32(_U32(top + _FRACTION) >> _K23), _U32(254))
        exponents[block] = np.uint8(exponent)
        at = _U32(_U32(first) + _U32(start))
        if is_signed:
            _signed_codes(part, codes[start : start + _BLOCK], _base(exponent, 120), key, at)
        else:
            _unsigned_codes(part, codes[start : start + _BLOCK], _base(exponent, 248), key, at)


@njit(nogil=True, cache=True)
def _base(exponent: Any, span: int) -> Any:
    return _U32(max(np.int32(exponent) * np.int32(8) - np.int32(span), np.int32(0)))


@njit(nogil=True, cache=True)
def _signed_codes(source: Any, codes: Any, base: Any, key: Any, first: Any) -> None:
    # subnormal numbers take a processor many times as long, as where a block is zero: scaled by 2**64
    scale = np.float32(2.0**64) if base < _U32(512) else np.float32(1)
    least = _U32(_U32(base + _K1) << _K20).view(np.float32)
    unit = np.float32(np.float32(least * scale) * np.float32(2.0**-20))
    for i in range(source.size):
        bits = _U32(source[i])
        magnitude = _U32(bits & _MAGNITUDE)
        chance = _U32(_random(key, _U32(first + _U32(i))) >> _U32(12))
        large = min(_U32(_U32(_U32(magnitude + chance) >> _K20) - base), _U32(127))
        value = np.float32(magnitude.view(np.float32) * scale)
        small = _U32(np.float32(np.int32(chance)) * unit < value)
        code = small if _U32(magnitude >> _K20) <= base else large
        codes[i] = np.uint8(code | _U32(_U32(bits & _SIGN) >> _K24))


@njit(nogil=True, cache=True)
def _unsigned_codes(source: Any, codes: Any, base: Any, key: Any, first: Any) -> None:
    for i in range(source.size):
        magnitude = _U32(_U32(source[i]) & _MAGNITUDE)
        chance = _U32(_random(key, _U32(first + _U32(i))) >> _U32(12))
        large = min(_U32(_U32(_U32(magnitude + chance) >> _K20) - base), _U32(255))
        code = min(magnitude, _K1) if _U32(magnitude >> _K20) <= base else large
        codes[i] = np.uint8(code)


@njit(nogil=True, cache=True)
def from_float8(codes: Any, exponents: Any, out: Any, is_signed: bool) -> None:
    """Decode the output of ``to_float8`` to float32 bits, uint32[n]."""
    for block in range(exponents.size):
        start = block * _BLOCK
        part = codes[start : start + _BLOCK]
        base = _base(exponents[block], 120 if is_signed else 248)
        _decode(part, out[start : start + _BLOCK], base, _U32(0x7F if is_signed else 0xFF))


@njit(nogil=True, cache=True)
def _decode(codes: Any, out: Any, base: Any, mask: Any) -> None:
    for i in range(out.size):
        whole = _U32(codes[i])
        code = _U32(whole & mask)
        value = _U32(_U32(code + base) << _K20) if code else _U32(0)
        sign = _U32(_U32(whole ^ code) << _K24)
        out[i] = _U32(value | sign)
