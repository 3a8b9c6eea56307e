"""Bitmaps in torch operations; see [Note: eight flags at once] in the kernels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.device.words import as_type
from penstock.codec.positive import bitmap_bytes
from penstock.core.errors import CodecError

_GATHER: Final = 0x0102040810204080
_COPY: Final = 0x0101010101010101
_OWN: Final = 0x8040201008040201 - (1 << 64)


def pack(flags: Tensor) -> Tensor:
    """Pack bool ``[count]`` to a bitmap, uint8 ``[bitmap_bytes(count)]``."""
    padded = torch.nn.functional.pad(flags.view(torch.uint8), (0, -flags.numel() % 64))
    eights = as_type(padded, torch.int64) * _GATHER  # unpadded flags may be misaligned
    return (eights >> 56).bitwise_and_(0xFF).to(torch.uint8)


def unpack(name: str, bitmap: Tensor, count: int) -> Tensor:
    """Unpack a bitmap, uint8, to bool ``[count]``. Waits if bits of the last u64 must be checked.

    Raises:
        CodecError: The bitmap of codec ``name`` has another length, or bits beyond ``count``.
    """
    if bitmap.numel() != bitmap_bytes(count):
        raise CodecError(
            f"codec {name}: {bitmap.numel()} bytes; a bitmap of {count} takes {bitmap_bytes(count)}"
        )
    eights = bitmap.to(torch.int64).mul_(_COPY).bitwise_and_(_OWN)
    flags = eights.view(torch.uint8) != 0
    if count % 64 and bool(flags[count:].any()):
        raise CodecError(f"codec {name}: the bitmap has bits beyond its {count} elements")
    return flags[:count]
