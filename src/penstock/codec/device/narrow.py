"""Device form of the codec ``narrow``; see [Note: format narrow]."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.codec.base import ITEMSIZE
from penstock.codec.device.bits import pack, unpack
from penstock.codec.device.words import as_bytes, as_type, word_type
from penstock.codec.narrow import HEAD_BYTES, Head, Narrow, parse_head, payload_bytes, width_for

CODEC: Final = Narrow()
_PACKED: Final = {8: torch.uint8, 16: torch.int16, 32: torch.int32}  # by bits; signs are masked off


def encode(words: Tensor, dtype: str) -> Tensor | None:
    """Encode words to a head and differences. Waits once, for the least and the greatest."""
    size, count = ITEMSIZE[dtype], words.numel()
    if count * size <= HEAD_BYTES:
        return None
    ordered = words.view(torch.int8) if dtype == "int8" else words
    low, high, only_two = _survey(ordered)
    bits = width_for(high - low, only_two, size)
    if bits is None or payload_bytes(bits, count) >= count * size:
        return None
    mask = (1 << 8 * size) - 1
    head = Head(bits, low & mask, high & mask if bits == 1 else 0).to_bytes()
    on_host = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat([on_host.to(words.device), _body(ordered, bits, low, high)])


def decode(payload: Tensor, count: int, dtype: str) -> Tensor:
    """Decode head and differences to words. Waits for the head, and for a check of a bitmap."""
    first = bytes(payload[:HEAD_BYTES].tolist())
    head = parse_head(first, payload.numel(), count, dtype)
    least, other = (_signed(word, dtype) for word in (head.least, head.other))
    words = torch.full((count,), least, dtype=word_type(dtype), device=payload.device)
    body = payload[HEAD_BYTES:]
    if head.bits == 1:
        words.masked_fill_(unpack(CODEC.name, body, count), other)
    elif head.bits:
        packed = as_type(body, _PACKED[head.bits]).to(words.dtype)
        words += packed.bitwise_and_((1 << head.bits) - 1)
    return words


def _survey(words: Tensor) -> tuple[int, int, bool]:
    """Return the least word, the greatest, and True if there is no other."""
    low, high = torch.aminmax(words)
    only_two = ((words == low) | (words == high)).all()
    found = torch.stack([each.to(torch.int64) for each in (low, high, only_two)]).tolist()
    return found[0], found[1], bool(found[2])


def _body(words: Tensor, bits: int, low: int, high: int) -> Tensor:
    if bits == 0:
        return words.new_empty(0, dtype=torch.uint8)
    if bits == 1:
        return pack(words == high)
    return as_bytes((words - low).to(_PACKED[bits]))


def _signed(word: int, dtype: str) -> int:
    """Return a word as a signed integer; words of one byte are unsigned."""
    width = 8 * ITEMSIZE[dtype]
    return word - (1 << width) if width > 8 and word >> (width - 1) else word
