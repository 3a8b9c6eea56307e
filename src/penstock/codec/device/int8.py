"""Device form of the codec ``int8``; see [Note: int8] in ``penstock.codec.int8``."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from penstock.codec.device.floats import LARGEST, narrowed, widened
from penstock.codec.device.words import as_bytes, as_type, check_length, in_blocks
from penstock.codec.int8 import LEAST_STEP, Int8
from penstock.core.errors import CodecError

CODEC: Final = Int8()
_BLOCK = CODEC.block
_LEAST = float(LEAST_STEP)


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Encode words of ``dtype``, int32[n] or int16[n], to steps and codes. Does not wait."""
    if not words.numel():
        return words.new_empty(0, dtype=torch.uint8)
    values = in_blocks(widened(words, dtype), _BLOCK).view(torch.float32)
    finite = values.abs() <= LARGEST
    known = values.masked_fill(~finite, 0.0)
    steps = torch.full((), 126.0, device=words.device)  # CUDA multiplies by a scalar's reciprocal
    step = (known.abs().amax(1, keepdim=True) / steps).clamp(min=_LEAST)
    codes = (known / step).round_().to(torch.int8)
    codes = codes.masked_fill(values == math.inf, 127).masked_fill(values == -math.inf, -127)
    codes = codes.masked_fill(values.isnan(), -128)
    row = codes.flatten()[: words.numel()]
    return torch.cat([as_bytes(step.flatten()), as_bytes(row)])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Decode steps and codes to words of ``dtype``. Waits for the check of the steps."""
    head = 4 * -(-count // _BLOCK)
    check_length(CODEC.name, payload, head + count)
    step = as_type(payload[:head], torch.float32)
    if not bool(((step >= _LEAST) & (step < math.inf)).all()):
        raise CodecError(f"codec {CODEC.name}: a step that is no number of {_LEAST} or more")
    codes = in_blocks(payload[head:], _BLOCK).view(torch.int8)
    values = (codes.to(torch.float32) * step.unsqueeze(1)).clamp(-LARGEST, LARGEST)
    values = values.masked_fill(codes == 127, math.inf).masked_fill(codes == -127, -math.inf)
    bits = values.view(torch.int32).masked_fill(codes == -128, 0x7FC00000)
    row = bits.flatten()[:count]
    return row if dtype == "float32" else narrowed(row, dtype)
