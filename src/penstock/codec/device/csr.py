"""The codec ``csr`` on the tensor's device; see [Note: format csr] in ``penstock.codec.csr``."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.csr import Csr, head_bytes
from penstock.codec.device import sparse
from penstock.codec.device.words import as_bytes, as_type, word_type
from penstock.core.errors import CodecError

CODEC: Final = Csr()


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Words to bitmap, row counts and non-zero words. Waits for how many are kept."""
    bitmap, counts = sparse.survey(words)
    kept = int(counts.sum())
    if head_bytes(words.numel()) + kept * words.itemsize >= as_bytes(words).numel() > 0:
        return None
    packed = sparse.compact(words, counts, kept)
    return torch.cat([bitmap, _head_of(counts), as_bytes(packed)])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Bitmap, row counts and packed words to words. Waits once, for what is to be checked."""
    first, head = sparse.bitmap_bytes(count), head_bytes(count)
    word = word_type(dtype)
    if head > payload.numel():
        raise CodecError(
            f"codec {CODEC.name}: {payload.numel()} bytes have no room for a bitmap and row counts of"
            f" {head}"
        )
    bitmap, left = payload[:first], payload.numel() - head
    counts = sparse.row_counts(bitmap)
    differ = (_head_of(counts) != payload[first:head]).sum()
    found = torch.stack([counts.sum(), sparse.bits_beyond(bitmap, count), differ])
    total, beyond, wrong = found.tolist()
    if beyond or total * word.itemsize != left:
        raise CodecError(
            f"codec {CODEC.name}: {left} bytes behind bitmap and row counts of {count} {dtype}, of which"
            f" {total} are kept, {beyond} of them beyond its end"
        )
    if wrong:
        raise CodecError(
            f"codec {CODEC.name}: row counts of {count} {dtype} that are not those of the bitmap, or"
            " padding that is not 0"
        )
    return sparse.expand(bitmap, counts, as_type(payload[head:], word), count)


def _head_of(counts: Tensor) -> Tensor:
    """The bytes of the row counts, with their padding."""
    row = as_bytes(counts.to(torch.int16))
    return torch.nn.functional.pad(row, (0, -row.numel() % 8))
