"""Reference of the kernels of the codec ``zero-value``."""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Bytes, Words


def pack(words: Words, bitmap: Words, packed: Words) -> int:
    """Return or write the same as the kernel of this name."""
    kept = words[words != 0]
    if kept.size > packed.size:
        return -1
    bits = np.packbits(words != 0, bitorder="little")
    bitmap.view(np.uint8)[: bits.size] = bits
    bitmap.view(np.uint8)[bits.size :] = 0
    packed[: kept.size] = kept
    return int(kept.size)


def count(bitmap: Words, elements: int) -> int:
    """Return or write the same as the kernel of this name."""
    bits = _bits(bitmap)
    return -1 if bits[elements:].any() else int(bits.sum(dtype=np.int64))


def unpack(bitmap: Words, packed: Words, words: Words) -> None:
    """Return or write the same as the kernel of this name."""
    words[:] = 0
    words[_bits(bitmap)[: words.size].astype(bool)] = packed


def _bits(bitmap: Words) -> Bytes:
    return np.unpackbits(bitmap.view(np.uint8), bitorder="little")
