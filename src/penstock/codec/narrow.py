"""Codec ``narrow``: integers as differences to the least in fewer bytes, two-valued masks in one bit.

[Note: format narrow]
    The payload begins with a head of 24 bytes, little-endian: u8 bits per element (0, 1, 8, 16 or 32); 7
    bytes that MUST be 0; u64 least, the word of the least element; u64 other. Words are as wide as the
    elements, the bytes above them MUST be 0. Behind it, for ``count`` elements:

    - 0 bits: nothing. All elements are the least.
    - 1 bit: a bitmap of ``ceil(count / 64)`` little-endian u64, whose bit ``i % 64`` of number
      ``i // 64`` is set if and only if element ``i`` is ``other``; the rest are the least. Bits from
      ``count`` on MUST be 0.
    - 8, 16 or 32 bits, fewer than the element has: the element less the least, modulo 2 to the bits of a
      word, little-endian, for every element in order. The addition wraps around: any two int64 have a
      difference.

    ``other`` MUST be 0 unless there is 1 bit. The payload MUST have no other length.

The whole tensor has one width. Indices of max-pooling, int64, take 0.25 of their bytes in VGG-16, 0.24 in
AlexNet, 0.20 in GoogLeNet; a width per block of 4096 takes slightly more in all of them. A table of the
few differences between neighbours would take 0.125, and the position in the pooling's window 0.03 to
0.06: 2 to 4 % of all that these networks save, too little to pay for either.

Two values occur not only in bool: on the CPU a dropout saves floats that are 0 or ``1 / (1 - p)``, a
quarter of what GPT-2 and BERT save.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.codec.base import DTYPES, ITEMSIZE, Bytes, Codec, Fidelity, Words
from penstock.codec.kernels import narrow as kernels
from penstock.codec.positive import bitmap_bytes
from penstock.core.errors import CodecError

__all__ = ["HEAD_BYTES", "Head", "Narrow", "parse_head", "payload_bytes", "width_for"]

HEAD_BYTES: Final = 24
_HEAD: Final = struct.Struct("<B7xQQ")
_SIGNED: Final[dict[int, Any]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_PACKED: Final[dict[int, Any]] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
_UNSIGNED: Final = frozenset({"bool", "uint8"})


class Head(NamedTuple):
    """Head of a payload."""

    bits: int
    """Bits per element."""
    least: int
    """Word of the least element."""
    other: int
    """Word of the other element, if there is 1 bit per element."""

    def to_bytes(self) -> bytes:
        """Return the head's bytes."""
        return _HEAD.pack(*self)


class Narrow(Codec):
    """Codec of differences to the least element, in as few bytes as all fit in. Lossless; every dtype."""

    name = "narrow"
    id = 4
    dtypes = frozenset(DTYPES)
    fidelity = Fidelity.EXACT

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        size = words.itemsize
        if payload.size <= HEAD_BYTES:
            return None
        ordered = words if dtype in _UNSIGNED else words.view(_SIGNED[size])
        low, high, only_two = kernels.survey(ordered, kernels.widest(size))
        mask = (1 << 8 * size) - 1
        bits = width_for(int(high) - int(low), bool(only_two), size)
        head = Head(bits or 0, int(low) & mask, int(high) & mask if bits == 1 else 0)
        if bits is None or payload_bytes(bits, words.size) >= payload.size:
            return None
        payload[:HEAD_BYTES] = np.frombuffer(head.to_bytes(), np.uint8)
        body = payload[HEAD_BYTES : payload_bytes(bits, words.size)]
        if bits == 1:
            kernels.pack_two(words, words.dtype.type(head.other), body)
        elif bits:
            kernels.subtract(words, words.dtype.type(head.least), body.view(_PACKED[bits]))
        return HEAD_BYTES + body.size

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        head = parse_head(payload[:HEAD_BYTES].tobytes(), payload.size, words.size, dtype)
        least, other = words.dtype.type(head.least), words.dtype.type(head.other)
        body = payload[HEAD_BYTES:]
        if head.bits == 0:
            words[:] = least
        elif head.bits > 1:
            kernels.add(body.view(_PACKED[head.bits]), least, words)
        elif kernels.beyond(body, words.size):
            raise CodecError(f"codec narrow: the bitmap has bits beyond its {words.size} elements")
        else:
            kernels.unpack_two(body, least, other, words)


def width_for(span: int, only_two: bool, itemsize: int) -> int | None:
    """Return the bits per element, or ``None`` if they are no fewer than an element has.

    Args:
        span: The greatest element minus the least.
        only_two: True if no element is between them.
        itemsize: Bytes of an element.
    """
    if span == 0:
        return 0
    if only_two:
        return 1
    return next((bits for bits in _PACKED if bits < 8 * itemsize and span < 1 << bits), None)


def payload_bytes(bits: int, count: int) -> int:
    """Return the length of a payload."""
    return HEAD_BYTES + (bitmap_bytes(count) if bits == 1 else bits // 8 * count)


def parse_head(head: bytes, length: int, count: int, dtype: str) -> Head:
    """Parse the head of a payload of ``length`` bytes for ``count`` elements. Raises CodecError."""
    if len(head) < HEAD_BYTES or count == 0:
        raise CodecError(
            f"codec narrow: {length} bytes are no payload for {count} elements: the frame is damaged"
        )
    parsed = Head(*_HEAD.unpack(head))
    width = 8 * ITEMSIZE[dtype]
    known = parsed.bits in (0, 1) or (parsed.bits in _PACKED and parsed.bits < width)
    fits = max(parsed.least, parsed.other) < 1 << width
    if not known or not fits or parsed.to_bytes() != head or (parsed.other and parsed.bits != 1):
        raise CodecError(f"codec narrow: the head {head.hex()} for {dtype} is damaged")
    if length != payload_bytes(parsed.bits, count):
        raise CodecError(
            f"codec narrow: the payload has {length} bytes; {count} {dtype} in {parsed.bits} bits"
            f" take {payload_bytes(parsed.bits, count)}"
        )
    return parsed
