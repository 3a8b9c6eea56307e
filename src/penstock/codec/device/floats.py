"""Casts between float32 and narrower floats on tensors, with the same bits as on the host.

Devices differ in NaNs, so every NaN becomes the quiet one of its sign. See [Note: casts on bits] in
``penstock.codec.kernels.casts``.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
LARGEST = float.fromhex("0x1.fffffep127")
_LARGEST_FLOAT16 = 65504.0


def narrowed(bits: Tensor, dtype: str) -> Tensor:
    """Cast float32 bits, int32, to float16 or bfloat16 bits, int16; too large values saturate."""
    return to_float16(bits) if dtype == "float16" else to_bfloat16(bits)


def widened(words: Tensor, dtype: str) -> Tensor:
    """Cast words of float32, float16 or bfloat16, int32 or int16, to float32 bits, int32."""
    if dtype == "float32":
        return words
    return from_float16(words) if dtype == "float16" else from_bfloat16(words)


def to_float16(bits: Tensor) -> Tensor:
    """Cast float32 bits, int32, to float16 bits, int16."""
    values = bits.view(torch.float32).clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16)
    finite = values.to(torch.float16).view(torch.int16)
    return _special(bits, finite, infinity=0x7C00, nan=0x7E00)


def from_float16(words: Tensor) -> Tensor:
    """Cast float16 bits, int16, to float32 bits, int32."""
    wide = words.view(torch.float16).to(torch.float32).view(torch.int32)
    sign = (words.to(torch.int32) & 0x8000) << 16
    return torch.where((words & 0x7FFF) > 0x7C00, sign | 0x7FC00000, wide)


def to_bfloat16(bits: Tensor) -> Tensor:
    """Cast float32 bits, int32, to bfloat16 bits, int16."""
    magnitude = bits & MAGNITUDE
    rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    signed = rounded.clamp(max=0x7F7F) | ((bits >> 16) & 0x8000)
    return _special(bits, signed.to(torch.int16), infinity=0x7F80, nan=0x7FC0)


def from_bfloat16(words: Tensor) -> Tensor:
    """Cast bfloat16 bits, int16, to float32 bits, int32."""
    return words.to(torch.int32) << 16


def _special(bits: Tensor, finite: Tensor, *, infinity: int, nan: int) -> Tensor:
    """Return ``finite`` where float32 ``bits`` are finite, else infinity or NaN of that sign, int16."""
    magnitude, sign = bits & MAGNITUDE, (bits >> 16) & 0x8000
    result = torch.where(magnitude == INFINITY, (sign | infinity).to(torch.int16), finite)
    return torch.where(magnitude > INFINITY, (sign | nan).to(torch.int16), result)
