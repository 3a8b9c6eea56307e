"""The codec ``float8`` on the tensor's device; see [Note: float8] in ``penstock.codec.casts``."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.casts import Float8, least_scale
from penstock.codec.device.floats import INFINITY, LARGEST, MAGNITUDE, narrowed, widened
from penstock.codec.device.words import check_length, in_blocks
from penstock.core.errors import CodecError

CODEC: Final = Float8()
_BLOCK = CODEC.block
_TOP = 416.0


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Words of ``dtype``, int32[n] or int16[n], to scales and codes. Does not wait for the device."""
    if not words.numel():
        return words.new_empty(0, dtype=torch.uint8)
    bits = in_blocks(widened(words, dtype), _BLOCK)
    magnitude = bits & MAGNITUDE
    top = magnitude.masked_fill(magnitude >= INFINITY, 0).amax(1, keepdim=True)
    scale = ((top + 0x2FFFFF) >> 23).clamp(min=least_scale(dtype))
    scaled = magnitude.view(torch.float32) * ((262 - scale) << 23).view(torch.float32)
    codes = scaled.clamp(max=_TOP).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill(magnitude == INFINITY, 0x7E).masked_fill(magnitude > INFINITY, 0x7F)
    codes |= ((bits >> 24) & 0x80).to(torch.uint8)
    return torch.cat([scale.flatten().to(torch.uint8), codes.flatten()[: words.numel()]])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Scales and codes to words of ``dtype``. Waits for the check of the scales."""
    blocks = -(-count // _BLOCK)
    check_length(CODEC.name, payload, blocks + count)
    scale = payload[:blocks].to(torch.int32)
    if bool((scale < least_scale(dtype)).any()):
        raise CodecError(f"codec {CODEC.name}: a scale below {least_scale(dtype)}")
    codes = in_blocks(payload[blocks:], _BLOCK)
    magnitude = codes & 0x7F
    factor = ((scale - 8) << 23).view(torch.float32).unsqueeze(1)
    values = magnitude.view(torch.float8_e4m3fn).to(torch.float32) * factor
    bits = values.clamp(max=LARGEST).view(torch.int32)
    bits = bits.masked_fill(magnitude == 0x7E, INFINITY).masked_fill(magnitude == 0x7F, 0x7FC00000)
    bits |= (codes & 0x80).to(torch.int32) << 24
    row = bits.flatten()[:count]
    return row if dtype == "float32" else narrowed(row, dtype)
