"""Device form of the codec ``zero-value``; see [Note: format zero-value]."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.device import sparse
from penstock.codec.device.words import as_bytes, as_type, word_type
from penstock.codec.zero_value import ZeroValue
from penstock.core.errors import CodecError

CODEC: Final = ZeroValue()


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Encode words to bitmap and non-zero words. Waits for their number."""
    bitmap, counts = sparse.survey(words)
    kept = int(counts.sum())
    if bitmap.numel() + kept * words.itemsize >= as_bytes(words).numel() > 0:
        return None
    return torch.cat([bitmap, as_bytes(sparse.compact(words, counts, kept))])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Decode bitmap and packed words to words. Waits once, for the number of set bits."""
    head = sparse.bitmap_bytes(count)
    word = word_type(dtype)
    if head > payload.numel():
        raise CodecError(
            f"codec {CODEC.name}: a bitmap takes {head} bytes, but the payload has {payload.numel()}"
        )
    bitmap = payload[:head]
    counts = sparse.row_counts(bitmap)
    total, beyond = torch.stack([counts.sum(), sparse.bits_beyond(bitmap, count)]).tolist()
    left = payload.numel() - head
    if beyond or total * word.itemsize != left:
        raise CodecError(
            f"codec {CODEC.name}: {left} bytes follow the bitmap of {count} {dtype}, which counts"
            f" {total}, {beyond} of them beyond its end"
        )
    return sparse.expand(bitmap, counts, as_type(payload[head:], word), count)
