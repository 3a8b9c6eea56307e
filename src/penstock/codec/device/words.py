"""Views of byte tensors as words, bits and blocks, which the device forms share."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.base import ITEMSIZE
from penstock.core.errors import CodecError

WORD: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of words, by element size."""


def word_type(dtype: str) -> torch.dtype:
    """Return the integer type of words of this element type."""
    return WORD[ITEMSIZE[dtype]]


def as_type(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes, uint8[n], as elements of ``dtype``; copied if they are not aligned to them."""
    if memory.storage_offset() % dtype.itemsize or memory.data_ptr() % dtype.itemsize:
        memory = memory.clone()
    return memory.view(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous row of any type as uint8."""
    return tensor.view(torch.uint8)


def in_blocks(row: Tensor, block: int) -> Tensor:
    """Reshape a row to [blocks, block]; the last block is padded with zeros."""
    return torch.nn.functional.pad(row, (0, -row.numel() % block)).view(-1, block)


def check_length(name: str, payload: Tensor, expected: int) -> None:
    """Raise CodecError if the payload does not have the expected length."""
    if payload.numel() != expected:
        raise CodecError(
            f"codec {name}: the payload has {payload.numel()} bytes, expected {expected}"
        )
