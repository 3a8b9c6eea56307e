"""Codecs that give every block of so many elements one scale: what float8 and int8 have in common.

[Note: blockwise payload]
    First the scales of all blocks, in order, then one byte for every element, in order. The last block
    may be short. Little-endian.

16-bit sources are widened to float32 a chunk at a time, in scratch memory that stays in the cache, and
narrowed back in the same way: to nearest even, and to the largest value of the type where beyond it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np

from penstock.codec.base import Bytes, Codec, Fidelity, Words
from penstock.codec.kernels import casts
from penstock.core.errors import CodecError

_CHUNK = 1 << 16  # elements; a multiple of every block
_WIDEN = {"float16": casts.from_float16, "bfloat16": casts.from_bfloat16}
_NARROW = {"float16": casts.to_float16, "bfloat16": casts.to_bfloat16}


class Blockwise(Codec):
    """One scale for every block, one byte for every element."""

    fidelity = Fidelity.BOUNDED
    dtypes = frozenset({"float32", "bfloat16", "float16"})
    block: int
    """Elements that share a scale."""
    scale_dtype: type[np.generic]
    code_dtype: type[np.generic]

    @abstractmethod
    def _to_codes(self, source: Words, scales: Words, codes: Words, dtype: str) -> None:
        """Float32 bits, whole blocks of a source of ``dtype``, to scales and codes."""

    @abstractmethod
    def _from_codes(self, scales: Words, codes: Words, out: Words) -> None:
        """Scales and codes to float32 bits."""

    @abstractmethod
    def _check_scales(self, scales: Words, dtype: str) -> None:
        """Raise CodecError if there is a scale that ``_to_codes`` never makes."""

    def scales_bytes(self, count: int) -> int:
        """How long the payload's first part is, for so many elements."""
        return -(-count // self.block) * np.dtype(self.scale_dtype).itemsize

    def _payload_bytes(self, count: int) -> int:
        return self.scales_bytes(count) + count

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        scales, codes = self._parts(payload[: self._payload_bytes(words.size)], words.size)
        wide = _scratch(dtype, words.size)
        for blocks, elements in self._chunks(words.size):
            part = words[elements]
            if dtype != "float32":
                _WIDEN[dtype](part, wide[: part.size])
                part = wide[: part.size]
            self._to_codes(part, scales[blocks], codes[elements], dtype)
        return self._payload_bytes(words.size)

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        if payload.size != self._payload_bytes(words.size):
            raise CodecError(
                f"codec {self.name}: a payload of {payload.size} bytes; {words.size} elements take"
                f" {self._payload_bytes(words.size)}"
            )
        scales, codes = self._parts(payload, words.size)
        self._check_scales(scales, dtype)
        wide = _scratch(dtype, words.size)
        for blocks, elements in self._chunks(words.size):
            part = words[elements]
            if dtype == "float32":
                self._from_codes(scales[blocks], codes[elements], part)
            else:
                self._from_codes(scales[blocks], codes[elements], wide[: part.size])
                _NARROW[dtype](wide[: part.size], part)

    def _parts(self, payload: Bytes, count: int) -> tuple[Words, Words]:
        head = self.scales_bytes(count)
        return payload[:head].view(self.scale_dtype), payload[head:].view(self.code_dtype)

    def _chunks(self, count: int) -> Iterator[tuple[slice, slice]]:
        """Blocks and elements of every chunk."""
        for start in range(0, count, _CHUNK):
            first = start // self.block
            yield slice(first, first + _CHUNK // self.block), slice(start, start + _CHUNK)


def scratch_bytes(dtype: str, count: int) -> int:
    """What widening a chunk takes."""
    return 0 if dtype == "float32" else 4 * min(count, _CHUNK)


def _scratch(dtype: str, count: int) -> Words:
    return np.empty(scratch_bytes(dtype, count) // 4, np.uint32)
