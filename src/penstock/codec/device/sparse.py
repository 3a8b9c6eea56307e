"""Bitmaps, counts of rows, and kept words: the parts of ``zero-value`` on a device.

The forms here are operators of torch. On a CUDA device kernels of Triton do the same, in one pass where
the operators take several, if Triton can be imported and makes the same of a small tensor of that device
(:func:`kernels_for`). Neither is needed for the other, and their results are equal to the last bit.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from penstock.codec.device.words import in_blocks

ROW: Final = 256
"""Elements that are counted together."""
_TRIAL_ELEMENTS: Final = 5 * ROW + 77


class Kernels(Protocol):
    """What may take the place of the operators here; see the functions of these names."""

    def survey(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Bitmap and counts."""

    def compact(self, words: Tensor, counts: Tensor, kept: int) -> Tensor:
        """The kept words."""

    def row_counts(self, bitmap: Tensor) -> Tensor:
        """Counts."""

    def expand(self, bitmap: Tensor, counts: Tensor, packed: Tensor, count: int) -> Tensor:
        """Words."""


def bitmap_bytes(count: int) -> int:
    """The length of the bitmap of so many elements: whole u64."""
    return 8 * -(-count // 64)


def survey(words: Tensor) -> tuple[Tensor, Tensor]:
    """Which words are kept, and how many in each row: those that have any bit set. Does not wait.

    Returns:
        The bitmap, uint8 ``[bitmap_bytes(n)]``, and counts, int32 ``[ceil(n / ROW)]``.
    """
    kernels = kernels_for(words.device, words.dtype)
    return _survey(words) if kernels is None else kernels.survey(words)


def compact(words: Tensor, counts: Tensor, kept: int) -> Tensor:
    """The kept words, in order: ``kept`` of them, as ``survey`` has counted. May wait for the device."""
    kernels = kernels_for(words.device, words.dtype)
    return words[words != 0] if kernels is None else kernels.compact(words, counts, kept)


def row_counts(bitmap: Tensor) -> Tensor:
    """How many bits of each row are set, int32, of a bitmap, uint8. Does not wait."""
    kernels = kernels_for(bitmap.device, torch.uint8)
    if kernels is not None:
        return kernels.row_counts(bitmap)
    ones = bitmap - (bitmap >> 1).bitwise_and_(0x55)
    ones = (ones & 0x33).add_((ones >> 2).bitwise_and_(0x33))
    ones = (ones + (ones >> 4)).bitwise_and_(0x0F)
    return in_blocks(ones, ROW // 8).sum(1, dtype=torch.int32)


def bits_beyond(bitmap: Tensor, count: int) -> Tensor:
    """How many bits of a bitmap are set that stand for no element, int64. Does not wait."""
    return _bits_of(bitmap[-8:])[count % 64 or 64 :].sum()


def expand(bitmap: Tensor, counts: Tensor, packed: Tensor, count: int) -> Tensor:
    """Words, of which those whose bit is set are ``packed``, and the rest 0. Does not wait.

    The caller has checked that ``packed`` has as many as there are bits, and that these are no more.
    """
    kernels = kernels_for(packed.device, packed.dtype)
    if kernels is not None:
        return kernels.expand(bitmap, counts, packed, count)
    words = torch.zeros(count, dtype=packed.dtype, device=packed.device)
    return words.masked_scatter_(_bits_of(bitmap)[:count], packed)


def kernels_for(device: torch.device, word: torch.dtype) -> Kernels | None:
    """The kernels of Triton, if they work for words of that type on ``device``; tried once for each."""
    try:
        return _tried(device, word) if device.type == "cuda" else None
    except torch.OutOfMemoryError:  # tried again the next time
        return None


@cache
def _tried(device: torch.device, word: torch.dtype) -> Kernels | None:
    try:
        kernels: Any = importlib.import_module("penstock.codec.device.triton_sparse")
        works: Kernels | None = kernels if agrees(kernels, device, word) else None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001  (no Triton, no compiler for it, a device that it does not know)
        return None
    return works


def agrees(kernels: Kernels, device: torch.device, word: torch.dtype) -> bool:
    """Whether kernels make of a small row of words what the operators make of it."""
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
    """A bool for each bit."""
    return ((bitmap.unsqueeze(1) >> _places(bitmap)) & 1).flatten().to(torch.bool)


def _places(like: Tensor) -> Tensor:
    """The places of a byte's bits, on the same device."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)
