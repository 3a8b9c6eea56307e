"""Codec ``positive``: one bit per element, greater than zero or not, as the backward of a ReLU needs.

[Note: format positive]
    For ``count`` elements the payload is a bitmap of ``ceil(count / 64)`` little-endian u64. Bit
    ``i % 64`` of number ``i // 64`` is set unless element ``i`` is ``<= 0``: a NaN's is set, for torch's
    ``threshold_backward`` lets the gradient of a NaN pass. Bits from ``count`` on MUST be 0, and the
    payload MUST have no other length.

    An element whose bit is set decodes to 1.0, any other to 0.0.
"""

from __future__ import annotations

from typing import Final

from penstock.codec.base import Bytes, Codec, ErrorBound, Fidelity, Words
from penstock.codec.kernels import positive as kernels
from penstock.core.errors import CodecError

__all__ = ["NEGATIVE_INFINITY", "ONE", "Positive"]

ONE: Final = {
    "float16": 0x3C00,
    "bfloat16": 0x3F80,
    "float32": 0x3F80_0000,
    "float64": 0x3FF0_0000_0000_0000,
}
"""Word of 1.0 by dtype."""
NEGATIVE_INFINITY: Final = {
    "float16": 0xFC00,
    "bfloat16": 0xFF80,
    "float32": 0xFF80_0000,
    "float64": 0xFFF0_0000_0000_0000,
}
"""Word of minus infinity by dtype; larger unsigned words are NaNs."""


class Positive(Codec):
    """Codec of one bit per element, which keeps only what a ReLU's backward needs."""

    name = "positive"
    id = 3
    dtypes = frozenset(ONE)
    fidelity = Fidelity.POSITIVE

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        return bitmap_bytes(count), 0, None

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        length = bitmap_bytes(words.size)
        infinity = words.dtype.type(NEGATIVE_INFINITY[dtype])
        kernels.pack(words, infinity, payload[:length])
        return length

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        length = bitmap_bytes(words.size)
        if payload.size != length:
            raise CodecError(
                f"codec {self.name}: the payload has {payload.size} bytes; the bitmap of {words.size}"
                f" {dtype} takes {length}"
            )
        if kernels.beyond(payload, words.size):
            raise CodecError(
                f"codec {self.name}: the bitmap has bits beyond its {words.size} elements"
            )
        kernels.unpack(payload, words.dtype.type(ONE[dtype]), words)


def bitmap_bytes(count: int) -> int:
    """Return the length of a bitmap of ``count`` elements."""
    return 8 * -(-count // 64)
