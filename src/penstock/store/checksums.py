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
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import numpy as np
import xxhash

Checksum: TypeAlias = Callable[[int, int], int]
"""Of live memory at an address, of a length in bytes; the interpreter's lock is released meanwhile."""

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


def by_name(name: Literal["full", "off", "sampled"]) -> Checksum | None:
    """The checksum that ``knobs.verify()`` names; None: there is none."""
    return {"full": full, "sampled": sampled, "off": None}[name]
