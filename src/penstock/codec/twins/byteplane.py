"""The clear twin of the kernels of the codec ``byteplane``."""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Bytes, Words

BLOCK = 512


def encode(words: Words, out: Bytes) -> int:
    """As the kernel's."""
    whole = words.size - words.size % BLOCK
    blocks = [_encode_block(block) for block in words[:whole].reshape(-1, BLOCK)]
    payload = b"".join([*blocks, words[whole:].tobytes()])
    if len(payload) > out.size:
        return -1
    out[: len(payload)] = np.frombuffer(payload, np.uint8)
    return len(payload)


def decode(payload: Bytes, words: Words) -> int:
    """As the kernel's."""
    place, whole = 0, words.size - words.size % BLOCK
    for block in words[:whole].reshape(-1, BLOCK):
        head = payload[place : place + 2].tobytes()
        if len(head) < 2 or head[0] > 1 or (head[0] == 0 and head[1] != 0):
            return place
        length = BLOCK * block.itemsize if head[0] == 0 else _packed_bytes(block.itemsize)
        body = payload[place + 2 : place + 2 + length]
        if body.size < length:
            return place
        block[:] = body.view(words.dtype) if head[0] == 0 else _decode_block(body, head[1], block)
        place += 2 + length
    if payload.size - place != words[whole:].nbytes:
        return place
    words[whole:].view(np.uint8)[:] = payload[place:]
    return -1


def _packed_bytes(itemsize: int) -> int:
    return BLOCK // 2 + (itemsize - 1) * BLOCK


def _encode_block(block: Words) -> bytes:
    mantissa_bits = 8 * block.itemsize - 9
    exponents = (block >> mantissa_bits).astype(np.int64) & 0xFF
    high = int(exponents.max())
    if ((exponents != 0) & (exponents < high - 14)).any():
        return bytes([0, 0]) + block.tobytes()
    codes = np.where(exponents == 0, 0, exponents - high + 15).astype(np.uint8)
    signs = (block >> (8 * block.itemsize - 1)).astype(np.uint8)
    tops = (block >> (mantissa_bits - 7)).astype(np.uint8) & 0x7F
    planes = [codes[: BLOCK // 2] | codes[BLOCK // 2 :] << 4, tops | signs << 7]
    planes += [(block >> 8 * plane).astype(np.uint8) for plane in range(block.itemsize - 2)]
    return bytes([1, high]) + b"".join(plane.tobytes() for plane in planes)


def _decode_block(body: Bytes, high: int, block: Words) -> Words:
    mantissa_bits = 8 * block.itemsize - 9
    codes = np.concatenate([body[: BLOCK // 2] & 15, body[: BLOCK // 2] >> 4]).astype(np.int64)
    exponents = np.where(codes == 0, 0, (codes + high - 15) & 0xFF)
    tops, *low = body[BLOCK // 2 :].reshape(-1, BLOCK).astype(np.int64)
    words = (tops >> 7) << (8 * block.itemsize - 1)
    words |= exponents << mantissa_bits | (tops & 0x7F) << (mantissa_bits - 7)
    for plane, bytes_ in enumerate(low):
        words |= bytes_ << 8 * plane
    return words.astype(block.dtype)
