"""Triton kernels for :mod:`penstock.codec.device.exponent`; see [Note: format exponent].

They need Triton, which torch's CUDA builds include. Blocks of 512 elements are independent: one program
encodes or decodes one, at a place that is the sum of the lengths before it, which torch computes. Nothing
is written twice, so the results do not depend on the order in which programs run. The elements behind the
last whole block are one more block, raw and without a head.

Bodies begin at even places, so memory is addressed as bytes and as *halves*, int16. ``size`` is the
length of an element in bytes, 2 or 4; elements are int32 inside.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.codec.device import exponent
from penstock.codec.device.kernels import launch
from penstock.codec.device.words import as_bytes

_ROWS: Final = 4
"""Blocks that a program surveys."""
_HEADS: Final = 256
"""Heads that a program reads."""

_BLOCK = tl.constexpr(exponent.BLOCK)
_MOST = tl.constexpr(exponent.MOST)
_HEAD = tl.constexpr(exponent.HEAD_BYTES)
_CODES_3 = tl.constexpr(exponent.CODES_3)
_CODES_4 = tl.constexpr(exponent.CODES_4)
_LANES = tl.constexpr(64)
_RAW = tl.constexpr(exponent.RAW)
_ZERO = tl.constexpr(exponent.ZERO)
_ROTATED_3 = tl.constexpr(exponent.ROTATED_3)
_PLAIN_3 = tl.constexpr(exponent.PLAIN_3)
_ROTATED_4 = tl.constexpr(exponent.ROTATED_4)
_PLAIN_4 = tl.constexpr(exponent.PLAIN_4)
_NUMBERS: Final = ("blocks", "n", "body_bytes")
"""Arguments for whose values no kernel is compiled anew."""


# -- parts of kernels -----------------------------------------------------------------------------


@triton.jit
def _length(kind, high, count, size: tl.constexpr):
    """Return the length of a body; -1 where no block has such a head."""
    rest = _BLOCK * (size - 1)
    three = ((kind == _ROTATED_3) | (kind == _PLAIN_3)) & (count <= _MOST)
    four = ((kind == _ROTATED_4) | (kind == _PLAIN_4)) & (count == 0)
    plain = (count == 0) & (high == 0)
    length = tl.where(three, rest + _CODES_3 + count + count % 2, -1)
    length = tl.where(four, rest + _CODES_4, length)
    length = tl.where(plain & (kind == _RAW), _BLOCK * size, length)
    return tl.where(plain & (kind == _ZERO), 0, length)


@triton.jit
def _turned(value, rotated, size: tl.constexpr):
    """Rotate elements left by one bit where ``rotated``."""
    if size == 2:
        value = value & 0xFFFF
        turned = ((value << 1) | (value >> 15)) & 0xFFFF
    else:
        turned = (value << 1) | ((value >> 31) & 1)
    return tl.where(rotated, turned, value)


@triton.jit
def _tops(places, rotated, size: tl.constexpr):
    value = _turned(tl.load(places).to(tl.int32), rotated, size)
    return (value >> (8 * size - 8)) & 0xFF


@triton.jit
def _put_codes_4(block, codes, high, rotated, size: tl.constexpr):
    base = tl.maximum(high, 15) - 15
    place = tl.arange(0, _CODES_4)
    left = tl.maximum(_tops(block + place, rotated, size) - base, 0)
    right = tl.maximum(_tops(block + _CODES_4 + place, rotated, size) - base, 0)
    tl.store(codes + place, (left | (right << 4)).to(tl.uint8))


@triton.jit
def _put_codes_3(block, codes, high, count, rotated, size: tl.constexpr):
    base = tl.maximum(high, 7) - 7
    lane, third = tl.arange(0, _LANES), tl.arange(0, _BLOCK // _LANES)
    top = _tops(block + lane[:, None] + _LANES * third[None, :], rotated, size)
    code = tl.maximum(top - base, 0)
    bits = tl.sum(code << (3 * third)[None, :], 1)
    tl.store(codes + lane, (bits & 0xFF).to(tl.uint8))
    tl.store(codes + _LANES + lane, ((bits >> 8) & 0xFF).to(tl.uint8))
    tl.store(codes + 2 * _LANES + lane, ((bits >> 16) & 0xFF).to(tl.uint8))
    missing = tl.reshape((code == 0).to(tl.int32), (_BLOCK,))
    rank = tl.cumsum(missing, 0) - 1
    # words that changed since they were surveyed spoil the frame, but no other memory
    mine = (missing != 0) & (rank < count)
    tl.store(codes + _CODES_3 + rank, tl.reshape(top, (_BLOCK,)).to(tl.uint8), mask=mine)
    tl.store(codes + _CODES_3 + count, 0, mask=count % 2 == 1)


@triton.jit
def _get_codes_4(codes, high, place):
    """Return the tops of all elements, in their order."""
    base = tl.maximum(high, 15) - 15
    octet = tl.load(codes + place % _CODES_4).to(tl.int32)
    code = (octet >> (4 * (place // _CODES_4))) & 15
    return tl.where(code == 0, 0, code + base)


@triton.jit
def _get_codes_3(codes, high, count, lane, third):
    """Return the tops of elements in the order of exceptions, and which of them are such."""
    base = tl.maximum(high, 7) - 7
    bits = tl.load(codes + lane).to(tl.int32)
    bits = bits | (tl.load(codes + _LANES + lane).to(tl.int32) << 8)
    bits = bits | (tl.load(codes + 2 * _LANES + lane).to(tl.int32) << 16)
    code = (bits >> (3 * third)) & 7
    missing = (code == 0).to(tl.int32)
    rank = tl.cumsum(missing, 0) - 1
    mine = (missing != 0) & (rank < count)
    found = tl.load(codes + _CODES_3 + rank, mask=mine, other=0).to(tl.int32)
    return tl.where(missing != 0, found, code + base), missing


@triton.jit
def _put_words(block, place, top, planes, halves, rotated, size: tl.constexpr):
    """Join tops and planes to elements."""
    middle = tl.load(planes + place).to(tl.int32)
    if size == 2:
        value = (top << 8) | middle
        turned = (value >> 1) | ((value & 1) << 15)
        tl.store(block + place, tl.where(rotated, turned, value).to(tl.int16))
    else:
        lower = tl.load(halves + _BLOCK // 2 + place).to(tl.int32) & 0xFFFF
        value = (top << 24) | (middle << 16) | lower
        turned = ((value >> 1) & 0x7FFFFFFF) | (value << 31)
        tl.store(block + place, tl.where(rotated, turned, value))


@triton.jit
def _copy(source, target, first, n, size: tl.constexpr):
    """Copy the halves of a block whose first element is ``first`` of ``n``."""
    half = tl.arange(0, _BLOCK * size // 2)
    there = first + half // (size // 2) < n
    tl.store(target + half, tl.load(source + half, mask=there, other=0), mask=there)


# -- kernels --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=_NUMBERS)
def _survey(words, heads, lengths, blocks, size: tl.constexpr, rows: tl.constexpr):
    mine = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = mine < blocks
    places = mine[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    value = tl.load(words + places, mask=there[:, None], other=0).to(tl.int32)
    zero = tl.max((value != 0).to(tl.int32), 1) == 0
    rotated = tl.max((value < 0).to(tl.int32), 1)
    top = (_turned(value, rotated[:, None] != 0, size) >> (8 * size - 8)) & 0xFF
    high = tl.max(top, 1)
    base_4, base_3 = tl.maximum(high, 15) - 15, tl.maximum(high, 7) - 7
    below = (top != 0) & (top <= base_4[:, None])
    fits = tl.max(below.to(tl.int32), 1) == 0
    count = tl.sum((top <= base_3[:, None]).to(tl.int32), 1)
    raw = (fits == 0) & (count > _MOST)
    kind = tl.where(fits, _PLAIN_4, _PLAIN_3) - rotated
    kind = tl.where(raw, _RAW, tl.where(zero, _ZERO, kind))
    count = tl.where(fits | raw, 0, count)
    high = tl.where(raw | zero, 0, high)
    tl.store(heads + mine, kind | (high << 8) | (count << 16), mask=there)
    tl.store(lengths + mine, _length(kind, high, count, size).to(tl.int64), mask=there)


@triton.jit(do_not_specialize=_NUMBERS)
def _pack(words, source, heads, ends, payload, halves, first_heads, blocks, n, size: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    head = tl.load(heads + index, mask=index < blocks, other=0)
    tl.store(first_heads + index, head, mask=index < blocks)
    start = tl.load(ends + index - 1, mask=index > 0, other=0) + _HEAD * blocks
    kind, high, count = head & 0xFF, (head >> 8) & 0xFF, head >> 16
    first = index * _BLOCK
    block = words + first
    if kind == _RAW:
        _copy(source + first * (size // 2), halves + start // 2, first, n, size)
    if kind >= _ROTATED_3:
        rotated = kind % 2 == 0
        place = tl.arange(0, _BLOCK)
        value = _turned(tl.load(block + place).to(tl.int32), rotated, size)
        middle = (value >> (8 * size - 16)) & 0xFF
        tl.store(payload + start + place, middle.to(tl.uint8))
        if size == 4:
            tl.store(halves + start // 2 + _BLOCK // 2 + place, (value & 0xFFFF).to(tl.int16))
        codes = payload + start + _BLOCK * (size - 1)
        if kind >= _ROTATED_4:
            _put_codes_4(block, codes, high, rotated, size)
        else:
            _put_codes_3(block, codes, high, count, rotated, size)


@triton.jit(do_not_specialize=_NUMBERS)
def _read_heads(halves, lengths, blocks, size: tl.constexpr, rows: tl.constexpr):
    mine = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = mine < blocks
    head = tl.load(halves + 2 * mine, mask=there, other=0).to(tl.int32)
    count = tl.load(halves + 2 * mine + 1, mask=there, other=0).to(tl.int32) & 0xFFFF
    # a bad head's -1 leads to no place before the payload, for each head has four bytes
    length = _length(head & 0xFF, (head >> 8) & 0xFF, count, size)
    tl.store(lengths + mine, length.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=_NUMBERS)
def _unpack(
    payload, halves, ends, words, target, faults, blocks, n, body_bytes, size: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    whole = index < blocks
    head = tl.load(halves + 2 * index, mask=whole, other=0).to(tl.int32)
    count = tl.load(halves + 2 * index + 1, mask=whole, other=0).to(tl.int32) & 0xFFFF
    kind, high = head & 0xFF, (head >> 8) & 0xFF
    length = _length(kind, high, count, size)
    start = tl.load(ends + index - 1, mask=index > 0, other=0)
    end = start + length
    inside = (length >= 0) & (end <= body_bytes)
    is_last = index == blocks - 1
    good = (inside & ((is_last == 0) | (end == body_bytes))) | (whole == 0)
    start = tl.where(whole, start, body_bytes) + _HEAD * blocks
    kind = tl.where(good, kind, _ZERO)
    fault = tl.where(good, 0, 1)
    first = index * _BLOCK
    block = words + first
    if kind == _RAW:
        _copy(halves + start // 2, target + first * (size // 2), first, n, size)
    place = tl.arange(0, _BLOCK)
    if kind == _ZERO:
        tl.store(block + place, tl.zeros((_BLOCK,), tl.int32).to(block.dtype.element_ty))
    if kind >= _ROTATED_3:
        planes, pairs, rotated = payload + start, halves + start // 2, kind % 2 == 0
        codes = planes + _BLOCK * (size - 1)
        if kind >= _ROTATED_4:
            tops_4 = _get_codes_4(codes, high, place)
            _put_words(block, place, tops_4, planes, pairs, rotated, size)
        else:
            lane, third = place // (_BLOCK // _LANES), place % (_BLOCK // _LANES)
            tops_3, missing = _get_codes_3(codes, high, count, lane, third)
            fault = tl.where(tl.sum(missing, 0) == count, 0, 1)
            _put_words(block, lane + _LANES * third, tops_3, planes, pairs, rotated, size)
    tl.store(faults + index, fault.to(tl.uint8), mask=whole)


# -- what :mod:`penstock.codec.device.exponent` calls ---------------------------------------------


def survey(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads and ends; see ``exponent.ExponentKernels``."""
    blocks, device = words.numel() // exponent.BLOCK, words.device
    heads = torch.empty(blocks, dtype=torch.int32, device=device)
    lengths = torch.empty(blocks, dtype=torch.int64, device=device)
    programs = -(-blocks // _ROWS)
    launch(_survey, programs, device, words, heads, lengths, blocks, words.itemsize, _ROWS)
    return heads, lengths.cumsum(0)


def pack(words: Tensor, heads: Tensor, ends: Tensor, nbytes: int) -> Tensor:
    """Return the payload; see ``exponent.ExponentKernels``."""
    n, blocks = words.numel(), heads.numel()
    payload = torch.empty(nbytes, dtype=torch.uint8, device=words.device)
    halves = payload.view(torch.int16)
    first_heads = payload[: exponent.HEAD_BYTES * blocks].view(torch.int32)
    source = words.view(torch.int16)
    tensors = words, source, heads, ends, payload, halves, first_heads
    launch(_pack, -(-n // exponent.BLOCK), words.device, *tensors, blocks, n, words.itemsize)
    return payload


def unpack(halves: Tensor, count: int, word: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return words and faults; see ``exponent.ExponentKernels``."""
    blocks, size, device = count // exponent.BLOCK, word.itemsize, halves.device
    payload = as_bytes(halves)
    body_bytes = payload.numel() - exponent.HEAD_BYTES * blocks - size * (count % exponent.BLOCK)
    lengths = torch.empty(blocks, dtype=torch.int64, device=device)
    launch(_read_heads, -(-blocks // _HEADS), device, halves, lengths, blocks, size, _HEADS)
    ends = lengths.cumsum(0)
    words = torch.empty(count, dtype=word, device=device)
    faults = torch.empty(blocks, dtype=torch.uint8, device=device)
    tensors = payload, halves, ends, words, words.view(torch.int16), faults
    numbers = blocks, count, body_bytes, size
    launch(_unpack, -(-count // exponent.BLOCK), device, *tensors, *numbers)
    return words, faults
