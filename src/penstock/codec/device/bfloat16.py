"""Device form of the codec ``bfloat16``."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.casts import BFloat16
from penstock.codec.device.floats import from_bfloat16, to_bfloat16
from penstock.codec.device.words import as_bytes, as_type, check_length

CODEC: Final = BFloat16()


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Encode float32 words, int32[n], to 2 n bytes. Does not wait for the device."""
    return as_bytes(to_bfloat16(words))


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Decode 2 n bytes to float32 words, int32[n]. Does not wait for the device."""
    check_length(CODEC.name, payload, 2 * count)
    return from_bfloat16(as_type(payload, torch.int16))
