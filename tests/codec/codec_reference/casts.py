"""Reference of the kernels of the casts."""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Words


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


def _special(source: Words, finite: Words, *, infinity: int, nan: int) -> Words:
    """``finite`` where ``source``, float32 bits, is finite, else the format's infinity or NaN."""
    sign = (source & 0x80000000) >> 16
    magnitude = source & 0x7FFFFFFF
    special = sign | np.where(magnitude > 0x7F800000, nan, infinity)
    return np.where(magnitude < 0x7F800000, finite, special)
