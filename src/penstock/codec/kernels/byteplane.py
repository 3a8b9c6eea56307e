"""The hot loops of the codec ``byteplane``; the format is in :mod:`penstock.codec.byteplane`.

A block is read twice, from memory and then from the first cache: for its exponents, and to be split. All
loops have the length of a block and no branch, so that they are vectorised; and every operation is
wrapped in ``of``, the type of the words, or in ``np.uint8``, because Numba widens integers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.codec.base import Bytes, Words

BLOCK: Final = 512
"""Elements that share a greatest exponent."""
RAW: Final = 0
PACKED: Final = 1
"""Kinds of blocks."""
HEAD_BYTES: Final = 2
CODES: Final = 15
"""Exponents that have a code, beside 0."""

_HALF: Final = BLOCK // 2


@njit(nogil=True, cache=True)
def packed_bytes(itemsize: int) -> int:
    """How long a block is that is not raw, behind its head."""
    return BLOCK * (itemsize - 1) + _HALF


@njit(nogil=True, cache=True)
def _shift(itemsize: int) -> int:
    """How many bits there are below the exponent."""
    return 8 * itemsize - 9


@njit(nogil=True, cache=True)
def _exponents(block: Words, exponents: Bytes) -> Any:
    """Take the exponents of a block; the greatest, and one less than the least of those not 0."""
    of = block.dtype.type
    shift = of(_shift(block.itemsize))
    for index in range(BLOCK):
        exponents[index] = np.uint8(block[index] >> shift)
    high, low = np.uint8(0), np.uint8(255)
    for index in range(BLOCK):
        high = max(high, exponents[index])
        low = min(low, np.uint8(exponents[index] - np.uint8(1)))
    return high, low


@njit(nogil=True, cache=True)
def _code(exponent: np.uint8, back: np.uint8) -> Any:
    return np.uint8(exponent - back) if exponent != 0 else np.uint8(0)


@njit(nogil=True, cache=True)
def _to_codes(exponents: Bytes, high: np.uint8, codes: Bytes) -> None:
    back = np.uint8(high - np.uint8(CODES))
    left, right = exponents[:_HALF], exponents[_HALF:]
    for index in range(_HALF):
        upper = np.uint8(_code(right[index], back) << np.uint8(4))
        codes[index] = np.uint8(_code(left[index], back) | upper)


@njit(nogil=True, cache=True)
def _from_codes(codes: Bytes, high: np.uint8, exponents: Bytes) -> None:
    back = np.uint8(high - np.uint8(CODES))
    left, right = exponents[:_HALF], exponents[_HALF:]
    for index in range(_HALF):
        code = np.uint8(codes[index] & np.uint8(15))
        left[index] = np.uint8(code + back) if code != 0 else np.uint8(0)
        code = np.uint8(codes[index] >> np.uint8(4))
        right[index] = np.uint8(code + back) if code != 0 else np.uint8(0)


@njit(nogil=True, cache=True)
def _split(block: Words, exponents: Bytes, high: np.uint8, out: Bytes) -> None:
    """A block to its planes: codes, signs with the top of the mantissas, and the bytes below."""
    of = block.dtype.type
    shift = _shift(block.itemsize)
    _to_codes(exponents, high, out[:_HALF])
    tops = out[_HALF : _HALF + BLOCK]
    for index in range(BLOCK):
        sign = of(of(block[index] >> of(shift + 1)) & of(0x80))
        tops[index] = np.uint8(sign | of(of(block[index] >> of(shift - 7)) & of(0x7F)))
    for plane in range(block.itemsize - 2):
        begin = _HALF + BLOCK * (plane + 1)
        bytes_ = out[begin : begin + BLOCK]
        for index in range(BLOCK):
            bytes_[index] = np.uint8(of(block[index] >> of(8 * plane)))


@njit(nogil=True, cache=True)
def _join(planes: Bytes, high: np.uint8, block: Words, exponents: Bytes) -> None:
    """The reverse of ``_split``."""
    of = block.dtype.type
    shift = _shift(block.itemsize)
    _from_codes(planes[:_HALF], high, exponents)
    tops = planes[_HALF : _HALF + BLOCK]
    for index in range(BLOCK):
        top = of(tops[index])
        sign = of(of(top & of(0x80)) << of(shift + 1))
        mantissa = of(of(top & of(0x7F)) << of(shift - 7))
        block[index] = of(of(sign | mantissa) | of(of(exponents[index]) << of(shift)))
    for plane in range(block.itemsize - 2):
        begin = _HALF + BLOCK * (plane + 1)
        bytes_ = planes[begin : begin + BLOCK]
        for index in range(BLOCK):
            block[index] = of(block[index] | of(of(bytes_[index]) << of(8 * plane)))


@njit(nogil=True, cache=True)
def encode(words: Words, out: Bytes) -> int:
    """Encode all words.

    Args:
        words: Floats with eight bits of exponent, as u16 or u32.
        out: Room; filled from the front.

    Returns:
        How many bytes that took; -1 if there is no room for them.
    """
    size, place = words.itemsize, 0
    whole = words.size - words.size % BLOCK
    exponents = np.empty(BLOCK, np.uint8)
    for start in range(0, whole, BLOCK):
        block = words[start : start + BLOCK]
        high, low = _exponents(block, exponents)
        is_packed = low + CODES >= high
        length = packed_bytes(size) if is_packed else BLOCK * size
        if place + HEAD_BYTES + length > out.size:
            return -1
        out[place] = PACKED if is_packed else RAW
        out[place + 1] = high if is_packed else np.uint8(0)
        body = out[place + HEAD_BYTES : place + HEAD_BYTES + length]
        if is_packed:
            _split(block, exponents, high, body)
        else:
            body[:] = block.view(np.uint8)
        place += HEAD_BYTES + length
    rest = words[whole:].view(np.uint8)
    if place + rest.size > out.size:
        return -1
    out[place : place + rest.size] = rest
    return place + rest.size


@njit(nogil=True, cache=True)
def decode(payload: Bytes, words: Words) -> int:
    """Fill ``words`` from a payload, which may be anything at all.

    Returns:
        -1 if all is well; otherwise where in the payload it is not what ``encode`` makes.
    """
    size, place = words.itemsize, 0
    whole = words.size - words.size % BLOCK
    exponents = np.empty(BLOCK, np.uint8)
    for start in range(0, whole, BLOCK):
        block = words[start : start + BLOCK]
        if place + HEAD_BYTES > payload.size or payload[place] > PACKED:
            return place
        is_packed, high = payload[place] == PACKED, payload[place + 1]
        length = packed_bytes(size) if is_packed else BLOCK * size
        if place + HEAD_BYTES + length > payload.size or not (is_packed or high == 0):
            return place
        body = payload[place + HEAD_BYTES : place + HEAD_BYTES + length]
        if is_packed:
            _join(body, high, block, exponents)
        else:
            block.view(np.uint8)[:] = body
        place += HEAD_BYTES + length
    rest = words[whole:].view(np.uint8)
    if payload.size - place != rest.size:
        return place
    rest[:] = payload[place:]
    return -1
