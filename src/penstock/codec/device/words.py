"""Tensors of bytes as words, bits and blocks: what the device forms share."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.base import ITEMSIZE
from penstock.core.errors import CodecError

WORD: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that stand for elements of so many bytes."""


def word_type(dtype: str) -> torch.dtype:
    """The integers that stand for elements of this type."""
    return WORD[ITEMSIZE[dtype]]


def as_type(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes, uint8[n], as elements of ``dtype``; copied where they are not aligned to them."""
    if memory.storage_offset() % dtype.itemsize or memory.data_ptr() % dtype.itemsize:
        memory = memory.clone()
    return memory.view(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous row of anything as uint8."""
    return tensor.view(torch.uint8)


def in_blocks(row: Tensor, block: int) -> Tensor:
    """A row, cut into blocks, [blocks, block]; the last one is filled up with zeros."""
    return torch.nn.functional.pad(row, (0, -row.numel() % block)).view(-1, block)


def check_length(name: str, payload: Tensor, expected: int) -> None:
    """Raise CodecError if the payload is not so many bytes long."""
    if payload.numel() != expected:
        raise CodecError(f"codec {name}: a payload of {payload.numel()} bytes, not {expected}")
