"""Reference of the kernels of the codec ``positive``."""

from __future__ import annotations

from typing import Any

from codec_reference.bits import beyond, pack_flags, spread
from penstock.codec.base import Bytes, Words

__all__ = ["beyond", "pack", "unpack"]


def pack(words: Words, infinity: Any, bitmap: Bytes) -> None:
    """Return or write the same as the kernel of this name."""
    sign = 1 << (8 * words.itemsize - 1)
    pack_flags(((words > 0) & (words < sign)) | (words > infinity), bitmap)


def unpack(bitmap: Bytes, one: Any, words: Words) -> None:
    """Return or write the same as the kernel of this name."""
    spread(bitmap, 0, one, words)
