"""Bitmaps, counts of rows, and kept words: the parts of ``zero-value`` on a device.

The functions use operators of torch. On a CUDA device Triton kernels do the same in one pass, where the
operators take several, if they work there (:mod:`penstock.codec.device.kernels`). Their results are
identical to the last bit.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from penstock.codec.device import kernels as trials
from penstock.codec.device.words import in_blocks

ROW: Final = 256
"""Elements that are counted together."""
_TRIAL_ELEMENTS: Final = 5 * ROW + 77


class SparseKernels(Protocol):
    """Replacements of the operators here; see the functions of these names."""

    def survey(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return bitmap and counts."""

    def compact(self, words: Tensor, counts: Tensor, kept: int) -> Tensor:
        """Return the kept words."""

    def row_counts(self, bitmap: Tensor) -> Tensor:
        """Return the counts."""

    def expand(self, bitmap: Tensor, counts: Tensor, packed: Tensor, count: int) -> Tensor:
        """Return the words."""


def bitmap_bytes(count: int) -> int:
    """Return the length of the bitmap of ``count`` elements: whole u64."""
    return 8 * -(-count // 64)


def survey(words: Tensor) -> tuple[Tensor, Tensor]:
    """Find the words that are kept, those with any bit set, and count them per row. Does not wait.

    Returns:
        The bitmap, uint8 ``[bitmap_bytes(n)]``, and counts, int32 ``[ceil(n / ROW)]``.
    """
    kernels = kernels_for(words.device, words.dtype)
    return _survey(words) if kernels is None else kernels.survey(words)


def compact(words: Tensor, counts: Tensor, kept: int) -> Tensor:
    """Return the ``kept`` words that ``survey`` has counted, in order. May wait for the device."""
    kernels = kernels_for(words.device, words.dtype)
    return words[words != 0] if kernels is None else kernels.compact(words, counts, kept)


def row_counts(bitmap: Tensor) -> Tensor:
    """Return the number of set bits per row, int32, of a bitmap, uint8. Does not wait."""
    kernels = kernels_for(bitmap.device, torch.uint8)
    if kernels is not None:
        return kernels.row_counts(bitmap)
    ones = bitmap - (bitmap >> 1).bitwise_and_(0x55)
    ones = (ones & 0x33).add_((ones >> 2).bitwise_and_(0x33))
    ones = (ones + (ones >> 4)).bitwise_and_(0x0F)
    return in_blocks(ones, ROW // 8).sum(1, dtype=torch.int32)


def bits_beyond(bitmap: Tensor, count: int) -> Tensor:
    """Return the number of set bits of a bitmap beyond its elements, int64. Does not wait."""
    return _bits_of(bitmap[-8:])[count % 64 or 64 :].sum()


def expand(bitmap: Tensor, counts: Tensor, packed: Tensor, count: int) -> Tensor:
    """Return words that are taken from ``packed`` where a bit is set, and 0 elsewhere. Does not wait.

    The caller must have checked that ``packed`` has as many words as the bitmap has set bits.
    """
    kernels = kernels_for(packed.device, packed.dtype)
    if kernels is not None:
        return kernels.expand(bitmap, counts, packed, count)
    words = torch.zeros(count, dtype=packed.dtype, device=packed.device)
    return words.masked_scatter_(_bits_of(bitmap)[:count], packed)


def kernels_for(device: torch.device, word: torch.dtype) -> SparseKernels | None:
    """Return the Triton kernels, if they work for words of that type on ``device``; tried once each."""
    kernels: SparseKernels | None = trials.kernels_for("sparse", agrees, device, word)
    return kernels


def agrees(kernels: SparseKernels, device: torch.device, word: torch.dtype) -> bool:
    """Return True if kernels and operators give the same results for a small row of words."""
    places = torch.arange(_TRIAL_ELEMENTS)
    words = ((places * 2654435761) >> 7).masked_fill(places % 3 == 1, 0).to(word)
    bitmap, counts = _survey(words)
    packed = words[words != 0]
    there = words.to(device)
    found = kernels.survey(there)
    kept = kernels.compact(there, found[1], packed.numel())
    again = kernels.row_counts(found[0])
    back = kernels.expand(found[0], again, kept, words.numel())
    pairs = (bitmap, found[0]), (counts, found[1]), (packed, kept), (counts, again), (words, back)
    return all(torch.equal(one, other.to(one.device)) for one, other in pairs)


def _survey(words: Tensor) -> tuple[Tensor, Tensor]:
    there = (words != 0).view(torch.uint8)
    counts = in_blocks(there, ROW).sum(1, dtype=torch.int32)
    bits = in_blocks(there, 64).view(-1, 8)
    return (bits << _places(there)).sum(1, dtype=torch.uint8), counts


def _bits_of(bitmap: Tensor) -> Tensor:
    """Return a bool for each bit."""
    return ((bitmap.unsqueeze(1) >> _places(bitmap)) & 1).flatten().to(torch.bool)


def _places(like: Tensor) -> Tensor:
    """Return the numbers of a byte's bits, on the same device."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)
