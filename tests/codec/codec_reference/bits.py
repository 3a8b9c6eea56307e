"""Reference of :mod:`penstock.codec.kernels.bits`."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.codec.base import Bytes, Words


def pack_flags(flags: Words, bitmap: Bytes) -> None:
    """Pack one bit per flag, the first in the lowest bit; ``bitmap`` is padded with 0."""
    bits = np.packbits(flags, bitorder="little")
    bitmap[: bits.size] = bits
    bitmap[bits.size :] = 0


def beyond(bitmap: Bytes, count: int) -> bool:
    """Return or write the same as the kernel of this name."""
    return bool(np.unpackbits(bitmap, bitorder="little")[count:].any())


def spread(bitmap: Bytes, clear: Any, set_: Any, words: Words) -> None:
    """Return or write the same as the kernel of this name."""
    bits = np.unpackbits(bitmap, count=words.size, bitorder="little")
    words[:] = np.where(bits, words.dtype.type(set_), words.dtype.type(clear))
