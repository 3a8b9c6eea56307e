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
    if blocks:
        rows = words[: blocks * BLOCK].view(-1, BLOCK)
        for kind, length in ((False, _packed_bytes(size)), (True, _raw_bytes(size))):
            mine = (raw == kind).nonzero().view(-1)
            if mine.numel():
                taken = _gather(body, starts[mine], length)
                rows[mine] = _as_words(taken, dtype) if kind else _unpack(taken, dtype)
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
    exponents = (work >> shift) & 0xFF
    high = exponents.amax(1, keepdim=True)
    raw = ((exponents != 0) & (exponents < high - 14)).any(1)
    codes = torch.where(exponents == 0, 0, exponents - high + 15).to(torch.uint8)
    tops = ((work >> (shift - 7)) & 0x7F) | (((work >> (8 * size - 1)) & 1) << 7)
    half = BLOCK // 2
    planes = [torch.ones_like(high), high, (codes[:, :half] & 15) | (codes[:, half:] << 4), tops]
    planes += [(work >> 8 * plane) & 0xFF for plane in range(size - 2)]
    return torch.cat([plane.to(torch.uint8) for plane in planes], 1), raw


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


def _find(body: Tensor, blocks: int, size: int) -> tuple[Tensor, Tensor]:
    """Where each block begins, int64, and whether it is raw. Raises CodecError."""
    short, long = _packed_bytes(size), _raw_bytes(size)
    extra = body.numel() - blocks * short
    if extra < 0 or extra % (long - short) or extra > blocks * (long - short):
        raise _damaged(body, blocks)
    count = extra // (long - short)
    if 0 < count < blocks:
        starts, raw = _walk(bytes(body.cpu().numpy()), blocks, short, long)
    else:
        starts = torch.arange(blocks) * (long if count else short)
        raw = torch.full((blocks,), bool(count))
    starts, raw = starts.to(body.device), raw.to(body.device)
    if blocks:
        kinds = body[starts]
        good = (kinds == (~raw).to(torch.uint8)) & (~raw | (body[starts + 1] == 0))
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


def _gather(body: Tensor, starts: Tensor, length: int) -> Tensor:
    """Blocks from their second byte on, uint8 ``[n, length - 1]``."""
    return body[starts[:, None] + torch.arange(1, length, device=body.device)]


def _unpack(rows: Tensor, dtype: str) -> Tensor:
    size = ITEMSIZE[dtype]
    shift, half = 8 * size - 9, BLOCK // 2
    wide = rows.to(torch.int64)
    high, nibbles = wide[:, :1], wide[:, 1 : 1 + half]
    codes = torch.cat([nibbles & 15, nibbles >> 4], 1)
    exponents = torch.where(codes == 0, 0, (codes + high - 15) & 0xFF)
    tops, *low = torch.split(wide[:, 1 + half :], BLOCK, dim=1)
    words = ((tops >> 7) << (8 * size - 1)) | (exponents << shift) | ((tops & 0x7F) << (shift - 7))
    for plane, part in enumerate(low):
        words |= part << 8 * plane
    sign = 1 << (8 * size - 1)
    return ((words ^ sign) - sign).to(word_type(dtype))  # signed, and of that width


def _as_words(rows: Tensor, dtype: str) -> Tensor:
    return as_type(rows[:, 1:].contiguous().view(-1), word_type(dtype)).view(-1, BLOCK)


def _damaged(body: Tensor, blocks: int) -> CodecError:
    return CodecError(
        f"codec {CODEC.name}: {body.numel()} bytes are not {blocks} blocks: the payload is damaged"
    )
