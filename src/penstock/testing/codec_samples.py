"""Inputs for the conformance suite of codecs, and checks of its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.codec.base import ITEMSIZE, Bytes, Codec, ErrorBound, Fidelity

Numbers: TypeAlias = npt.NDArray[Any]

_GUARD: Final = 0xA5
_GUARD_BYTES: Final = 256
_NUMBER: Final[dict[str, Any]] = {
    "bool": np.uint8,
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
}
_EXPONENT_BITS: Final = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11}
_UNSIGNED: Final[dict[int, Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Guarded:
    """Memory between guard bytes; ``check`` fails if any of them was written to.

    Attributes:
        memory: The bytes between, filled with the guard's value as well.
    """

    def __init__(self, nbytes: int, *, skew: int = 0) -> None:
        self._room = np.full(nbytes + skew + 64 + 2 * _GUARD_BYTES, _GUARD, np.uint8)
        begin = _GUARD_BYTES + -(self._room.ctypes.data + _GUARD_BYTES) % 64 + skew
        self.memory: Bytes = self._room[begin : begin + nbytes]
        self._around = (self._room[:begin], self._room[begin + nbytes :])

    def check(self) -> None:
        """Fail if a byte before or behind ``memory`` has changed."""
        for side, bytes_ in zip(("before", "behind"), self._around, strict=True):
            assert untouched(bytes_), f"a byte {side} the memory was written to"


def untouched(memory: Bytes) -> bool:
    """Return whether no byte of guarded memory, or a part of it, was written to."""
    return bool((memory == _GUARD).all())


def placed(content: bytes | Bytes, *, skew: int = 0) -> Bytes:
    """Return a copy of ``content`` at an address ``skew`` bytes above a multiple of 64."""
    memory = Guarded(len(content), skew=skew).memory
    memory[:] = np.frombuffer(content, np.uint8)
    return memory


# -- sources --------------------------------------------------------------------------------------


def sources(dtype: str, nbytes: int, *, seed: int = 0) -> Iterator[tuple[str, Bytes]]:
    """Yield named contents of ``nbytes`` bytes: typical of networks, and extreme ones."""
    random = np.random.default_rng(seed)
    size = ITEMSIZE[dtype]
    count = nbytes // size
    bits = random.integers(0, 256, nbytes, np.uint8)
    never_zero = bits.copy()
    never_zero[::size] |= 1
    yield "zeros", placed(bytes(nbytes))
    yield "no zero", placed(never_zero)
    yield "random bits", placed(bits)
    yield "one value", placed((bytes([0] * (size - 1) + [0x41]) * (count + 1))[:nbytes])
    for share in (0.03, 0.5, 0.97):
        yield f"{share:.0%} zeros", with_zeros(dtype, nbytes, share, random)
    specials = special_words(dtype)
    drawn = specials[random.integers(0, specials.size, count)]
    yield "special values", placed(drawn.tobytes() + bits[count * size :].tobytes())


def with_zeros(dtype: str, nbytes: int, share: float, random: np.random.Generator) -> Bytes:
    """Return values like those of activations, of which about ``share`` are zero."""
    count, tail = divmod(nbytes, ITEMSIZE[dtype])
    if dtype in _EXPONENT_BITS:
        values = random.standard_normal(count)
        words = _from_float(values, dtype)
    else:
        info = np.iinfo(_NUMBER[dtype])
        low, high = (0, 2) if dtype == "bool" else (max(info.min, -90), min(info.max, 90))
        words = random.integers(low, high, count).astype(_NUMBER[dtype])
    words[random.random(count) < share] = 0
    return placed(words.tobytes() + random.bytes(tail))


def special_words(dtype: str) -> Numbers:
    """Return the error-prone words of a type, as unsigned integers."""
    bits = 8 * ITEMSIZE[dtype]
    top = 1 << (bits - 1)
    words = {0, 1, 2, 0x7F, 0x80, 0xFF, top, top - 1, top + 1, 2 * top - 1, 2 * top - 2}
    if dtype in _EXPONENT_BITS:
        mantissa = bits - 1 - _EXPONENT_BITS[dtype]
        infinity = top - (1 << mantissa)
        least, one = 1 << mantissa, ((1 << (_EXPONENT_BITS[dtype] - 1)) - 1) << mantissa
        quiet = infinity | 1 << (mantissa - 1)
        for word in (infinity, infinity - 1, infinity + 1, quiet, quiet + 5, least, least - 1, one):
            words |= {word, word | top}
    return np.array(sorted(words), _UNSIGNED[bits // 8])


# -- checks ---------------------------------------------------------------------------------------


def numbers(memory: Bytes, dtype: str) -> Numbers:
    """Return the whole elements in ``memory``; bfloat16 as the float32 of the same value."""
    whole = memory[: memory.size - memory.size % ITEMSIZE[dtype]].tobytes()
    if dtype == "bfloat16":
        return (np.frombuffer(whole, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(whole, _NUMBER[dtype])


def check_decoded(codec: Codec, dtype: str, source: Bytes, decoded: Bytes) -> None:
    """Fail if ``decoded`` is not what the codec promises for ``source``."""
    if codec.fidelity is Fidelity.EXACT:
        assert decoded.tobytes() == source.tobytes()
        return
    whole = source.size - source.size % ITEMSIZE[dtype]
    assert decoded[whole:].tobytes() == source[whole:].tobytes()  # a tail is unchanged
    wanted, found = numbers(source, dtype), numbers(decoded, dtype)
    if codec.fidelity is Fidelity.POSITIVE:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            expected = (~(wanted <= 0)).astype(wanted.dtype)
        assert np.array_equal(found, expected)
        return
    bound = codec.spec(dtype, source.size).error_bound
    assert bound is not None
    with np.errstate(all="ignore"):  # signalling NaNs
        _check_bound(bound, wanted, found)


def _check_bound(bound: ErrorBound, wanted: Numbers, found: Numbers) -> None:
    finite = np.isfinite(wanted)
    assert np.array_equal(np.isnan(found), np.isnan(wanted)), (
        "NaN stays NaN, and nothing else becomes NaN"
    )
    infinite = np.isinf(wanted)
    assert np.array_equal(found[infinite], wanted[infinite]), "infinities stay"
    exact, got = wanted.astype(np.longdouble), found.astype(np.longdouble)
    magnitude = np.where(finite, np.abs(exact), 0)
    allowed = np.maximum(bound.relative * _block_largest(magnitude, bound.block), bound.absolute)
    nearest = np.where(magnitude > bound.largest, np.copysign(bound.largest, exact), exact)
    allowed = np.where(magnitude > bound.largest, 0, allowed) if bound.block == 1 else allowed
    error = np.abs(got[finite] - nearest[finite])
    worst = int(np.argmax(error - allowed[finite])) if error.size else 0
    assert (error <= allowed[finite]).all(), (
        f"{wanted[finite][worst]!r} became {found[finite][worst]!r}: {error[worst]!r} off,"
        f" {allowed[finite][worst]!r} is allowed"
    )


def _block_largest(magnitude: Numbers, block: int) -> Numbers:
    """Return, for every element, the largest magnitude in its block."""
    if block == 1 or not magnitude.size:
        return magnitude
    starts = np.arange(0, magnitude.size, block)
    return np.repeat(np.maximum.reduceat(magnitude, starts), block)[: magnitude.size]


def _from_float(values: npt.NDArray[np.float64], dtype: str) -> Numbers:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    result: Numbers = values.astype(_NUMBER[dtype])
    return result
