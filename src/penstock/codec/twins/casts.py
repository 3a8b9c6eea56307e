"""The clear twin of the kernels of the casts."""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Words

_E4M3 = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)]
)
_TOP = 416.0  # the largest code that stands for a number


def to_float16(source: Words, out: Words) -> None:
    """As the kernel's."""
    values = source.view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        finite = np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    out[:] = _special(source, finite, infinity=0x7C00, nan=0x7E00)


def from_float16(source: Words, out: Words) -> None:
    """As the kernel's."""
    values = source.view(np.float16).astype(np.float32).view(np.uint32)
    sign = (source >> 15).astype(np.uint32) << 31
    out[:] = np.where(source & 0x7FFF > 0x7C00, sign | 0x7FC00000, values)


def to_bfloat16(source: Words, out: Words) -> None:
    """As the kernel's."""
    below, cut = source >> 16, source & 0xFFFF
    up = (cut > 0x8000) | ((cut == 0x8000) & (below & 1 == 1))
    rounded = below + up
    saturated = np.where(rounded & 0x7FFF < 0x7F80, rounded, below)
    out[:] = _special(source, saturated, infinity=0x7F80, nan=0x7FC0)


def from_bfloat16(source: Words, out: Words) -> None:
    """As the kernel's."""
    out[:] = source.astype(np.uint32) << 16


def to_float8(source: Words, scales: Words, codes: Words, least: int) -> None:
    """As the kernel's, a block at a time, in float64."""
    for block in range(scales.size):
        part = slice(block * 128, block * 128 + 128)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            values = np.abs(source[part].view(np.float32)).astype(np.float64)
        top = np.max(values, where=np.isfinite(values), initial=0)
        scale = least
        while top * 2.0 ** (135 - scale) > _TOP:
            scale += 1
        scales[block] = scale
        scaled = np.minimum(np.where(np.isnan(values), 0, values) * 2.0 ** (135 - scale), _TOP)
        step = 2.0 ** (np.floor(np.log2(np.maximum(scaled, 2.0**-6))) - 3)
        finite = np.searchsorted(_E4M3, np.rint(scaled / step) * step)
        finite |= (source[part] >> 24 & 0x80).astype(np.int64)
        codes[part] = _special(source[part], finite, infinity=0x7E, nan=0x7F)


def from_float8(scales: Words, codes: Words, out: Words) -> None:
    """As the kernel's, in float64."""
    scale = np.repeat(scales.astype(np.float64), 128)[: codes.size]
    values = _E4M3[codes & 0x7F] * 2.0 ** (scale - 135)
    values = np.minimum(values, np.finfo(np.float32).max)
    values[codes & 0x7F == 0x7E] = np.inf
    values[codes & 0x7F == 0x7F] = np.nan
    sign = (codes >> 7).astype(np.uint32) << 31
    out[:] = values.astype(np.float32).view(np.uint32) | sign


def _special(source: Words, finite: Words, *, infinity: int, nan: int) -> Words:
    """``finite`` where ``source``, float32 bits, is finite, else the format's infinity or NaN."""
    shift = 24 if nan < 0x80 else 16
    sign = (source & 0x80000000) >> shift
    magnitude = source & 0x7FFFFFFF
    special = sign | np.where(magnitude > 0x7F800000, nan, infinity)
    return np.where(magnitude < 0x7F800000, finite, special)
