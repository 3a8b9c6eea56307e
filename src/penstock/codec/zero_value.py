"""Codec ``zero-value``: the non-zero words and a bitmap of their places, for outputs of ReLU and dropout.

[Note: format zero-value]
    For ``count`` elements of ``w`` bytes the payload is:

    1. A bitmap of ``ceil(count / 64)`` little-endian u64. Bit ``i % 64`` of number ``i // 64`` is set if
       and only if any bit of element ``i`` is: -0.0 is not zero. Bits from ``count`` on MUST be 0.
    2. The elements whose bit is set, in order, ``w`` bytes each, little-endian as in memory.

    The payload MUST have exactly as many elements as the bitmap has bits, and MUST be shorter than the
    elements themselves; a longer one is stored raw (base.py, flags). A decoder checks both parts before
    it writes. An element whose bit is set MAY be zero; an encoder never makes one.

    With a fraction ``z`` of zeros, float32 takes ``1/32 + 1 - z`` of its bytes; float16 ``1/16 + 1 - z``.
"""

from __future__ import annotations

import numpy as np

from penstock.codec.base import DTYPES, Bytes, Codec, Fidelity, Words
from penstock.codec.kernels import zero_value as kernels
from penstock.core.errors import CodecError

__all__ = ["ZeroValue"]


class ZeroValue(Codec):
    """Codec of a bitmap and the non-zero words. Lossless; every dtype."""

    name = "zero-value"
    id = 1
    dtypes = frozenset(DTYPES)
    fidelity = Fidelity.EXACT

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        head = _bitmap_bytes(words.size)
        if head > payload.size:
            return None
        packed = _packed(payload[head:], words)
        kept = kernels.pack(words, payload[:head].view(np.uint64), packed)
        return None if kept < 0 else head + int(kept) * words.itemsize

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        head = _bitmap_bytes(words.size)
        if head > payload.size:
            raise CodecError(
                f"codec {self.name}: a bitmap takes {head} bytes, but the payload has {payload.size}"
            )
        bitmap = payload[:head].view(np.uint64)
        kept = kernels.count(bitmap, words.size)
        if kept < 0 or kept * words.itemsize != payload.size - head:
            raise CodecError(
                f"codec {self.name}: {payload.size - head} bytes follow the bitmap of {words.size}"
                f" {dtype}, which {'has bits beyond them' if kept < 0 else f'counts {kept}'}"
            )
        kernels.unpack(bitmap, _packed(payload[head:], words), words)


def _bitmap_bytes(elements: int) -> int:
    return 8 * -(-elements // 64)


def _packed(memory: Bytes, words: Words) -> Words:
    """Return all whole words of ``memory``."""
    return memory[: memory.size - memory.size % words.itemsize].view(words.dtype)
