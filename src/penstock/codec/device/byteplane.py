"""The codec ``byteplane`` on the tensor's device; see [Note: format byteplane]."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.base import ITEMSIZE
from penstock.codec.byteplane import BytePlane
from penstock.codec.device.words import as_bytes, as_type, word_type
from penstock.core.errors import CodecError

CODEC: Final = BytePlane()
BLOCK: Final = 512
_HEAD: Final = 2


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Words to blocks. Waits once, to know whether any block is raw; once more if one is."""
    size, count = ITEMSIZE[dtype], words.numel()
    whole = count - count % BLOCK
    blocks = words[:whole].view(-1, BLOCK)
    packed, raw = _pack(blocks, size)
    if bool(raw.any()):
        packed = _mix(packed, blocks, raw, size)
    payload = torch.cat([packed.reshape(-1), as_bytes(words[whole:])])
    return payload if payload.numel() < count * size or not count else None


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Blocks to words. Waits to check the heads; where only some blocks are raw, the host finds them."""
    size = ITEMSIZE[dtype]
    blocks = count // BLOCK
    tail_bytes = (count % BLOCK) * size
    body = payload[: max(0, payload.numel() - tail_bytes)]
    starts, raw = _find(body, blocks, size)
    words = torch.empty(count, dtype=word_type(dtype), device=payload.device)
    rows = words[: blocks * BLOCK].view(-1, BLOCK)
    if starts is not None:
        for kind, length in ((False, _packed_bytes(size)), (True, _raw_bytes(size))):
            mine = (raw == kind).nonzero().view(-1)
            taken = body.unfold(0, length, 1).index_select(0, starts[mine])
            rows[mine] = _decode_blocks(taken[:, 1:], dtype, raw=kind)
    elif blocks:
        rows.copy_(_decode_blocks(body.view(blocks, -1)[:, 1:], dtype, raw=bool(raw[0])))
    if tail_bytes:
        words[blocks * BLOCK :] = as_type(payload[body.numel() :], word_type(dtype))
    return words


def _packed_bytes(size: int) -> int:
    return _HEAD + BLOCK // 2 + (size - 1) * BLOCK


def _raw_bytes(size: int) -> int:
    return _HEAD + size * BLOCK


def _pack(blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Every block packed, uint8 ``[blocks, packed bytes]``, and which of them must not be."""
    shift = 8 * size - 9
    work = blocks.to(torch.int32)
    exponents = (work >> shift).bitwise_and_(0xFF)
    high = exponents.amax(1, keepdim=True)
    zero = exponents == 0
    raw = (exponents < high - 14).logical_and_(~zero).any(1)
    codes = exponents.sub_(high).add_(15).masked_fill_(zero, 0).to(torch.uint8)
    del exponents, zero  # here and below: no more is held at once than must be
    half = BLOCK // 2
    nibbles = (codes[:, :half] & 15) | (codes[:, half:] << 4)
    del codes
    tops = (work >> (shift - 7)).bitwise_and_(0x7F).to(torch.uint8)
    tops |= (work < 0).to(torch.uint8) << 7
    planes = [torch.ones_like(high, dtype=torch.uint8), high.to(torch.uint8), nibbles, tops]
    planes += [(work >> 8 * plane).bitwise_and_(0xFF).to(torch.uint8) for plane in range(size - 2)]
    return torch.cat(planes, 1), raw


def _mix(packed: Tensor, blocks: Tensor, raw: Tensor, size: int) -> Tensor:
    """Blocks one after the other, each packed or raw: uint8 ``[n]``."""
    length = _raw_bytes(size)
    as_they_are = torch.nn.functional.pad(
        as_bytes(blocks.contiguous()).view(-1, length - 2), (2, 0)
    )
    filled = torch.nn.functional.pad(packed, (0, length - packed.size(1)))
    rows = torch.where(raw[:, None], as_they_are, filled)
    lengths = torch.where(raw, length, packed.size(1))
    return rows[torch.arange(length, device=rows.device) < lengths[:, None]]


def _find(body: Tensor, blocks: int, size: int) -> tuple[Tensor | None, Tensor]:
    """Where each block begins, int64, and whether it is raw. Raises CodecError.

    Where all of them are alike there is no need to say where they begin: ``None``.
    """
    short, long = _packed_bytes(size), _raw_bytes(size)
    extra = body.numel() - blocks * short
    if extra < 0 or extra % (long - short) or extra > blocks * (long - short):
        raise _damaged(body, blocks)
    count = extra // (long - short)
    if not 0 < count < blocks:
        rows = body.view(blocks, long if count else short)
        good = ((rows[:, 0] == 0) & (rows[:, 1] == 0)) if count else rows[:, 0] == 1
        if not bool(good.all()):
            raise _damaged(body, blocks)
        return None, torch.full((blocks,), count > 0)
    starts, raw = _walk(bytes(body.cpu().numpy()), blocks, short, long)
    starts, raw = starts.to(body.device), raw.to(body.device)
    good = (body[starts] == (~raw).to(torch.uint8)) & (~raw | (body[starts + 1] == 0))
    if not bool(good.all()):
        raise _damaged(body, blocks)
    return starts, raw


def _walk(body: bytes, blocks: int, short: int, long: int) -> tuple[Tensor, Tensor]:
    """The same, from the first block to the last: how long one is says where the next begins."""
    starts, raw, place = [], [], 0
    for _ in range(blocks):
        starts.append(place)
        raw.append(place < len(body) and body[place] == 0)
        place += long if raw[-1] else short
    if place != len(body):
        raise CodecError(f"codec {CODEC.name}: {len(body)} bytes of blocks take {place}: damaged")
    return torch.tensor(starts), torch.tensor(raw)


def _decode_blocks(rows: Tensor, dtype: str, *, raw: bool) -> Tensor:
    """Words ``[n, BLOCK]`` of blocks from their second byte on, uint8 ``[n, length - 1]``."""
    if not raw:
        return _unpack(rows, dtype)
    word = word_type(dtype)
    return as_type(rows[:, 1:].contiguous().view(-1), word).view(-1, BLOCK)


def _unpack(rows: Tensor, dtype: str) -> Tensor:
    size = ITEMSIZE[dtype]
    shift, half = 8 * size - 9, BLOCK // 2
    high, nibbles = rows[:, :1].to(torch.int32), rows[:, 1 : 1 + half]
    codes = torch.cat([nibbles & 15, nibbles >> 4], 1)
    words = codes.to(torch.int32).add_(high - 15).bitwise_and_(0xFF).masked_fill_(codes == 0, 0)
    words.bitwise_left_shift_(shift)
    tops, *low = torch.split(rows[:, 1 + half :], BLOCK, dim=1)
    words |= (tops & 0x7F).to(torch.int32).bitwise_left_shift_(shift - 7)
    for plane, part in enumerate(low):
        words |= part.to(torch.int32).bitwise_left_shift_(8 * plane)
    words |= (tops >> 7).to(torch.int32).neg_().bitwise_and_(-1 << (8 * size - 1))  # the sign
    return words.to(word_type(dtype))


def _damaged(body: Tensor, blocks: int) -> CodecError:
    return CodecError(
        f"codec {CODEC.name}: {body.numel()} bytes are not {blocks} blocks: the payload is damaged"
    )
