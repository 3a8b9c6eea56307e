"""FlashNeuron's compressed sparse form: a bit for each element, counts of rows, what is not zero.

Kept to compare ``zero-value`` with, which is the same without the counts. FlashNeuron (FAST 2021) takes
compressed sparse rows and has a bit for each element say where, in place of a column index for each that
is kept; the counts let rows be packed and unpacked beside each other, as a GPU does. How long its rows
are we could not look up; here they are of 256. Its values then are cast to float16, which loses
something: that is the chain ``csr+float16`` here.

[Note: format csr]
    Version 2. ``count`` elements of ``w`` bytes are rows of 256; the last row may be shorter.

    1. A bitmap, as in [Note: format zero-value]: four u64 for each row.
    2. One little-endian u16 per row, which MUST be how many bits of it are set; then zeros up to a
       multiple of 8 bytes, which MUST be zeros.
    3. The kept elements, in order, ``w`` bytes each: those that have any bit set, so that -0.0 is kept.

    The payload MUST be exactly as long as the bitmap says. A decoder checks all of this before it writes.
    Frames of version 1, which had column indices, are decoded: see [Note: format csr, version 1] in
    ``csr_columns.py``.

    A share ``z`` of zeros makes float32 take ``1/32 + 1/512 + 1 - z`` of its bytes.
"""

from __future__ import annotations

import numpy as np

from penstock.codec import csr_columns
from penstock.codec.base import DTYPES, Bytes, Codec, Fidelity, Words
from penstock.codec.kernels import csr as kernels
from penstock.codec.kernels import zero_value
from penstock.core.errors import CodecError

__all__ = ["Csr", "head_bytes"]

ROW = kernels.ROW


class Csr(Codec):
    """Bitmap, row counts, values. Lossless; every dtype."""

    name = "csr"
    id = 2
    versions = (1, 2)
    dtypes = frozenset(DTYPES)
    fidelity = Fidelity.EXACT

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        head = head_bytes(words.size)
        if head > payload.size:
            return None
        bitmap, counts, padding = _head(payload, words.size)
        room = (payload.size - head) // words.itemsize * words.itemsize
        kept = zero_value.pack(words, bitmap, payload[head : head + room].view(words.dtype))
        if kept < 0:
            return None
        kernels.count_rows(bitmap, counts)
        padding[:] = 0
        return head + int(kept) * words.itemsize

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        head = head_bytes(words.size)
        if head > payload.size:
            raise CodecError(
                f"codec {self.name}: {payload.size} bytes have no room for a bitmap and row counts of"
                f" {head}"
            )
        bitmap, counts, padding = _head(payload, words.size)
        kept, left = zero_value.count(bitmap, words.size), payload.size - head
        if kept < 0 or kept * words.itemsize != left:
            raise CodecError(
                f"codec {self.name}: {left} bytes behind bitmap and row counts of {words.size} {dtype},"
                f" {'with bits beyond them' if kept < 0 else f'of which {kept} are kept'}"
            )
        if padding.any() or not kernels.counts_agree(bitmap, counts):
            raise CodecError(
                f"codec {self.name}: row counts of {words.size} {dtype} that are not those of the"
                " bitmap, or padding that is not 0"
            )
        zero_value.unpack(bitmap, payload[head:].view(words.dtype), words)

    def _decode_old(self, payload: Bytes, words: Words, dtype: str, version: int) -> None:
        csr_columns.decode(payload, words, dtype)


def head_bytes(elements: int) -> int:
    """How long bitmap and row counts are."""
    return 8 * -(-elements // 64) + -(-(2 * -(-elements // ROW)) // 8) * 8


def _head(payload: Bytes, elements: int) -> tuple[Words, Words, Bytes]:
    """Bitmap, row counts, and what is behind these."""
    first = 8 * -(-elements // 64)
    second = first + 2 * -(-elements // ROW)
    return (
        payload[:first].view(np.uint64),
        payload[first:second].view(np.uint16),
        payload[second : head_bytes(elements)],
    )
