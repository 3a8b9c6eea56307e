"""Version 1 of the format ``csr``, with a column for each value. Decoded for ever, no longer encoded.

[Note: format csr, version 1]
    ``count`` elements of ``w`` bytes are rows of 256; the last row may be shorter. The payload is:

    1. One little-endian u16 per row: how many elements of it are kept; then zeros up to a multiple of 8
       bytes, which MUST be zeros.
    2. The kept elements, in order, ``w`` bytes each.
    3. For each of them, in the same order, its column in its row, a u8. Columns MUST rise within a row.

    The payload MUST be exactly as long as the counts say. A decoder checks all of this before it writes.
"""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Bytes, Words
from penstock.codec.kernels import csr as kernels
from penstock.core.errors import CodecError

ROW = kernels.ROW


def head_bytes(elements: int) -> int:
    """Row counts, rounded up to 8."""
    return -(-(2 * -(-elements // ROW)) // 8) * 8


def decode(payload: Bytes, words: Words, dtype: str) -> None:
    """Fill all of ``words``. Raises CodecError where ``payload`` is not of this format."""
    head = head_bytes(words.size)
    if head > payload.size:
        raise CodecError(f"codec csr: {payload.size} bytes have no room for {head} of row counts")
    counts = payload[: 2 * -(-words.size // ROW)].view(np.uint16)
    kept, left = int(counts.sum(dtype=np.int64)), payload.size - head
    if kept * (words.itemsize + 1) != left:
        raise CodecError(
            f"codec csr: {left} bytes behind row counts of {kept} {dtype}, which would take"
            f" {kept * (words.itemsize + 1)}"
        )
    border = head + kept * words.itemsize
    values, columns = payload[head:border].view(words.dtype), payload[border:]
    if payload[counts.nbytes : head].any() or not kernels.check(counts, columns, words.size):
        raise CodecError(
            f"codec csr: columns of {words.size} {dtype} that do not rise within their rows, or padding"
            " that is not 0"
        )
    kernels.unpack(counts, values, columns, words)
