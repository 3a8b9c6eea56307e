"""One byte for every element, in steps of 1/126 of the largest magnitude in its block of 256.

Lossy, so opt-in. Blockwise absmax quantization as in Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (ICLR 2022), section 2.1, here linear and with smaller blocks.

[Note: int8]
    A block of 256 elements shares a step, a float32: its largest finite magnitude divided by 126, and at
    least 2^-120, so that subnormal float32s need no care. An element's code is its value divided by the
    step, rounded to nearest even: -126 to 126. The other three codes MUST stand for what is not finite:
    127 for infinity, -127 for its negative, -128 for NaN. So a non-finite element costs its neighbours
    nothing, and all others no more than steps of 1/126 where 1/127 were possible. -0.0 becomes 0.

    A decoded value is the code times the step, at most the largest finite float32.

    The payload is the steps of all blocks, in order, then one byte for every element, in order. The last
    block may be short. Little-endian.

16-bit sources are widened to float32 a chunk at a time, in scratch memory that stays in the cache, and
narrowed back in the same way: to nearest even, and to the largest value of the type where beyond it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.codec.base import Bytes, Codec, ErrorBound, Fidelity, Words
from penstock.codec.casts import LARGEST
from penstock.codec.kernels import casts
from penstock.codec.kernels import int8 as kernels
from penstock.core.errors import CodecError

__all__ = ["LEAST_STEP", "Int8"]

LEAST_STEP = np.float32(2.0**-120)
_CHUNK = 1 << 16  # elements; a multiple of a block
_WIDEN = {"float16": casts.from_float16, "bfloat16": casts.from_bfloat16}
_NARROW = {"float16": casts.to_float16, "bfloat16": casts.to_bfloat16}
_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Error that narrowing the decoded value to the source's type adds, relative to it."""


class Int8(Codec):
    """Blockwise absmax int8: see [Note: int8]."""

    name = "int8"
    id = 9
    dtypes = frozenset({"float32", "bfloat16", "float16"})
    fidelity = Fidelity.BOUNDED
    block = 256
    """Elements that share a step."""

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        # half a step; what float32 rounds in step, quotient and product; what narrowing rounds
        relative = 1 / 252 + 2.0**-22 + _ROUNDING[dtype]
        # float16 subnormals are narrowed by up to 2^-25, in blocks up to 2^-14: half a step of those
        # and that come to less than 2^-21
        absolute = 2.0**-21 if dtype == "float16" else 2.0**-120
        bound = ErrorBound(
            relative=relative, absolute=absolute, largest=LARGEST[dtype], block=self.block
        )
        return _payload_bytes(count), _scratch_bytes(dtype, count), bound

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        steps, codes = _parts(payload[: _payload_bytes(words.size)], words.size)
        wide = _scratch(dtype, words.size)
        for blocks, elements in _chunks(words.size):
            part = words[elements]
            if dtype != "float32":
                _WIDEN[dtype](part, wide[: part.size])
                part = wide[: part.size]
            kernels.to_int8(part, steps[blocks], codes[elements], LEAST_STEP)
        return _payload_bytes(words.size)

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        if payload.size != _payload_bytes(words.size):
            raise CodecError(
                f"codec {self.name}: a payload of {payload.size} bytes; {words.size} elements take"
                f" {_payload_bytes(words.size)}"
            )
        steps, codes = _parts(payload, words.size)
        if not ((steps >= LEAST_STEP) & (steps < np.inf)).all():
            raise CodecError(f"codec {self.name}: a step that is no number of {LEAST_STEP} or more")
        wide = _scratch(dtype, words.size)
        for blocks, elements in _chunks(words.size):
            part = words[elements]
            out = part if dtype == "float32" else wide[: part.size]
            kernels.from_int8(steps[blocks], codes[elements], out.view(np.float32))
            if dtype != "float32":
                _NARROW[dtype](out, part)


def _steps_bytes(count: int) -> int:
    return 4 * -(-count // Int8.block)


def _payload_bytes(count: int) -> int:
    return _steps_bytes(count) + count


def _parts(payload: Bytes, count: int) -> tuple[Words, Words]:
    """Return views of a payload's steps and codes."""
    head = _steps_bytes(count)
    return payload[:head].view(np.float32), payload[head:].view(np.int8)


def _chunks(count: int) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks and elements of every chunk."""
    for start in range(0, count, _CHUNK):
        first = start // Int8.block
        yield slice(first, first + _CHUNK // Int8.block), slice(start, start + _CHUNK)


def _scratch_bytes(dtype: str, count: int) -> int:
    """Return the bytes that widening a chunk takes."""
    return 0 if dtype == "float32" else 4 * min(count, _CHUNK)


def _scratch(dtype: str, count: int) -> Words:
    return np.empty(_scratch_bytes(dtype, count) // 4, np.uint32)
