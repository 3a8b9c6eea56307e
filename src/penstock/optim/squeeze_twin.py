"""The clear twin of how a record is squeezed: slower, and the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Halves = NDArray[np.uint16]

BLOCK = 512
RAW, SIGNED, UNSIGNED, ZERO = range(4)


def squeeze(halves: Halves, width: int) -> bytes:
    """What the kernel leaves at the end of a buffer."""
    blocks = halves.reshape(-1, BLOCK * width)
    return b"".join(_squeeze_block(block, width) for block in blocks)


def expand(source: bytes, width: int, count: int) -> Halves:
    """So many halves of what ``squeeze`` has made. Raises ValueError if it is not that."""
    place, blocks = 0, []
    for _ in range(count // (BLOCK * width)):
        block, place = _expand_block(source, place, width)
        blocks.append(block)
    if place != len(source):
        raise ValueError(place)
    return np.concatenate(blocks) if blocks else np.empty(0, np.uint16)


def _squeeze_block(block: Halves, width: int) -> bytes:
    if not block.any():
        return bytes([ZERO, 0, 0])
    uppers = block[width - 1 :: width]
    has_sign = bool((uppers >> 15).any())
    turned = (uppers << 1 & 0xFF00) | (uppers >> 8 & 0x80) | (uppers & 0x7F)
    words = np.where(has_sign, turned, uppers)
    tops, middle = (words >> 8).astype(int), (words & 0xFF).astype(np.uint8)
    high = int(tops.max())
    codes = np.maximum(tops - max(high - 7, 0), 0)
    exceptions = _in_order(tops)[_in_order(codes) == 0].astype(np.uint8)
    if exceptions.size > 255:
        return bytes([RAW, 0, 0]) + block.tobytes()
    lowers = block[::width].tobytes() if width == 2 else b""
    bits = (codes.reshape(8, 64) << np.arange(0, 24, 3)[:, None]).sum(axis=0)
    planes = np.array([bits, bits >> 8, bits >> 16]).astype(np.uint8)
    head = bytes([SIGNED if has_sign else UNSIGNED, high, exceptions.size])
    parts = head, middle.tobytes(), lowers, planes.tobytes(), exceptions.tobytes()
    return b"".join(parts)


def _expand_block(source: bytes, place: int, width: int) -> tuple[Halves, int]:
    if place + 3 > len(source) or source[place] > ZERO:
        raise ValueError(place)
    kind, high, count = source[place : place + 3]
    sizes = {RAW: [2 * BLOCK * width], ZERO: []}
    parts, at = [], place + 3
    for size in sizes.get(kind, [BLOCK, 2 * BLOCK * (width - 1), 192, count]):
        parts.append(np.frombuffer(source[at : at + size], np.uint8))
        at += size
    if at > len(source) or (kind in sizes and (high or count)):
        raise ValueError(place)
    if kind == ZERO:
        return np.zeros(BLOCK * width, np.uint16), at
    if kind == RAW:
        return parts[0].view(np.uint16), at
    middle, lowers, planes, exceptions = parts
    bits = (planes.reshape(3, 64).astype(int) << np.array([[0], [8], [16]])).sum(axis=0)
    codes = (bits >> np.arange(0, 24, 3)[:, None]) & 7
    tops = (codes + max(high - 7, 0)).T.copy()
    if np.count_nonzero(codes == 0) != count:
        raise ValueError(place)
    tops[codes.T == 0] = exceptions
    uppers = (tops.T.reshape(-1) << 8 | middle) & 0xFFFF
    if kind == SIGNED:
        uppers = (uppers & 0x80) << 8 | (uppers >> 1 & 0x7F80) | (uppers & 0x7F)
    block = np.empty(BLOCK * width, np.uint16)
    block[width - 1 :: width] = uppers
    if width == 2:
        block[::2] = lowers.view(np.uint16)
    return block, at


def _in_order(values: NDArray[Any]) -> NDArray[Any]:
    """Elements i, i + 64, ..., i + 448 before those of i + 1."""
    return values.reshape(8, 64).T.reshape(-1)
