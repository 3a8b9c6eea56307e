"""The codec ``csr`` on the tensor's device; see [Note: format csr] in ``penstock.codec.csr``."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.csr import ROW, Csr
from penstock.codec.device.words import as_bytes, as_type, in_blocks, word_type
from penstock.core.errors import CodecError

CODEC: Final = Csr()


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Words to row counts, values and columns. Waits once, for how many are kept."""
    there = words != 0
    counts = as_bytes(in_blocks(there.view(torch.uint8), ROW).sum(1, dtype=torch.int16))
    head = torch.nn.functional.pad(counts, (0, -counts.numel() % 8))
    places = there.nonzero().flatten()
    values, columns = as_bytes(words[places]), (places % ROW).to(torch.uint8)
    length = head.numel() + values.numel() + columns.numel()
    if length >= as_bytes(words).numel() > 0:
        return None
    return torch.cat([head, values, columns])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Row counts, values and columns to words. Waits for the sum of the counts and for a check."""
    rows, word = -(-count // ROW), word_type(dtype)
    head = -(-2 * rows // 8) * 8
    if head > payload.numel():
        raise CodecError(
            f"codec {CODEC.name}: {payload.numel()} bytes have no room for {head} of row counts"
        )
    counts = as_type(payload[: 2 * rows], torch.int16).to(torch.int64) & 0xFFFF
    kept, left = int(counts.sum()), payload.numel() - head
    if kept * (word.itemsize + 1) != left:
        raise CodecError(f"codec {CODEC.name}: {left} bytes behind row counts of {kept} {dtype}")
    border = head + kept * word.itemsize
    columns = payload[border:].to(torch.int64)
    places = _row_starts(counts, kept) + columns
    wrong = (
        (places[1:] <= places[:-1]).any() | (places >= count).any() | payload[2 * rows : head].any()
    )
    if bool(wrong):
        raise CodecError(
            f"codec {CODEC.name}: columns of {count} {dtype} that do not rise within their rows, or"
            " padding that is not 0"
        )
    words = torch.zeros(count, dtype=word, device=payload.device)
    words[places] = as_type(payload[head:border], word)
    return words


def _row_starts(counts: Tensor, kept: int) -> Tensor:
    """For every kept element the place of its row's first."""
    starts = torch.arange(counts.numel(), device=counts.device) * ROW
    return torch.repeat_interleave(starts, counts, output_size=kept)
