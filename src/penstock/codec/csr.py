"""Compressed sparse rows: the values that are not zero, with one byte each that says where.

Kept to compare ``zero-value`` with: a column per value kept is shorter than a bit per element only where
more than seven elements of eight are zero. Rows of 256, so that a column fits in a byte, are those of
Gist (ISCA 2018, narrow value optimization); FlashNeuron (FAST 2021) calls its own form CSR as well, but
keeps a bit per element, as ``zero-value`` does.

[Note: format csr]
    ``count`` elements of ``w`` bytes are rows of 256; the last row may be shorter. The payload is:

    1. One little-endian u16 per row: how many elements of it are kept; then zeros up to a multiple of 8
       bytes, which MUST be zeros.
    2. The kept elements, in order, ``w`` bytes each: those that have any bit set, so that -0.0 is kept.
    3. For each of them, in the same order, its column in its row, a u8. Columns MUST rise within a row.

    The payload MUST be exactly as long as the counts say. A decoder checks all of this before it writes.

    A share ``z`` of zeros makes float32 take ``1/512 + 5/4 (1 - z)`` of its bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.codec.base import DTYPES, Bytes, Codec, Fidelity, Words
from penstock.codec.kernels import csr as kernels
from penstock.core.errors import CodecError

__all__ = ["Csr"]

ROW = kernels.ROW


class _Parts(NamedTuple):
    values: Words
    columns: Words


class Csr(Codec):
    """Row counts, values, columns. Lossless; every dtype."""

    name = "csr"
    id = 2
    dtypes = frozenset(DTYPES)
    fidelity = Fidelity.EXACT

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        head = _head_bytes(words.size)
        if head > payload.size:
            return None
        payload[:head] = 0
        counts = _counts(payload, words.size)
        end = head + int(kernels.count(words, counts)) * (words.itemsize + 1)
        if end > payload.size:
            return None
        parts = _parts(payload[head:end], words)
        kernels.pack(words, counts, parts.values, parts.columns)
        return end

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        head = _head_bytes(words.size)
        if head > payload.size:
            raise CodecError(
                f"codec {self.name}: {payload.size} bytes have no room for {head} of row counts"
            )
        counts = _counts(payload, words.size)
        kept, left = int(counts.sum(dtype=np.int64)), payload.size - head
        if kept * (words.itemsize + 1) != left:
            raise CodecError(
                f"codec {self.name}: {left} bytes behind row counts of {kept} {dtype}, which would take"
                f" {kept * (words.itemsize + 1)}"
            )
        parts = _parts(payload[head:], words)
        if payload[counts.nbytes : head].any() or not kernels.check(
            counts, parts.columns, words.size
        ):
            raise CodecError(
                f"codec {self.name}: columns of {words.size} {dtype} that do not rise within their"
                " rows, or padding that is not 0"
            )
        kernels.unpack(counts, parts.values, parts.columns, words)


def _head_bytes(elements: int) -> int:
    """Row counts, rounded up to 8."""
    return -(-(2 * -(-elements // ROW)) // 8) * 8


def _counts(payload: Bytes, elements: int) -> Words:
    return payload[: 2 * -(-elements // ROW)].view(np.uint16)


def _parts(body: Bytes, words: Words) -> _Parts:
    kept = body.size // (words.itemsize + 1)
    border = kept * words.itemsize
    return _Parts(body[:border].view(words.dtype), body[border:])
