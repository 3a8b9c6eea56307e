"""Hot loops of the codec ``exponent``, whose format is in :mod:`penstock.codec.exponent`.

Every loop but those over exceptions has a length that is known and no branch, so that it is vectorised.
Operations are wrapped in ``of``, the type of the words, or in ``_U8``, because Numba widens integers.
Helpers are inlined by Numba: what a call costs is a third of a block's time.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.codec.base import Bytes, Words

BLOCK: Final = 512
"""Elements that share a greatest top."""
HEAD_BYTES: Final = 4
RAW, ZERO, ROTATED_3, PLAIN_3, ROTATED_4, PLAIN_4 = range(6)
"""Kinds of blocks."""
MOST: Final = 318
"""Exceptions that a block may have: with more it is not shorter."""

_LANES: Final = 64
_CODES_3: Final = 3 * _LANES
_CODES_4: Final = 4 * _LANES
"""Bytes that the codes of a block take."""
_FEW: Final = _CODES_4 - _CODES_3
"""Number of exceptions below which three bits take fewer bytes than four."""
_U8, _U16, _U64, _AT = np.uint8, np.uint16, np.uint64, np.uintp
_FIVES: Final = np.uint64(0x5555555555555555)
_THREES: Final = np.uint64(0x3333333333333333)
_FIFTEENS: Final = np.uint64(0x0F0F0F0F0F0F0F0F)
_ONES: Final = np.uint64(0x0101010101010101)


@njit(nogil=True, cache=True, inline="always")
def _copy(source: Bytes, out: Bytes) -> None:
    """Copy bytes. Numba does not vectorise ``out[:] = source``."""
    for i in range(out.size):
        out[i] = source[i]


# -- planes ---------------------------------------------------------------------------------------


@njit(nogil=True, cache=True, inline="always")
def _any_bit(block: Words) -> Any:
    """Return the bits that are set in any element."""
    of = block.dtype.type
    found = of(0)
    for i in range(BLOCK):
        found = of(found | block[i])
    return found


@njit(nogil=True, cache=True, inline="always")
def _put_planes(block: Words, is_rotated: Any, tops: Bytes, planes: Bytes) -> None:
    """Rotate each element left by one bit, or not; its highest byte is its top, the rest the planes."""
    of = block.dtype.type
    bits = 8 * block.itemsize
    middle = planes[:BLOCK]
    if is_rotated:
        for i in range(BLOCK):
            tops[i] = _U8(of(of(block[i] << of(1)) >> of(bits - 8)))
        if block.itemsize == 2:
            for i in range(BLOCK):
                middle[i] = _U8(of(of(block[i] << of(1)) | of(block[i] >> of(bits - 1))))
        else:
            lower = planes[BLOCK : 3 * BLOCK].view(np.uint16)
            for i in range(BLOCK):
                middle[i] = _U8(of(of(block[i] << of(1)) >> of(bits - 16)))
            for i in range(BLOCK):
                lower[i] = _U16(of(of(block[i] << of(1)) | of(block[i] >> of(bits - 1))))
    else:
        for i in range(BLOCK):
            tops[i] = _U8(of(block[i] >> of(bits - 8)))
        for i in range(BLOCK):
            middle[i] = _U8(of(block[i] >> of(bits - 16)))
        if block.itemsize == 4:
            lower = planes[BLOCK : 3 * BLOCK].view(np.uint16)
            for i in range(BLOCK):
                lower[i] = _U16(block[i])


@njit(nogil=True, cache=True, inline="always")
def _get_planes(tops: Bytes, planes: Bytes, is_rotated: Any, block: Words) -> None:
    """Join tops and planes to elements, as ``_put_planes`` split them."""
    of = block.dtype.type
    bits = 8 * block.itemsize
    middle = planes[:BLOCK]
    if block.itemsize == 2:
        for i in range(BLOCK):
            block[i] = of(of(of(tops[i]) << of(bits - 8)) | of(middle[i]))
    else:
        lower = planes[BLOCK : 3 * BLOCK].view(np.uint16)
        for i in range(BLOCK):
            upper = of(of(of(tops[i]) << of(bits - 8)) | of(of(middle[i]) << of(bits - 16)))
            block[i] = of(upper | of(lower[i]))
    if is_rotated:
        for i in range(BLOCK):
            block[i] = of(of(block[i] >> of(1)) | of(block[i] << of(bits - 1)))


# -- codes ----------------------------------------------------------------------------------------


@njit(nogil=True, cache=True, inline="always")
def _base(high: Any, codes: int) -> Any:
    """Return the top that code 0 would stand for beside ``codes`` others."""
    return _U8(max(high, _U8(codes)) - _U8(codes))


@njit(nogil=True, cache=True, inline="always")
def _bounds(tops: Bytes) -> Any:
    """Return the greatest top, and one less than the least top that is not 0."""
    high, low = _U8(0), _U8(255)
    for i in range(BLOCK):
        high = max(high, tops[i])
        low = min(low, _U8(tops[i] - _U8(1)))
    return high, low


@njit(nogil=True, cache=True, inline="always")
def _to_codes(tops: Bytes, base: Any, codes: Bytes) -> None:
    for i in range(BLOCK):
        codes[i] = _U8(tops[i] - base) if tops[i] > base else _U8(0)


@njit(nogil=True, cache=True, inline="always")
def _put_codes_4(codes: Bytes, out: Bytes) -> None:
    half = BLOCK // 2
    left, right = codes[:half], codes[half:]
    for i in range(half):
        out[i] = _U8(left[i] | _U8(right[i] << _U8(4)))


@njit(nogil=True, cache=True, inline="always")
def _get_tops_4(source: Bytes, base: Any, tops: Bytes) -> None:
    half = BLOCK // 2
    left, right = tops[:half], tops[half:]
    for i in range(half):
        code = _U8(source[i] & _U8(15))
        left[i] = _U8(code + base) if code != 0 else _U8(0)
        code = _U8(source[i] >> _U8(4))
        right[i] = _U8(code + base) if code != 0 else _U8(0)


@njit(nogil=True, cache=True, inline="always")
def _put_codes_3(codes: Bytes, planes: Bytes) -> None:
    for i in range(_LANES):
        third, sixth = codes[i + 128], codes[i + 320]
        low = _U8(codes[i] | _U8(codes[i + 64] << _U8(3)))
        planes[i] = _U8(low | _U8(third << _U8(6)))
        low = _U8(_U8(third >> _U8(2)) | _U8(codes[i + 192] << _U8(1)))
        planes[i + 64] = _U8(low | _U8(_U8(codes[i + 256] << _U8(4)) | _U8(sixth << _U8(7))))
        low = _U8(_U8(sixth >> _U8(1)) | _U8(codes[i + 384] << _U8(2)))
        planes[i + 128] = _U8(low | _U8(codes[i + 448] << _U8(5)))


@njit(nogil=True, cache=True, inline="always")
def _get_codes_3(planes: Bytes, codes: Bytes) -> None:
    seven = _U8(7)
    for i in range(_LANES):
        one, two, three = planes[i], planes[i + 64], planes[i + 128]
        codes[i] = _U8(one & seven)
        codes[i + 64] = _U8(_U8(one >> _U8(3)) & seven)
        codes[i + 128] = _U8(_U8(one >> _U8(6)) | _U8(_U8(two << _U8(2)) & _U8(4)))
        codes[i + 192] = _U8(_U8(two >> _U8(1)) & seven)
        codes[i + 256] = _U8(_U8(two >> _U8(4)) & seven)
        codes[i + 320] = _U8(_U8(two >> _U8(7)) | _U8(_U8(three << _U8(1)) & _U8(6)))
        codes[i + 384] = _U8(_U8(three >> _U8(2)) & seven)
        codes[i + 448] = _U8(three >> _U8(5))


# -- exceptions -----------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _ones(x: Any) -> Any:
    """Count the bits that are set. LLVM recognises this form."""
    x = _U64(x - _U64(_U64(x >> _U64(1)) & _FIVES))
    x = _U64(_U64(x & _THREES) + _U64(_U64(x >> _U64(2)) & _THREES))
    x = _U64(_U64(x + _U64(x >> _U64(4))) & _FIFTEENS)
    return _U64(_U64(x * _ONES) >> _U64(56))


@njit(nogil=True, cache=True, inline="always")
def _mark(codes: Bytes, marks: Bytes) -> Any:
    """Make a byte for each i, whose bit k says whether code i + 64 k is 0; return how many are."""
    for i in range(_LANES):
        found = _U8(0)
        for k in range(8):
            is_zero = _U8(1) if codes[i + _LANES * k] == _U8(0) else _U8(0)
            found = _U8(found | _U8(is_zero << _U8(k)))
        marks[i] = found
    words, count = marks.view(np.uint64), _U64(0)
    for word in range(8):
        count = _U64(count + _ones(_U64(words[word])))
    return np.int64(count)


@njit(nogil=True, cache=True)
def _element(word: int, bits: Any) -> Any:
    """Return the element of the lowest bit of a word of marks."""
    place = _ones(_U64(_U64(bits & _U64(~bits + _U64(1))) - _U64(1)))
    return _AT(8 * word) + _AT(place >> _U64(3)) + _AT(_U64(place & _U64(7)) * _U64(_LANES))


@njit(nogil=True, cache=True, inline="always")
def _put_exceptions(tops: Bytes, marks: Bytes, out: Bytes) -> None:
    words, count = marks.view(np.uint64), _AT(0)
    for word in range(8):
        bits = _U64(words[word])
        while bits:
            out[count] = tops[_element(word, bits)]
            count += _AT(1)
            bits = _U64(bits & _U64(bits - _U64(1)))


@njit(nogil=True, cache=True, inline="always")
def _get_exceptions(source: Bytes, marks: Bytes, tops: Bytes) -> None:
    words, count = marks.view(np.uint64), _AT(0)
    for word in range(8):
        bits = _U64(words[word])
        while bits:
            tops[_element(word, bits)] = source[count]
            count += _AT(1)
            bits = _U64(bits & _U64(bits - _U64(1)))


# -- blocks ---------------------------------------------------------------------------------------


@njit(nogil=True, cache=True, inline="always")
def _body_bytes(head: Any, itemsize: int) -> int:
    """Return the length of the body of a block with this head; -1 if there is none."""
    kind, high, count = head
    rest = BLOCK * (itemsize - 1)
    length = -1
    if ROTATED_3 <= kind <= PLAIN_3:
        length = rest + _CODES_3 + count + count % 2 if count <= MOST else -1
    elif count == 0:
        if ROTATED_4 <= kind <= PLAIN_4:
            length = rest + _CODES_4
        elif high == 0 and kind <= ZERO:
            length = rest + BLOCK if kind == RAW else 0
    return length


@njit(nogil=True, cache=True, inline="always")
def _encode_block(block: Words, is_small: bool, tools: Any, body: Bytes) -> Any:
    """Fill the body, which has room for the block as it is; return the head."""
    of = block.dtype.type
    size = block.itemsize
    place = BLOCK * (size - 1)
    tops, codes, marks = tools
    kind, high = ZERO, _U8(0)
    count: Any = np.int64(0)
    bits = _any_bit(block)
    if bits != 0:
        is_rotated = of(bits >> of(8 * size - 1)) != 0
        _put_planes(block, is_rotated, tops, body)
        high, low = _bounds(tops)
        base = _base(high, 15)
        fits, zeros = low >= base, np.int64(BLOCK)
        if is_small or not fits:
            _to_codes(tops, _base(high, 7), codes)
            zeros = _mark(codes, marks)
        if zeros < _FEW or (zeros <= MOST and not fits):
            kind, count = ROTATED_3 if is_rotated else PLAIN_3, zeros
            _put_codes_3(codes, body[place : place + _CODES_3])
            body[place + _CODES_3 + count] = 0
            _put_exceptions(tops, marks, body[place + _CODES_3 :])
        elif fits:
            kind = ROTATED_4 if is_rotated else PLAIN_4
            _to_codes(tops, base, codes)
            _put_codes_4(codes, body[place : place + _CODES_4])
        else:
            kind, high = RAW, _U8(0)
            _copy(block.view(np.uint8), body[: BLOCK * size])
    return kind, high, count


@njit(nogil=True, cache=True, inline="always")
def _decode_block(head: Any, body: Bytes, tools: Any, block: Words) -> bool:
    """Decode a body of the right length; return False if it is not that of a block."""
    kind, high, count = head
    tops, codes, marks = tools
    place = BLOCK * (block.itemsize - 1)
    is_good = True
    if kind == ZERO:
        block[:] = 0
    elif kind == RAW:
        _copy(body, block.view(np.uint8))
    else:
        if kind >= ROTATED_4:
            _get_tops_4(body[place : place + _CODES_4], _base(_U8(high), 15), tops)
        else:
            _get_codes_3(body[place : place + _CODES_3], codes)
            base = _base(_U8(high), 7)
            for i in range(BLOCK):
                tops[i] = _U8(codes[i] + base)
            is_good = _mark(codes, marks) == count
            if is_good:
                _get_exceptions(body[place + _CODES_3 :], marks, tops)
        if is_good:
            _get_planes(tops, body, kind % 2 == 0, block)
    return is_good


@njit(nogil=True, cache=True, inline="always")
def _put_head(head: Any, out: Bytes, at: int) -> None:
    kind, high, count = head
    out[at], out[at + 1] = _U8(kind), _U8(high)
    out[at + 2], out[at + 3] = _U8(count & 255), _U8(count >> 8)


@njit(nogil=True, cache=True, inline="always")
def _get_head(source: Bytes, at: int) -> Any:
    of = np.int64
    return of(source[at]), of(source[at + 1]), of(source[at + 2]) + of(256) * of(source[at + 3])


@njit(nogil=True, cache=True, inline="always")
def _tools() -> Any:
    """Return scratch memory for a block's tops, codes and marks."""
    room = np.empty(2 * BLOCK + _LANES, np.uint8)
    return room[:BLOCK], room[BLOCK : 2 * BLOCK], room[2 * BLOCK :]


# -- payloads -------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def encode(words: Words, out: Bytes, is_small: bool) -> int:
    """Encode all words.

    Args:
        words: Floats with eight bits of exponent, as u16 or u32.
        out: Room; filled from the front.
        is_small: Whether codes of three bits are tried first: fewer bytes, in more time.

    Returns:
        How many bytes that took; -1 if there is no room for them.
    """
    size, blocks = words.itemsize, words.size // BLOCK
    place, most = HEAD_BYTES * blocks, BLOCK * words.itemsize
    if place > out.size:
        return -1
    is_even = out.ctypes.data % 2 == 0  # halves must be aligned
    tools, scratch = _tools(), np.empty(most, np.uint8)
    for index in range(blocks):
        block = words[index * BLOCK : (index + 1) * BLOCK]
        has_room = is_even and place + most <= out.size
        body = out[place : place + most] if has_room else scratch
        head = _encode_block(block, is_small, tools, body)
        _put_head(head, out, HEAD_BYTES * index)
        length = _body_bytes(head, size)
        if place + length > out.size:
            return -1
        if not has_room:
            _copy(scratch, out[place : place + length])
        place += length
    rest = words[blocks * BLOCK :].view(np.uint8)
    if place + rest.size > out.size:
        return -1
    _copy(rest, out[place : place + rest.size])
    return place + rest.size


@njit(nogil=True, cache=True)
def decode(payload: Bytes, words: Words) -> int:
    """Decode a payload, of any contents, to ``words``.

    Returns:
        -1 if all is well; otherwise where in the payload it is not what ``encode`` makes.
    """
    size, blocks = words.itemsize, words.size // BLOCK
    place = HEAD_BYTES * blocks
    if place > payload.size:
        return payload.size
    is_even = payload.ctypes.data % 2 == 0  # halves must be aligned
    tools, scratch = _tools(), np.empty(BLOCK * size, np.uint8)
    for index in range(blocks):
        block = words[index * BLOCK : (index + 1) * BLOCK]
        head = _get_head(payload, HEAD_BYTES * index)
        length = _body_bytes(head, size)
        if length < 0:
            return HEAD_BYTES * index
        if place + length > payload.size:
            return place
        body = payload[place : place + length] if is_even else scratch
        if not is_even:
            _copy(payload[place : place + length], scratch[:length])
        if not _decode_block(head, body, tools, block):
            return place
        place += length
    rest = words[blocks * BLOCK :].view(np.uint8)
    if payload.size - place != rest.size:
        return place
    _copy(payload[place:], rest)
    return -1


# -- in the memory that the words lie in ----------------------------------------------------------


@njit(nogil=True, cache=True)
def encode_back(words: Words, memory: Bytes, place: int) -> int:
    """Encode whole blocks in as few bytes as possible, so that they end at ``place`` of their own buffer.

    They are taken from the last to the first, so that none is overwritten before it was read if there
    are ``HEAD_BYTES`` for each between their end and ``place``.

    Args:
        words: As for ``encode``, a multiple of ``BLOCK``; in ``memory``.
        memory: At an even address.
        place: Even.

    Returns:
        Where the payload begins.
    """
    size, blocks = words.itemsize, words.size // BLOCK
    heads, scratch = np.empty(HEAD_BYTES * blocks, np.uint8), np.empty(BLOCK * size, np.uint8)
    tools = _tools()
    for index in range(blocks - 1, -1, -1):
        block = words[index * BLOCK : (index + 1) * BLOCK]
        head = _encode_block(block, True, tools, scratch)
        _put_head(head, heads, HEAD_BYTES * index)
        length = _body_bytes(head, size)
        place -= length
        _copy(scratch, memory[place : place + length])
    place -= heads.size
    _copy(heads, memory[place : place + heads.size])
    return place


@njit(nogil=True, cache=True)
def decode_ahead(memory: Bytes, place: int, words: Words) -> int:
    """Decode what ``encode_back`` has encoded, of any contents.

    Returns:
        Where the payload ends; -1: this is not what ``encode_back`` makes.
    """
    size, blocks = words.itemsize, words.size // BLOCK
    heads, scratch = np.empty(HEAD_BYTES * blocks, np.uint8), np.empty(BLOCK * size, np.uint8)
    if place + heads.size > memory.size:
        return -1
    _copy(memory[place:], heads)
    place += heads.size
    tools = _tools()
    for index in range(blocks):
        block = words[index * BLOCK : (index + 1) * BLOCK]
        head = _get_head(heads, HEAD_BYTES * index)
        length = _body_bytes(head, size)
        if length < 0 or place + length > memory.size:
            return -1
        _copy(memory[place : place + length], scratch[:length])
        place += length
        if not _decode_block(head, scratch, tools, block):
            return -1
    return place
