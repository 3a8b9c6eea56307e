"""Reference of the kernels of the codec ``narrow``."""

from __future__ import annotations

from typing import Any

from codec_reference.bits import beyond, pack_flags, spread
from penstock.codec.base import Bytes, Words

__all__ = ["add", "beyond", "pack_two", "subtract", "survey", "unpack_two"]


def survey(words: Words) -> tuple[int, int, bool]:
    """Return the same as the kernel, always for all words."""
    low, high = words.min(), words.max()
    return int(low), int(high), bool(((words == low) | (words == high)).all())


def subtract(words: Words, least: Any, out: Words) -> None:
    """Return or write the same as the kernel of this name."""
    out[:] = (words - words.dtype.type(least)).astype(out.dtype)


def add(packed: Words, least: Any, words: Words) -> None:
    """Return or write the same as the kernel of this name."""
    words[:] = packed.astype(words.dtype) + words.dtype.type(least)


def pack_two(words: Words, other: Any, bitmap: Bytes) -> None:
    """Return or write the same as the kernel of this name."""
    pack_flags(words == other, bitmap)


def unpack_two(bitmap: Bytes, least: Any, other: Any, words: Words) -> None:
    """Return or write the same as the kernel of this name."""
    spread(bitmap, least, other, words)
