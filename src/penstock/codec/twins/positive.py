"""The clear twin of the kernels of the codec ``positive``."""

from __future__ import annotations

from typing import Any

from penstock.codec.base import Bytes, Words
from penstock.codec.twins.bits import beyond, pack_flags, spread

__all__ = ["beyond", "pack", "unpack"]


def pack(words: Words, infinity: Any, bitmap: Bytes) -> None:
    """As the kernel's."""
    sign = 1 << (8 * words.itemsize - 1)
    pack_flags(((words > 0) & (words < sign)) | (words > infinity), bitmap)


def unpack(bitmap: Bytes, one: Any, words: Words) -> None:
    """As the kernel's."""
    spread(bitmap, 0, one, words)
