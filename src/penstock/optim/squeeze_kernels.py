"""How a record is squeezed, on the bits; the twin is :mod:`penstock.optim.squeeze_twin`.

[Note: squeezed floats]
    Neighbours among weights, means and variances are of similar magnitude: of eight bits of exponent
    fewer than three are news. ``BLOCK`` elements of float32 (uint32) or bfloat16 (uint16) share the
    greatest exponent, and each has a code of three bits: 7 for that exponent, 6 for the one below, and so
    on; 0 means that the exponent, a byte, stands by itself among the *exceptions*. In normally
    distributed elements one in thirty is one. Everything else is kept as it is, in planes.

    The exponent is taken with a bit to spare. Where any element has a sign, it is moved below the
    exponent: the *top* byte is the exponent, and the sign is the highest bit of the byte after it. Where
    none has one, as in variances, the top byte is the highest of the float as it is, seven of eight bits
    of the exponent; then a code stands for two binades, which suits squares.

    A squeezed block is, with all its numbers in the machine's byte order (little):

    1. a head of three bytes: its kind, its greatest top, and the number of exceptions;
    2. ``BLOCK`` bytes: of each element the byte below the top;
    3. of float32, ``BLOCK`` halves: the lower 16 bits of each element;
    4. three planes of 64 bytes: the codes of elements i, i + 64, ..., i + 448 are the 24 bits of bytes
       i of the planes, from the lowest bit of the first plane on;
    5. the exceptions, those of elements i, i + 64, ..., i + 448 before those of i + 1.

    A block of zeros is a head alone. A block with more exceptions than a byte can count is a head and
    its elements. In both, the other two bytes of the head MUST be 0.

Every loop but that over the exceptions has a length that is known, two arrays at most that are read or
written at varying distance, and no branch, so that it is vectorised.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

BLOCK: Final = 512
"""Elements that share a greatest exponent."""
HEAD_BYTES: Final = 3
RAW, SIGNED, UNSIGNED, ZERO = range(4)
"""Kinds of blocks."""
CODES: Final = 7
"""Tops that have a code."""
MOST: Final = 255
"""Exceptions in a block."""

_PLANE: Final = 64
_PLANES: Final = 3 * _PLANE
_BODY: Final = 64
"""Offset of a block's body in scratch, so that its halves are aligned."""
_SCRATCH: Final = 4096
_U8, _U16, _U64, _AT = np.uint8, np.uint16, np.uint64, np.uintp
_SIGN: Final = np.uint16(0x8000)
_FIVES: Final = np.uint64(0x5555555555555555)
_THREES: Final = np.uint64(0x3333333333333333)
_FIFTEENS: Final = np.uint64(0x0F0F0F0F0F0F0F0F)
_ONES: Final = np.uint64(0x0101010101010101)


@njit(nogil=True, cache=True)
def _copy(source: Any, out: Any) -> None:
    """As ``out[:] = source``, which is not vectorised."""
    for i in range(out.size):
        out[i] = source[i]


# -- tops -----------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _take_apart(block: Any, uppers: Any, lowers: Any) -> Any:
    """The upper halves of the elements, and the lower ones if they have any; every upper bit."""
    if block.size == BLOCK:
        for i in range(BLOCK):
            uppers[i] = block[i]
    else:
        for i in range(BLOCK):
            lowers[i] = block[2 * i]
            uppers[i] = block[2 * i + 1]
    found = _U16(0)
    for i in range(BLOCK):
        found = _U16(found | uppers[i])
    return found


@njit(nogil=True, cache=True)
def _put_together(uppers: Any, lowers: Any, block: Any) -> None:
    """The reverse."""
    if block.size == BLOCK:
        for i in range(BLOCK):
            block[i] = uppers[i]
    else:
        for i in range(BLOCK):
            block[2 * i] = lowers[i]
            block[2 * i + 1] = uppers[i]


@njit(nogil=True, cache=True)
def _lower_signs(uppers: Any) -> None:
    """Move each sign below the exponent."""
    for i in range(BLOCK):
        half = _U16(uppers[i])
        sign = _U16(_U16(half >> _U16(8)) & _U16(0x80))
        exponent = _U16(_U16(half << _U16(1)) & _U16(0xFF00))
        uppers[i] = _U16(_U16(exponent | sign) | _U16(half & _U16(0x7F)))


@njit(nogil=True, cache=True)
def _raise_signs(uppers: Any) -> None:
    """The reverse."""
    for i in range(BLOCK):
        half = _U16(uppers[i])
        sign = _U16(_U16(half & _U16(0x80)) << _U16(8))
        exponent = _U16(_U16(half >> _U16(1)) & _U16(0x7F80))
        uppers[i] = _U16(_U16(exponent | sign) | _U16(half & _U16(0x7F)))


@njit(nogil=True, cache=True)
def _split(uppers: Any, tops: Any, middle: Any) -> Any:
    """Both bytes of each; the greatest top."""
    for i in range(BLOCK):
        tops[i] = _U8(_U16(uppers[i] >> _U16(8)))
    for i in range(BLOCK):
        middle[i] = _U8(_U16(uppers[i] & _U16(0xFF)))
    high = _U8(0)
    for i in range(BLOCK):
        high = max(high, tops[i])
    return high


@njit(nogil=True, cache=True)
def _join(tops: Any, middle: Any, uppers: Any) -> None:
    """The reverse."""
    for i in range(BLOCK):
        uppers[i] = _U16(_U16(_U16(tops[i]) << _U16(8)) | _U16(middle[i]))


# -- codes ----------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _base(high: Any) -> Any:
    """The top that code 0 would stand for."""
    return _U8(max(high, _U8(CODES)) - _U8(CODES))


@njit(nogil=True, cache=True)
def _to_codes(tops: Any, high: Any, codes: Any) -> None:
    base = _base(high)
    for i in range(BLOCK):
        codes[i] = _U8(tops[i] - base) if tops[i] > base else _U8(0)


@njit(nogil=True, cache=True)
def _count(codes: Any) -> int:
    """How many are 0."""
    count = 0
    for start in range(0, BLOCK, _PLANE):
        some = _U8(0)
        for i in range(_PLANE):
            some = _U8(some + (_U8(1) if codes[start + i] == _U8(0) else _U8(0)))
        count += int(some)
    return count


@njit(nogil=True, cache=True)
def _put_codes(codes: Any, planes: Any) -> None:
    for i in range(_PLANE):
        third, sixth = codes[i + 128], codes[i + 320]
        low = _U8(codes[i] | _U8(codes[i + 64] << _U8(3)))
        planes[i] = _U8(low | _U8(third << _U8(6)))
        low = _U8(_U8(third >> _U8(2)) | _U8(codes[i + 192] << _U8(1)))
        planes[i + 64] = _U8(low | _U8(_U8(codes[i + 256] << _U8(4)) | _U8(sixth << _U8(7))))
        low = _U8(_U8(sixth >> _U8(1)) | _U8(codes[i + 384] << _U8(2)))
        planes[i + 128] = _U8(low | _U8(codes[i + 448] << _U8(5)))


@njit(nogil=True, cache=True)
def _get_codes(planes: Any, codes: Any) -> None:
    seven = _U8(7)
    for i in range(_PLANE):
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
def _mark(codes: Any, marks: Any) -> None:
    """A byte for each i: its bit k says whether code i + 64 k is 0."""
    for i in range(_PLANE):
        found = _U8(0)
        for k in range(8):
            is_zero = _U8(1) if codes[i + _PLANE * k] == _U8(0) else _U8(0)
            found = _U8(found | _U8(is_zero << _U8(k)))
        marks[i] = found


@njit(nogil=True, cache=True)
def _lowest(bits: Any) -> Any:
    """The place of the lowest bit: how many there are below it. LLVM knows what this means."""
    x = _U64(_U64(bits & _U64(~bits + _U64(1))) - _U64(1))
    x = _U64(x - _U64(_U64(x >> _U64(1)) & _FIVES))
    x = _U64(_U64(x & _THREES) + _U64(_U64(x >> _U64(2)) & _THREES))
    x = _U64(_U64(x + _U64(x >> _U64(4))) & _FIFTEENS)
    return _U64(_U64(x * _ONES) >> _U64(56))


@njit(nogil=True, cache=True)
def _element(word: int, bits: Any) -> Any:
    """Which element the lowest bit of a word of marks is about."""
    place = _lowest(bits)
    return _AT(8 * word) + _AT(place >> _U64(3)) + _AT(_U64(place & _U64(7)) * _U64(_PLANE))


@njit(nogil=True, cache=True)
def _put_exceptions(tops: Any, marks: Any, out: Any) -> None:
    words, count = marks.view(np.uint64), _AT(0)
    for word in range(8):
        bits = _U64(words[word])
        while bits:
            out[count] = tops[_element(word, bits)]
            count += _AT(1)
            bits = _U64(bits & _U64(bits - _U64(1)))


@njit(nogil=True, cache=True)
def _get_exceptions(source: Any, marks: Any, tops: Any) -> None:
    words, count = marks.view(np.uint64), _AT(0)
    for word in range(8):
        bits = _U64(words[word])
        while bits:
            tops[_element(word, bits)] = source[count]
            count += _AT(1)
            bits = _U64(bits & _U64(bits - _U64(1)))


# -- blocks ---------------------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def _body_bytes(halves: int, kind: int, count: int) -> int:
    """Behind the head of a block of so many halves."""
    if kind == ZERO:
        return 0
    if kind == RAW:
        return 2 * halves
    return 2 * halves - BLOCK + _PLANES + count


@njit(nogil=True, cache=True)
def _squeeze_block(block: Any, tools: Any, uppers: Any, scratch: Any) -> Any:
    """Make the squeezed block, its body at ``_BODY`` of scratch and its head before. Its length."""
    tops, codes, marks = tools[:BLOCK], tools[BLOCK : 2 * BLOCK], tools[2 * BLOCK :]
    planes = _BODY + 2 * block.size - BLOCK
    lowers = scratch[_BODY + BLOCK : planes].view(np.uint16)
    bits = _take_apart(block, uppers, lowers)
    scratch[_BODY - 3], scratch[_BODY - 2], scratch[_BODY - 1] = RAW, 0, 0
    if bits == 0 and _are_zero(lowers):
        scratch[_BODY - 3] = ZERO
        return HEAD_BYTES
    has_sign = bits >= _SIGN
    if has_sign:
        _lower_signs(uppers)
    high = _split(uppers, tops, scratch[_BODY : _BODY + BLOCK])
    _to_codes(tops, high, codes)
    count = _count(codes)
    if count > MOST:
        _copy(block.view(np.uint8), scratch[_BODY : _BODY + 2 * block.size])
        return HEAD_BYTES + 2 * block.size
    scratch[_BODY - 3] = SIGNED if has_sign else UNSIGNED
    scratch[_BODY - 2], scratch[_BODY - 1] = high, count
    _put_codes(codes, scratch[planes : planes + _PLANES])
    if count:
        _mark(codes, marks)
        _put_exceptions(tops, marks, scratch[planes + _PLANES :])
    return HEAD_BYTES + _body_bytes(block.size, SIGNED, count)


@njit(nogil=True, cache=True)
def _are_zero(lowers: Any) -> Any:
    found = _U16(0)
    for i in range(lowers.size):
        found = _U16(found | lowers[i])
    return found == 0


@njit(nogil=True, cache=True)
def _expand_block(scratch: Any, tools: Any, uppers: Any, block: Any) -> bool:
    """The reverse; false: this was not made by ``_squeeze_block``."""
    tops, codes, marks = tools[:BLOCK], tools[BLOCK : 2 * BLOCK], tools[2 * BLOCK :]
    kind, high, count = scratch[_BODY - 3], scratch[_BODY - 2], int(scratch[_BODY - 1])
    planes = _BODY + 2 * block.size - BLOCK
    _get_codes(scratch[planes : planes + _PLANES], codes)
    if _count(codes) != count:
        return False
    base = _base(high)
    for i in range(BLOCK):
        tops[i] = _U8(codes[i] + base)
    if count:
        _mark(codes, marks)
        _get_exceptions(scratch[planes + _PLANES :], marks, tops)
    _join(tops, scratch[_BODY : _BODY + BLOCK], uppers)
    if kind == SIGNED:
        _raise_signs(uppers)
    _put_together(uppers, scratch[_BODY + BLOCK : planes].view(np.uint16), block)
    return True


# -- stretches of a record ------------------------------------------------------------------------


@njit(nogil=True, cache=True)
def squeeze(memory: Any, halves: Any, width: int, place: int) -> int:
    """Squeeze whole blocks, which lie in ``memory``, to just before ``place`` of it.

    Args:
        memory: uint8; the buffer. See [Note: squeezing in place].
        halves: The elements as uint16, a multiple of ``BLOCK`` times ``width``.
        width: Halves of an element: 2 of float32, 1 of bfloat16.
        place: Where in the buffer what comes after them begins, squeezed already.

    Returns:
        Where these begin now.
    """
    tools, uppers = np.empty(2 * BLOCK + _PLANE, np.uint8), np.empty(BLOCK, np.uint16)
    scratch, size = np.empty(_SCRATCH, np.uint8), BLOCK * width
    for start in range(halves.size - size, -1, -size):
        length = _squeeze_block(halves[start : start + size], tools, uppers, scratch)
        place -= length
        _copy(scratch[_BODY - HEAD_BYTES :], memory[place : place + length])
    return place


@njit(nogil=True, cache=True)
def expand(memory: Any, place: int, halves: Any, width: int) -> int:
    """The reverse of ``squeeze``; what lies there may be anything at all.

    Returns:
        Where what comes after begins; -1: this is not what ``squeeze`` makes.
    """
    tools, uppers = np.empty(2 * BLOCK + _PLANE, np.uint8), np.empty(BLOCK, np.uint16)
    scratch, size = np.empty(_SCRATCH, np.uint8), BLOCK * width
    for start in range(0, halves.size, size):
        block = halves[start : start + size]
        if place + HEAD_BYTES > memory.size:
            return -1
        kind, high, count = memory[place], memory[place + 1], memory[place + 2]
        length = HEAD_BYTES + _body_bytes(size, kind, count)
        is_plain = kind == RAW or kind == ZERO  # noqa: PLR1714  (Numba would make a tuple)
        if kind > ZERO or place + length > memory.size or (is_plain and (high or count)):
            return -1
        found = scratch[_BODY - HEAD_BYTES : _BODY - HEAD_BYTES + length]
        _copy(memory[place : place + length], found)
        place += length
        if kind == ZERO:
            block[:] = 0
        elif kind == RAW:
            _copy(scratch[_BODY:], block.view(np.uint8))
        elif not _expand_block(scratch, tools, uppers, block):
            return -1
    return place


@njit(nogil=True, cache=True)
def move_back(memory: Any, start: int, stop: int, place: int) -> int:
    """Move bytes to just before ``place``, which is not before ``stop``; where they begin then."""
    scratch = np.empty(_SCRATCH, np.uint8)
    while stop > start:
        count = min(_SCRATCH, stop - start)
        stop, place = stop - count, place - count
        _copy(memory[stop:], scratch[:count])
        _copy(scratch, memory[place : place + count])
    return place


@njit(nogil=True, cache=True)
def move_front(memory: Any, place: int, start: int, stop: int) -> int:
    """The reverse of ``move_back``; where what comes after begins, or -1 if there is not so much."""
    if place + stop - start > memory.size:
        return -1
    scratch = np.empty(_SCRATCH, np.uint8)
    while start < stop:
        count = min(_SCRATCH, stop - start)
        _copy(memory[place:], scratch[:count])
        _copy(scratch, memory[start : start + count])
        start, place = start + count, place + count
    return place
