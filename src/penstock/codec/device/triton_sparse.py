"""Triton kernels for :mod:`penstock.codec.device.sparse`.

They need Triton, which torch's CUDA builds include. A program of a kernel handles four rows of 256
elements; the offset of its kept words is the sum over all rows before, which torch computes from the
counts. Nothing is written twice, so the results do not depend on the order in which programs run.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.codec.device.kernels import launch
from penstock.codec.device.sparse import ROW

_ROWS: Final = 4


@triton.jit
def _survey(
    words,
    bitmap,
    counts,
    n,
    bitmap_bytes,
    row: tl.constexpr,
    rows: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * rows
    mine = first + tl.arange(0, rows)
    places = mine[:, None] * row + tl.arange(0, row)[None, :]
    there = (tl.load(words + places, mask=places < n, other=0) != 0).to(tl.int32)
    tl.store(counts + mine, tl.sum(there, 1), mask=mine * row < n)
    eights = tl.reshape(there, (rows * row // 8, 8))
    octets = tl.sum(eights << tl.arange(0, 8)[None, :], 1).to(tl.uint8)
    at = first * (row // 8) + tl.arange(0, rows * row // 8)
    tl.store(bitmap + at, octets, mask=at < bitmap_bytes)


@triton.jit
def _compact(
    words,
    starts,
    packed,
    kept,
    n,
    row: tl.constexpr,
    rows: tl.constexpr,
):
    mine = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    places = mine[:, None] * row + tl.arange(0, row)[None, :]
    values = tl.load(words + places, mask=places < n, other=0)
    there = values != 0
    start = tl.load(starts + mine, mask=mine * row < n, other=0)
    target = start[:, None] + tl.cumsum(there.to(tl.int32), 1) - 1
    # words that changed since they were counted spoil the frame, but no other memory
    tl.store(packed + target, values, mask=there & (target < kept))


@triton.jit
def _row_counts(
    bitmap,
    counts,
    bitmap_bytes,
    octets: tl.constexpr,
    rows: tl.constexpr,
):
    mine = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = mine[:, None] * octets + tl.arange(0, octets)[None, :]
    ones = tl.load(bitmap + at, mask=at < bitmap_bytes, other=0).to(tl.int32)
    ones = ones - ((ones >> 1) & 0x55)
    ones = (ones & 0x33) + ((ones >> 2) & 0x33)
    ones = (ones + (ones >> 4)) & 0x0F
    tl.store(counts + mine, tl.sum(ones, 1), mask=mine * octets < bitmap_bytes)


@triton.jit
def _expand(
    bitmap,
    starts,
    packed,
    words,
    n,
    row: tl.constexpr,
    rows: tl.constexpr,
):
    mine = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    places = mine[:, None] * row + tl.arange(0, row)[None, :]
    octets = tl.load(bitmap + places // 8, mask=places < n, other=0).to(tl.int32)
    there = (octets >> (places % 8).to(tl.int32)) & 1
    start = tl.load(starts + mine, mask=mine * row < n, other=0)
    source = start[:, None] + tl.cumsum(there, 1) - 1
    values = tl.load(packed + source, mask=there != 0, other=0)
    tl.store(words + places, values, mask=places < n)


def survey(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as ``sparse.survey``."""
    n = words.numel()
    bitmap = words.new_empty(8 * -(-n // 64), dtype=torch.uint8)
    counts = words.new_empty(-(-n // ROW), dtype=torch.int32)
    _launch(_survey, counts, words, bitmap, counts, n, bitmap.numel(), ROW)
    return bitmap, counts


def compact(words: Tensor, counts: Tensor, kept: int) -> Tensor:
    """Return the same as ``sparse.compact``; does not wait."""
    packed = words.new_empty(kept)
    _launch(_compact, counts, words, _starts(counts), packed, kept, words.numel(), ROW)
    return packed


def row_counts(bitmap: Tensor) -> Tensor:
    """Return the same as ``sparse.row_counts``."""
    octets = ROW // 8
    counts = bitmap.new_empty(-(-bitmap.numel() // octets), dtype=torch.int32)
    _launch(_row_counts, counts, bitmap, counts, bitmap.numel(), octets)
    return counts


def expand(bitmap: Tensor, counts: Tensor, packed: Tensor, count: int) -> Tensor:
    """Return the same as ``sparse.expand``."""
    words = packed.new_empty(count)
    _launch(_expand, counts, bitmap, _starts(counts), packed, words, count, ROW)
    return words


def _starts(counts: Tensor) -> Tensor:
    """Return the number of words that are kept before each row, int64."""
    return counts.cumsum(0, dtype=torch.int64) - counts


def _launch(kernel: Any, counts: Tensor, *arguments: Any) -> None:
    """Run a kernel over all rows, on the current stream of their device."""
    launch(kernel, -(-counts.numel() // _ROWS), counts.device, *arguments, _ROWS)
