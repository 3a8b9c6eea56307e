"""Narrower floats: float16 and bfloat16 element by element, float8 with a scale for every block.

Lossy, for who asks for it. All round to nearest even, as torch does; NaN stays NaN, with another payload;
infinities stay; what is finite stays finite: beyond the largest value it becomes the largest.
How the cast itself goes: [Note: casts on bits] in ``penstock.codec.kernels.casts``.

[Note: float8]
    The element is an e4m3fn: sign, 4 bits of exponent with bias 7, 3 of mantissa. Of its codes, 0x7F is
    NaN, and 0x7E, which would be 448, MUST stand for infinity, which e4m3fn does not have. The largest
    number is 416.

    A block of 128 elements shares a scale, the u8 ``s``; an element's value is ``e4m3 * 2**(s - 135)``,
    at most the largest of the source's type. ``s`` is the least for which the block's largest finite
    magnitude comes to at most 416: it then lies in (208, 416], and a non-finite element costs its
    neighbours nothing. ``s`` MUST be at least 20, for float16 at least 120: then no step needs a float32
    that is subnormal, and every decoded value is a float16.

    Why a power of two and not the float32 ``448 / largest``: scaling is exact, so a value is rounded
    once, by e4m3 alone, and encoding what was decoded gives the same again; and the scale takes one byte,
    not four. The price is in the bound, e4m3's own 2**-4 of the block's largest magnitude, where the
    other scale would have 1/28. The OCP Microscaling (MX) formats (v1.0, section 5) scale by powers of
    two as well.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.codec.base import Bytes, Codec, ErrorBound, Fidelity, Words
from penstock.codec.blockwise import Blockwise, scratch_bytes
from penstock.codec.kernels import casts as kernels
from penstock.core.errors import CodecError

__all__ = ["LARGEST", "BFloat16", "Float8", "Float16"]

LARGEST = {
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
}
"""The largest finite value of each source type."""


class _Cast(Codec):
    """From float32 to half the width: the payload is the narrow elements."""

    dtypes = frozenset({"float32"})
    fidelity = Fidelity.BOUNDED
    bound: ErrorBound
    narrow: Callable[[Words, Words], None]
    widen: Callable[[Words, Words], None]

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        return 2 * count, 0, self.bound

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        self.narrow(words, payload[: 2 * words.size].view(np.uint16))
        return 2 * words.size

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        if payload.size != 2 * words.size:
            raise CodecError(
                f"codec {self.name}: a payload of {payload.size} bytes; {words.size} elements take"
                f" {2 * words.size}"
            )
        self.widen(payload.view(np.uint16), words)


class Float16(_Cast):
    """IEEE binary16: 11 bits of mantissa, magnitudes up to 65504."""

    name = "float16"
    id = 6
    bound = ErrorBound(relative=2.0**-11, absolute=2.0**-25, largest=LARGEST["float16"])
    narrow = staticmethod(kernels.to_float16)
    widen = staticmethod(kernels.from_float16)


class BFloat16(_Cast):
    """The upper half of a float32: 8 bits of mantissa, float32's range."""

    name = "bfloat16"
    id = 7
    bound = ErrorBound(relative=2.0**-8, absolute=2.0**-134, largest=LARGEST["bfloat16"])
    narrow = staticmethod(kernels.to_bfloat16)
    widen = staticmethod(kernels.from_bfloat16)


class Float8(Blockwise):
    """e4m3fn, and a power of two for every block of 128: see [Note: float8]."""

    name = "float8"
    id = 8
    block = 128
    scale_dtype = np.uint8
    code_dtype = np.uint8

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        smallest = 2.0 ** (least_scale(dtype) - 135 - 9)
        bound = ErrorBound(
            relative=2.0**-4, absolute=smallest / 2, largest=LARGEST[dtype], block=self.block
        )
        return self._payload_bytes(count), scratch_bytes(dtype, count), bound

    def _to_codes(self, source: Words, scales: Words, codes: Words, dtype: str) -> None:
        kernels.to_float8(source, scales, codes, least_scale(dtype))

    def _from_codes(self, scales: Words, codes: Words, out: Words) -> None:
        kernels.from_float8(scales, codes, out)

    def _check_scales(self, scales: Words, dtype: str) -> None:
        if scales.size and scales.min() < least_scale(dtype):
            raise CodecError(
                f"codec {self.name}: a scale of {scales.min()}, where {dtype} has"
                f" {least_scale(dtype)} or more"
            )


def least_scale(dtype: str) -> int:
    """The least scale of a block of float8, as its byte."""
    return 120 if dtype == "float16" else 20
