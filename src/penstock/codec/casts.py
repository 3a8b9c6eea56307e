"""Float32 as bfloat16, element by element.

Lossy, so opt-in. Rounds to nearest even, as torch does; NaN stays NaN, with another payload; infinities
stay; what is finite stays finite: beyond the largest value it becomes the largest.
How the cast itself goes: [Note: casts on bits] in ``penstock.codec.kernels.casts``.
"""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Bytes, Codec, ErrorBound, Fidelity, Words
from penstock.codec.kernels import casts as kernels
from penstock.core.errors import CodecError

__all__ = ["LARGEST", "BFloat16"]

LARGEST = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
}
"""Largest finite value of each source type."""
_BOUND = ErrorBound(relative=2.0**-8, absolute=2.0**-134, largest=LARGEST["bfloat16"])


class BFloat16(Codec):
    """The upper half of a float32: 8 bits of mantissa, float32's range. The payload is the halves."""

    name = "bfloat16"
    id = 7
    dtypes = frozenset({"float32"})
    fidelity = Fidelity.BOUNDED

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        return 2 * count, 0, _BOUND

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        kernels.to_bfloat16(words, payload[: 2 * words.size].view(np.uint16))
        return 2 * words.size

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        if payload.size != 2 * words.size:
            raise CodecError(
                f"codec {self.name}: a payload of {payload.size} bytes; {words.size} elements take"
                f" {2 * words.size}"
            )
        kernels.from_bfloat16(payload.view(np.uint16), words)
