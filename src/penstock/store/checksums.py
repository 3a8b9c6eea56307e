"""Checksums that a tier keeps of the bytes it writes, to check them when they are read.

[Note: sampled checksums]
    A full checksum reads everything that is moved once more on each way, with cores and memory that
    training needs. What it is there for are blocks that come back stale, torn, from another place, or not
    at all, for storage fails by blocks. So by default one cache line of every 4 KiB is checked, at a
    place that wanders through the blocks. That finds any 4 KiB that differ there, wherever they begin. A
    lone flipped bit is found by a full checksum only; memory, links and SSDs have codes of their own
    against those.
"""

from __future__ import annotations

import ctypes
from typing import Final, Literal, TypeAlias

import numpy as np
import xxhash

Kind: TypeAlias = Literal["full", "off", "sampled"]
"""How much of the bytes a checksum covers: all, none, or a sample."""

Sum: TypeAlias = tuple[Kind, int]
"""A checksum and its kind, which may differ from the present setting: a journal outlives it."""

LINE_BYTES: Final = 64
BLOCK_BYTES: Final = 4096
STRIDE_BYTES: Final = BLOCK_BYTES - LINE_BYTES
"""From a line that is checked to the next: no block is passed over, and no place in it for ever."""
WHOLE_BYTES: Final = 16 * BLOCK_BYTES
"""Up to this length everything is checked."""


def full(address: int, nbytes: int) -> int:
    """XXH3 (64 bits) of every byte; 20 to 30 GB/s on one core."""
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))


def sampled(address: int, nbytes: int) -> int:
    """XXH3 (64 bits) of a cache line of every 4 KiB, and of the last; of everything if that is little.

    See [Note: sampled checksums].
    """
    if nbytes <= WHOLE_BYTES:
        return full(address, nbytes)
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    count = (nbytes - LINE_BYTES) // STRIDE_BYTES + 1
    lines = np.ndarray((count,), f"V{LINE_BYTES}", memory, strides=(STRIDE_BYTES,))
    digest = xxhash.xxh3_64(lines.copy().data)  # unlike `tobytes`, without the GIL
    digest.update(memory[-LINE_BYTES:])
    return digest.intdigest()


def sum_of(kind: Kind, address: int, nbytes: int) -> Sum | None:
    """Return a checksum of live memory, made without the interpreter's lock; None if it is off."""
    if kind == "off":
        return None
    return kind, (full if kind == "full" else sampled)(address, nbytes)


def mismatch(expected: Sum, address: int, nbytes: int) -> int | None:
    """Return the checksum of live memory if it is not the expected one; None if it is."""
    kind, wanted = expected
    found = sum_of(kind, address, nbytes)
    return None if found is None or found[1] == wanted else found[1]


class RunningSum:
    """Checksum of bytes that come in pieces; equal to ``sum_of`` of all of them."""

    def __init__(self, kind: Kind, nbytes: int) -> None:
        """Begin with the first byte of ``nbytes``."""
        self._kind = kind
        self._nbytes = nbytes
        self._done = 0
        self._digest = xxhash.xxh3_64()
        self._is_whole = kind == "full" or nbytes <= WHOLE_BYTES
        self._count = 0 if self._is_whole else (nbytes - LINE_BYTES) // STRIDE_BYTES + 1
        self._last = bytearray()

    def add(self, address: int, nbytes: int) -> None:
        """Add the next bytes, in live memory; all pieces but the last are multiples of 4 KiB."""
        begin, self._done = self._done, self._done + nbytes
        if self._kind == "off" or not nbytes:
            return
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        if self._is_whole:
            self._digest.update(memory)
            return
        first = -(
            -begin // STRIDE_BYTES
        )  # lines begin at multiples of 64 bytes: none crosses a piece
        count = min(self._count, -(-self._done // STRIDE_BYTES)) - first
        if count > 0:
            start = first * STRIDE_BYTES - begin
            lines = np.ndarray((count,), f"V{LINE_BYTES}", memory, start, (STRIDE_BYTES,))
            self._digest.update(lines.copy().data)
        self._last = (self._last + memory[-LINE_BYTES:])[-LINE_BYTES:]

    def result(self) -> Sum | None:
        """Return the checksum of what was added; None if it is off."""
        assert self._done == self._nbytes, "bytes are missing"
        if self._kind == "off":
            return None
        self._digest.update(self._last)
        self._last = bytearray()
        return self._kind, self._digest.intdigest()
