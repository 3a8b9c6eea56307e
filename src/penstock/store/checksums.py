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
