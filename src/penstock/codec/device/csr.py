"""The codec ``csr`` on the tensor's device; see [Note: format csr] in ``penstock.codec.csr``."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.csr import ROW, Csr, head_bytes
from penstock.codec.device import zero_value
from penstock.codec.device.words import as_bytes, in_blocks
from penstock.core.errors import CodecError

CODEC: Final = Csr()


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Words to bitmap, row counts and non-zero words. Waits once, for how many are kept."""
    there = words != 0
    bitmap, packed = zero_value.bitmap_of(there), as_bytes(words[there])
    counts = _counts(there)
    if bitmap.numel() + counts.numel() + packed.numel() >= as_bytes(words).numel() > 0:
        return None
    return torch.cat([bitmap, counts, packed])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Bitmap, row counts and packed words to words. Waits for the number of bits and for a check."""
    first, head = 8 * -(-count // 64), head_bytes(count)
    if head > payload.numel():
        raise CodecError(
            f"codec {CODEC.name}: {payload.numel()} bytes have no room for a bitmap and row counts of"
            f" {head}"
        )
    words = zero_value.decode(torch.cat([payload[:first], payload[head:]]), count, dtype)
    there = zero_value.bits_of(payload[:first])
    if not torch.equal(_counts(there), payload[first:head]):
        raise CodecError(
            f"codec {CODEC.name}: row counts of {count} {dtype} that are not those of the bitmap, or"
            " padding that is not 0"
        )
    return words


def _counts(there: Tensor) -> Tensor:
    """The bytes of the row counts, with their padding, of a bool for each element."""
    counts = as_bytes(in_blocks(there.view(torch.uint8), ROW).sum(1, dtype=torch.int16))
    return torch.nn.functional.pad(counts, (0, -counts.numel() % 8))
