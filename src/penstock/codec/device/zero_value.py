"""The codec ``zero-value`` on the tensor's device; see [Note: format zero-value]."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.device.words import as_bytes, as_type, in_blocks, word_type
from penstock.codec.zero_value import ZeroValue
from penstock.core.errors import CodecError

CODEC: Final = ZeroValue()


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Words to bitmap and non-zero words. Waits once, for how many there are."""
    there = words != 0
    bitmap, packed = bitmap_of(there), as_bytes(words[there])
    if bitmap.numel() + packed.numel() >= as_bytes(words).numel() > 0:
        return None
    return torch.cat([bitmap, packed])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Bitmap and packed words to words. Waits once, for how many bits are set."""
    head = 8 * -(-count // 64)
    word = word_type(dtype)
    if head > payload.numel():
        raise CodecError(
            f"codec {CODEC.name}: {payload.numel()} bytes have no room for a bitmap of {head}"
        )
    bits = bits_of(payload[:head])
    total, beyond = torch.stack([bits.sum(), bits[count:].sum()]).tolist()
    left = payload.numel() - head
    if beyond or total * word.itemsize != left:
        raise CodecError(
            f"codec {CODEC.name}: {left} bytes behind the bitmap of {count} {dtype}, which counts"
            f" {total}, {beyond} of them beyond its end"
        )
    words = torch.zeros(count, dtype=word, device=payload.device)
    return words.masked_scatter_(bits[:count], as_type(payload[head:], word))


def bitmap_of(there: Tensor) -> Tensor:
    """The bytes of a bitmap of whole u64, of a bool for each element."""
    bits = in_blocks(there.view(torch.uint8), 64).view(-1, 8)
    return (bits << _places(there)).sum(1, dtype=torch.uint8)


def bits_of(bitmap: Tensor) -> Tensor:
    """A bool for each bit."""
    return ((bitmap.unsqueeze(1) >> _places(bitmap)) & 1).flatten().to(torch.bool)


def _places(like: Tensor) -> Tensor:
    """The places of a byte's bits, on the same device."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)
