"""Reference of :mod:`penstock.optim.kernels` and ``adam_kernels``: slow, simple, the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]


def join(weights: Words, low: Words, out: Words) -> None:
    """As the kernel's."""
    upper = weights.astype(np.uint32) - (low >= 0x8000)
    out[:] = (upper << np.uint32(16)) | low


def cut(masters: Words, weights: Words, low: Words) -> None:
    """As the kernel's."""
    bits = _quiet(masters)
    weights[:] = (bits + np.uint32(0x8000)) >> 16
    low[:] = bits & 0xFFFF


def join_even(weights: Words, low: Words, ties: Words, out: Words) -> None:
    """As the kernel's."""
    join(weights, low, out)
    marks = np.unpackbits(ties, count=out.size, bitorder="little")
    out += marks.astype(np.uint32) << np.uint32(16)


def cut_even(masters: Words, weights: Words, low: Words, ties: Words) -> None:
    """As the kernel's."""
    bits = _quiet(masters)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    weights[:] = (bits + np.uint32(0x7FFF) + odd) >> 16
    low[:] = bits & 0xFFFF
    ties[:] = np.packbits((low == 0x8000) & (odd == 0), bitorder="little")


def random(key: int, indices: Words) -> Words:
    """As the kernel's."""
    x = indices.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(key)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def to_bfloat16(source: Words, out: Words, key: int, first: int) -> None:
    """As the kernel's."""
    magnitude, sign = _parts(source)
    chance = random(key, _indices(source, first)) >> np.uint32(16)
    rounded = np.minimum((magnitude + chance) >> np.uint32(16), np.uint32(0x7F7F))
    rounded[magnitude == 0x7F800000] = 0x7F80
    rounded[magnitude > 0x7F800000] = 0x7FC0
    out[:] = rounded | (sign >> np.uint32(16))


def from_bfloat16(source: Words, out: Words) -> None:
    """As the kernel's."""
    out[:] = source.astype(np.uint32) << np.uint32(16)


def to_float8(  # noqa: PLR0917  (as the kernel)
    source: Words, codes: Words, exponents: Words, key: int, first: int, is_signed: bool
) -> None:
    """As the kernel's, a block at a time."""
    for block in range(exponents.size):
        part = slice(block * 256, block * 256 + 256)
        magnitude, sign = _parts(source[part])
        top = int(np.max(magnitude, where=magnitude < 0x7F800000, initial=0))
        exponents[block] = min((top + 0xFFFFF) >> 23, 254)
        base = _base(int(exponents[block]), is_signed)
        chance = random(key, _indices(source, first)[part]) >> np.uint32(12)
        code = ((magnitude + chance) >> np.uint32(20)).astype(np.int64) - base
        least = np.array((base + 1) << 20, np.uint32).view(np.float32)
        threshold = chance.astype(np.float32) * (least * np.float32(2.0**-20))
        below = threshold < magnitude.view(np.float32) if is_signed else magnitude > 0
        code = np.where((magnitude >> np.uint32(20)) <= base, below, code)
        code = np.minimum(code, 127 if is_signed else 255)
        codes[part] = code | (sign >> np.uint32(24) if is_signed else 0)


def from_float8(codes: Words, exponents: Words, out: Words, is_signed: bool) -> None:
    """As the kernel's, a block at a time."""
    for block in range(exponents.size):
        part = slice(block * 256, block * 256 + 256)
        code = codes[part].astype(np.uint32) & np.uint32(0x7F if is_signed else 0xFF)
        sign = codes[part].astype(np.uint32) - code
        value = (code + np.uint32(_base(int(exponents[block]), is_signed))) << np.uint32(20)
        out[part] = np.where(code > 0, value, 0) | (sign << np.uint32(24))


def adam(weights: Words, m: Words, v: Words, grads: Words, numbers: Words) -> None:
    """As the kernel's, whose numbers it takes."""
    sign, decay, l2, lerp, beta2, rest, root, eps, size = numbers
    grad = grads * sign
    if l2:
        grad = grad + weights * l2
    base, coefficient = (m, lerp) if lerp < 0.5 else (grad, lerp - np.float32(1))
    m[:] = base + coefficient * (grad - m)
    v[:] = v * beta2 + rest * grad * grad
    weights[:] = weights * decay - size * m / (np.sqrt(v) / root + eps)


def _base(exponent: int, is_signed: bool) -> int:
    return max(exponent * 8 - (120 if is_signed else 248), 0)


def _parts(source: Words) -> tuple[Words, Words]:
    return source & np.uint32(0x7FFFFFFF), source & np.uint32(0x80000000)


def _indices(source: Words, first: int) -> Words:
    return (np.arange(source.size, dtype=np.uint64) + np.uint64(first)).astype(np.uint32)


def _quiet(masters: Words) -> Words:
    nan = (masters & np.uint32(0x7FFFFFFF)) > 0x7F800000
    return np.where(nan, np.uint32(0x7FC00000), masters)
