"""Form of the codec ``exponent`` on the tensor's device; see [Note: format exponent].

The functions use operators of torch. On a CUDA device Triton kernels do the same, one block in each
program, where they work (:mod:`penstock.codec.device.kernels`). Their results are identical to the last
bit.
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from penstock.codec.base import ITEMSIZE
from penstock.codec.device import kernels as trials
from penstock.codec.device.words import as_bytes, as_type, word_type
from penstock.codec.exponent import Exponent
from penstock.core.errors import CodecError

CODEC: Final = Exponent()
BLOCK: Final = 512
RAW, ZERO, ROTATED_3, PLAIN_3, ROTATED_4, PLAIN_4 = range(6)
MOST: Final = 318
HEAD_BYTES: Final = 4
CODES_3: Final = 192
CODES_4: Final = 256
"""Bytes that the codes of a block take."""


class ExponentKernels(Protocol):
    """Replacements of the operators here, for a block at least. They do not wait."""

    def survey(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return heads, int32 ``[blocks]``, and ends of bodies, int64 ``[blocks]``, from the first on."""

    def pack(self, words: Tensor, heads: Tensor, ends: Tensor, nbytes: int) -> Tensor:
        """Return the payload, whose length is ``nbytes``."""

    def unpack(self, halves: Tensor, count: int, word: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return ``count`` words, and faults, uint8 ``[blocks]``: not all 0 if the payload is damaged.

        The payload is given as int16, and has room for the heads and the elements behind the last block.
        """


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Encode words. Waits for the length."""
    kernels = kernels_for(words.device, words.dtype) if words.numel() >= BLOCK else None
    return _encoded(words) if kernels is None else _encoded_by(kernels, words)


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Decode blocks. Waits to check them: with kernels once, for all."""
    word = word_type(dtype)
    kernels = kernels_for(payload.device, word) if count >= BLOCK else None
    return (
        _decoded(payload, count, dtype)
        if kernels is None
        else _decoded_by(kernels, payload, count, word)
    )


# -- by kernels -----------------------------------------------------------------------------------


def kernels_for(device: torch.device, word: torch.dtype) -> ExponentKernels | None:
    """Return the Triton kernels, if they work for words of that type on ``device``; tried once each."""
    kernels: ExponentKernels | None = trials.kernels_for("exponent", agrees, device, word)
    return kernels


def agrees(kernels: ExponentKernels, device: torch.device, word: torch.dtype) -> bool:
    """Return True if kernels and operators do the same with every kind of block, and with damage."""
    words = _trial(word)
    payload = _encoded(words)
    found = _encoded_by(kernels, words.to(device))
    if payload is None or found is None or not torch.equal(payload, found.cpu()):
        return False
    back = _decoded_by(kernels, found, words.numel(), word)
    found[HEAD_BYTES * (words.numel() // BLOCK) :] = 0
    faults = kernels.unpack(found.view(torch.int16), words.numel(), word)[1]
    return torch.equal(words, back.cpu()) and bool(faults.any())


def _trial(word: torch.dtype) -> Tensor:
    """Return words: raw, zeros, three bits with and without signs, four bits likewise, and some more."""
    mantissa_bits = 8 * word.itemsize - 9
    places = torch.arange(6 * BLOCK + 77)
    noise, block = (places * 2654435761) >> 7, places // BLOCK
    exponents = (100 + noise % 8).masked_fill((places % 7 == 0) & (block // 2 == 1), 20)
    words = (noise >> 8 & (1 << mantissa_bits) - 1) | exponents << mantissa_bits
    words |= (places & 1 & (block % 2 == 0)) << (mantissa_bits + 8)
    return torch.where(block == 0, noise, words).masked_fill_(block == 1, 0).to(word)


def _encoded_by(kernels: ExponentKernels, words: Tensor) -> Tensor | None:
    heads, ends = kernels.survey(words)
    tail = words.numel() % BLOCK
    nbytes = HEAD_BYTES * heads.numel() + int(ends[-1]) + tail * words.itemsize
    return kernels.pack(words, heads, ends, nbytes) if nbytes < words.nbytes else None


def _decoded_by(kernels: ExponentKernels, payload: Tensor, count: int, word: torch.dtype) -> Tensor:
    blocks, tail = divmod(count, BLOCK)
    if payload.numel() % 2 or payload.numel() < HEAD_BYTES * blocks + tail * word.itemsize:
        raise _damaged(payload, blocks)
    words, faults = kernels.unpack(as_type(payload, torch.int16), count, word)
    if bool(faults.any()):
        raise _damaged(payload, blocks)
    return words


# -- by operators ---------------------------------------------------------------------------------


def _encoded(words: Tensor) -> Tensor | None:
    """Encode words. Waits once to know whether four bits suffice everywhere; if not, once more."""
    size, count = words.itemsize, words.numel()
    whole = count - count % BLOCK
    blocks = words[:whole].view(-1, BLOCK)
    work, rotated = _rotated(blocks)
    tops = (work >> (8 * size - 8)).bitwise_and_(0xFF).to(torch.uint8)
    planes = _planes(work, size)
    del work  # here and below: no more is held at once than must be
    high = tops.amax(1, keepdim=True)
    base = _base(high, 15)
    fits = ((tops == 0) | (tops > base)).all(1)
    fours = (tops - base).masked_fill_(tops <= base, 0)
    half = BLOCK // 2
    fours = fours[:, :half] | (fours[:, half:] << 4)
    kinds = torch.where(rotated, ROTATED_4, PLAIN_4).to(torch.uint8)
    heads = torch.cat([kinds[:, None], high, torch.zeros_like(high).expand(-1, 2)], 1)
    mixed = not bool((fits & (blocks != 0).any(1)).all())
    if mixed:
        fours = torch.nn.functional.pad(fours, (0, BLOCK - CODES_4))
    bodies = torch.cat([planes, fours], 1)
    del planes, fours
    if mixed:
        heads, bodies = _mixed(blocks, tops, heads, bodies, fits)
    payload = torch.cat([heads.view(-1), bodies.view(-1), as_bytes(words[whole:])])
    return payload if payload.numel() < count * size or not count else None


def _decoded(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Decode blocks. Waits to check the heads and the exceptions."""
    size, blocks = ITEMSIZE[dtype], count // BLOCK
    tail_bytes = (count % BLOCK) * size
    words = torch.empty(count, dtype=word_type(dtype), device=payload.device)
    if payload.numel() < HEAD_BYTES * blocks + tail_bytes:
        raise _damaged(payload, blocks)
    heads = payload[: HEAD_BYTES * blocks].view(-1, HEAD_BYTES).to(torch.int32)
    body = payload[: payload.numel() - tail_bytes]
    counts = heads[:, 2] + heads[:, 3] * 256
    lengths = _lengths(heads[:, 0], heads[:, 1], counts, size)
    good = (lengths >= 0).all() & (lengths.sum() == body.numel() - HEAD_BYTES * blocks)
    if not bool(good):
        raise _damaged(payload, blocks)
    rows = words[: blocks * BLOCK].view(-1, BLOCK)
    starts = lengths.cumsum(0) - lengths + HEAD_BYTES * blocks
    for group in ([RAW], [ZERO], [ROTATED_3, PLAIN_3], [ROTATED_4, PLAIN_4]):
        mine = torch.isin(heads[:, 0], heads.new_tensor(group)).nonzero().view(-1)
        if mine.numel():
            rows[mine] = _blocks_of(body, starts[mine], heads[mine], counts[mine], dtype)
    if tail_bytes:
        words[blocks * BLOCK :] = as_type(payload[body.numel() :], word_type(dtype))
    return words


# -- blocks to bytes ------------------------------------------------------------------------------


def _rotated(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks as int32, rotated where any element has a sign, and which ones are."""
    rotated = (blocks < 0).any(1)
    work = blocks.to(torch.int32)
    turned = (work << 1).bitwise_or_((blocks < 0).to(torch.int32))
    return torch.where(rotated[:, None], turned, work), rotated


def _planes(work: Tensor, size: int) -> Tensor:
    """Return the bytes below the top, uint8 ``[blocks, 512 * (size - 1)]``."""
    middle = (work >> (8 * size - 16)).bitwise_and_(0xFF).to(torch.uint8)
    if size == 2:
        return middle
    lower = as_bytes(work).view(-1, BLOCK, 4)[:, :, :2].reshape(-1, 2 * BLOCK)
    return torch.cat([middle, lower], 1)


def _base(high: Tensor, codes: int) -> Tensor:
    return high.clamp_min(codes) - codes


def _mixed(
    blocks: Tensor, tops: Tensor, heads: Tensor, rows: Tensor, fits: Tensor
) -> tuple[Tensor, Tensor]:
    """Return heads and joined bodies of blocks of any kind, given as if all had four bits.

    ``rows`` are the bodies, each in as much room as a raw one takes; they are overwritten.
    """
    start = rows.size(1) - BLOCK
    zero = (blocks == 0).all(1)
    base = _base(heads[:, 1:2], 7)
    threes = (tops - base).masked_fill_(tops <= base, 0)
    counts = (threes == 0).sum(1, dtype=torch.int32).masked_fill_(fits, 0)
    raw = counts > MOST
    counts.masked_fill_(raw, 0)
    kinds = heads[:, 0].to(torch.int32) - 2 * (~fits).to(torch.int32)
    kinds.masked_fill_(raw, RAW).masked_fill_(zero, ZERO)
    highs = heads[:, 1].to(torch.int32).masked_fill_(raw | zero, 0)
    heads = torch.stack([kinds, highs, counts & 255, counts >> 8], 1).to(torch.uint8)
    mine = (~(fits | raw)).nonzero().view(-1)
    if mine.numel():
        rows[mine, start:] = _three_bits(threes[mine], tops[mine], counts[mine])
    del threes
    mine = raw.nonzero().view(-1)
    if mine.numel():
        rows[mine] = as_bytes(blocks[mine].view(-1)).view(-1, rows.size(1))
    lengths = _lengths(kinds, highs, counts, rows.size(1) // BLOCK)
    pairs = rows.view(torch.int16)  # lengths are even
    taken = torch.arange(pairs.size(1), device=rows.device) < (lengths >> 1)[:, None]
    return heads, as_bytes(_selected(pairs, taken))


def _three_bits(threes: Tensor, tops: Tensor, counts: Tensor) -> Tensor:
    """Return codes and exceptions of blocks, uint8 ``[n, 512]``, of which the front counts."""
    lanes = threes.view(-1, 8, 64).to(torch.int32)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=lanes.device)[None, :, None]
    bits = (lanes << shifts).sum(1, dtype=torch.int32)
    codes = torch.cat([bits, bits >> 8, bits >> 16], 1).bitwise_and_(0xFF).to(torch.uint8)
    del lanes, bits
    found = _selected(_in_lanes(tops), _in_lanes(threes) == 0)
    room = torch.zeros_like(tops)[:, : BLOCK - CODES_3]
    places = torch.arange(room.size(1), device=room.device) < counts[:, None]
    return torch.cat([codes, room.masked_scatter(places, found)], 1)


def _selected(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values where the mask is true. Waits for their number.

    CUDA lists the places of true elements first, eight bytes each per dimension of the mask: so it is
    flattened.
    """
    return values.view(-1)[mask.view(-1)]


def _in_lanes(values: Tensor) -> Tensor:
    """Reorder a block: elements i, i + 64, ..., i + 448 before those of i + 1."""
    return values.view(-1, 8, 64).transpose(1, 2).reshape(-1, BLOCK)


# -- bytes to blocks ------------------------------------------------------------------------------


def _lengths(kinds: Tensor, highs: Tensor, counts: Tensor, size: int) -> Tensor:
    """Return lengths of bodies, int64; -1 where no block has such a head."""
    rest = BLOCK * (size - 1)
    found = torch.full_like(kinds, -1, dtype=torch.int64)
    three = ((kinds == ROTATED_3) | (kinds == PLAIN_3)) & (counts <= MOST)
    found = torch.where(three, rest + CODES_3 + counts + counts % 2, found)
    four = ((kinds == ROTATED_4) | (kinds == PLAIN_4)) & (counts == 0)
    found.masked_fill_(four, rest + CODES_4)
    plain = (counts == 0) & (highs == 0)
    found.masked_fill_(plain & (kinds == RAW), BLOCK * size)
    return found.masked_fill_(plain & (kinds == ZERO), 0)


def _blocks_of(body: Tensor, starts: Tensor, heads: Tensor, counts: Tensor, dtype: str) -> Tensor:
    """Decode blocks whose kinds differ at most in rotation to words ``[n, BLOCK]``. Raises CodecError."""
    size, kind = ITEMSIZE[dtype], int(heads[0, 0])
    rest = BLOCK * (size - 1)
    if kind == ZERO:
        return starts.new_zeros((starts.numel(), BLOCK), dtype=word_type(dtype))
    length = {RAW: BLOCK * size, ROTATED_3: rest + CODES_3, PLAIN_3: rest + CODES_3}
    rows = body.unfold(0, length.get(kind, rest + CODES_4), 1).index_select(0, starts)
    if kind == RAW:
        return as_type(rows.view(-1), word_type(dtype)).view(-1, BLOCK)
    high = heads[:, 1:2].to(torch.uint8)
    if kind <= PLAIN_3:
        tops = _tops_of_three(rows[:, rest:], high, counts, body, starts + rows.size(1))
    else:
        fours = torch.cat([rows[:, rest:] & 15, rows[:, rest:] >> 4], 1)
        tops = (fours + _base(high, 15)).masked_fill_(fours == 0, 0)
    words = tops.to(torch.int32).bitwise_left_shift_(8 * size - 8)
    words |= rows[:, :BLOCK].to(torch.int32).bitwise_left_shift_(8 * size - 16)
    if size == 4:
        pairs = rows[:, BLOCK:rest].reshape(-1, BLOCK, 2)
        words |= pairs[:, :, 0].to(torch.int32)
        words |= pairs[:, :, 1].to(torch.int32).bitwise_left_shift_(8)
    return _turned_back(words, heads[:, :1] % 2 == 0, size).to(word_type(dtype))


def _tops_of_three(
    codes: Tensor, high: Tensor, counts: Tensor, body: Tensor, starts: Tensor
) -> Tensor:
    """Decode tops ``[n, BLOCK]``; exceptions are at ``starts`` of the body. Raises CodecError."""
    bits = codes.view(-1, 3, 64).to(torch.int32)
    bits = bits[:, 0] | bits[:, 1] << 8 | bits[:, 2] << 16
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=bits.device)[None, :, None]
    threes = (bits[:, None] >> shifts).bitwise_and_(7).to(torch.uint8).view(-1, BLOCK)
    if not bool(((threes == 0).sum(1, dtype=torch.int32) == counts).all()):
        raise _damaged(body, starts.numel())
    tops = _in_lanes(threes + _base(high, 7))
    ahead = torch.arange(int(counts.max()), device=starts.device)
    places = _selected(starts[:, None] + ahead, ahead < counts[:, None])
    tops.masked_scatter_(_in_lanes(threes) == 0, body[places])
    return tops.view(-1, 64, 8).transpose(1, 2).reshape(-1, BLOCK)


def _turned_back(words: Tensor, rotated: Tensor, size: int) -> Tensor:
    """Rotate right by one bit where ``rotated``; in the signed range of the words' width."""
    top = -1 << (8 * size - 1)
    turned = (words >> 1).bitwise_and_(~top).bitwise_or_((words & 1).neg_().bitwise_and_(top))
    if size == 2:
        words = (words ^ -top) + top
    return torch.where(rotated, turned, words)


def _damaged(payload: Tensor, blocks: int) -> CodecError:
    return CodecError(
        f"codec {CODEC.name}: {payload.numel()} bytes are not {blocks} blocks: the payload is damaged"
    )
