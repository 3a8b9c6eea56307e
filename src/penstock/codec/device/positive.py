"""Device form of the codec ``positive``; see [Note: format positive]."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from penstock.codec.base import ITEMSIZE
from penstock.codec.device.bits import pack, unpack
from penstock.codec.device.words import word_type
from penstock.codec.positive import NEGATIVE_INFINITY, ONE, Positive

CODEC: Final = Positive()


def encode(words: Tensor, dtype: str) -> Tensor:
    """Encode words to a bitmap. Does not wait."""
    infinity = NEGATIVE_INFINITY[dtype] - (1 << 8 * ITEMSIZE[dtype])
    return pack((words > infinity) & (words != 0))  # signed, NaNs of both signs are above it


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Decode a bitmap to the words of 1.0 and 0.0. Waits only if ``count`` is no multiple of 64."""
    return unpack(CODEC.name, payload, count).to(word_type(dtype)).mul_(ONE[dtype])
