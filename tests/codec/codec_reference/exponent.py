"""Reference of the kernels of the codec ``exponent``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.codec.base import Bytes, Words

BLOCK = 512
RAW, ZERO, ROTATED_3, PLAIN_3, ROTATED_4, PLAIN_4 = range(6)
MOST = 318


def encode(words: Words, out: Bytes, is_small: bool) -> int:
    """As the kernel's."""
    whole = words.size - words.size % BLOCK
    blocks = [_encode_block(block, is_small) for block in words[:whole].reshape(-1, BLOCK)]
    heads, bodies = [head for head, _ in blocks], [body for _, body in blocks]
    payload = b"".join([*heads, *bodies, words[whole:].tobytes()])
    if len(payload) > out.size:
        return -1
    out[: len(payload)] = np.frombuffer(payload, np.uint8)
    return len(payload)


def decode(payload: Bytes, words: Words) -> int:
    """As the kernel's."""
    blocks = words[: words.size - words.size % BLOCK].reshape(-1, BLOCK)
    place = 4 * len(blocks)
    if payload.size < place:
        return payload.size
    heads = payload[:place].reshape(-1, 4).astype(int)
    for index, (block, head) in enumerate(zip(blocks, heads, strict=True)):
        kind, high, count = int(head[0]), int(head[1]), int(head[2] + 256 * head[3])
        length = _body_bytes(kind, high, count, block.itemsize)
        if length is None:
            return 4 * index
        body = payload[place : place + length]
        if body.size < length or not _decode_block(kind, high, count, body, block):
            return place
        place += length
    rest = words[blocks.size :]
    if payload.size - place != rest.nbytes:
        return place
    rest.view(np.uint8)[:] = payload[place:]
    return -1


def _encode_block(block: Words, is_small: bool) -> tuple[bytes, bytes]:
    bits = 8 * block.itemsize
    if not block.any():
        return _head(ZERO), b""
    is_rotated = bool((block >> (bits - 1)).any())
    words = (block << 1) | (block >> (bits - 1)) if is_rotated else block
    tops = (words >> (bits - 8)).astype(np.int64)
    high = int(tops.max())
    middle = (words >> (bits - 16)).astype(np.uint8).tobytes()
    planes = middle + (words.astype("<u2").tobytes() if block.itemsize == 4 else b"")
    base = max(high - 15, 0)
    fits = bool(((tops == 0) | (tops > base)).all())
    threes = np.maximum(tops - max(high - 7, 0), 0)
    count = int((threes == 0).sum())
    if (count <= MOST and not fits) or (count < 64 and is_small):
        kind = ROTATED_3 if is_rotated else PLAIN_3
        lanes = (threes.reshape(8, 64) << np.arange(0, 24, 3)[:, None]).sum(axis=0)
        codes = np.array([lanes, lanes >> 8, lanes >> 16]).astype(np.uint8).tobytes()
        exceptions = _in_lanes(tops)[_in_lanes(threes) == 0].astype(np.uint8).tobytes()
        return _head(kind, high, count), planes + codes + exceptions + bytes(count % 2)
    if not fits:
        return _head(RAW), block.tobytes()
    fours = np.maximum(tops - base, 0).astype(np.uint8)
    codes = (fours[: BLOCK // 2] | fours[BLOCK // 2 :] << 4).tobytes()
    return _head(ROTATED_4 if is_rotated else PLAIN_4, high), planes + codes


def _head(kind: int, high: int = 0, count: int = 0) -> bytes:
    return bytes([kind, high, count & 255, count >> 8])


def _body_bytes(kind: int, high: int, count: int, itemsize: int) -> int | None:
    if kind in (ROTATED_3, PLAIN_3) and count <= MOST:
        return (itemsize - 1) * BLOCK + 192 + count + count % 2
    if kind in (ROTATED_4, PLAIN_4) and count == 0:
        return (itemsize - 1) * BLOCK + 256
    if kind in (RAW, ZERO) and high == count == 0:
        return itemsize * BLOCK if kind == RAW else 0
    return None


def _decode_block(kind: int, high: int, count: int, body: Bytes, block: Words) -> bool:
    if kind in (RAW, ZERO):
        block[:] = body.view(block.dtype) if kind == RAW else 0
        return True
    bits = 8 * block.itemsize
    middle, lower, codes = np.split(body, [BLOCK, (block.itemsize - 1) * BLOCK])
    if kind in (ROTATED_4, PLAIN_4):
        fours = np.concatenate([codes & 15, codes >> 4]).astype(np.int64)
        tops = np.where(fours == 0, 0, fours + max(high - 15, 0))
    else:
        lanes = (codes[:192].reshape(3, 64).astype(int) << np.array([[0], [8], [16]])).sum(axis=0)
        threes = ((lanes >> np.arange(0, 24, 3)[:, None]) & 7).reshape(-1)
        if (threes == 0).sum() != count:
            return False
        laned = _in_lanes(threes + max(high - 7, 0))
        laned[_in_lanes(threes) == 0] = codes[192 : 192 + count]
        tops = laned.reshape(64, 8).T.reshape(-1)
    words = (tops & 255) << (bits - 8) | middle.astype(np.int64) << (bits - 16)
    if block.itemsize == 4:
        words |= lower.view("<u2")
    if kind in (ROTATED_3, ROTATED_4):
        words = words >> 1 | (words & 1) << (bits - 1)
    block[:] = words.astype(block.dtype)
    return True


def _in_lanes(values: NDArray[Any]) -> NDArray[Any]:
    """Elements i, i + 64, ..., i + 448 before those of i + 1."""
    return values.reshape(8, 64).T.reshape(-1)
