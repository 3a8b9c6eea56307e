"""Codecs one after the other: ``chain.parse("zero-value+bfloat16")``.

What a codec's payload consists of is in part a row of elements again: the values that ``zero-value``
kept, the halves that ``bfloat16`` made. A chain hands that row, its *stream*, to the next codec and keeps
the rest of the payload, a bitmap or scales, as it is. FlashNeuron (FAST 2021, section 4.3) compresses so:
sparse form first, then its values to FP16.

Which may follow which: sparse (zero-value), cast (float16, bfloat16, float8, int8) and planes
(byteplane), each once, planes last. Sparse after planes, for example, would look for zero words among
bytes that were sorted by their place in a word.

[Note: format chain]
    1. u8 number of members; u8 raw: 1 if the first member was left out, because the source would not have
       become shorter, and the stream is the source itself; six u8, the members' numbers, then zeros.
    2. The stream, as a frame (base.py) of the second member, or, if there are more than two, of the chain
       of all but the first.
    3. The rest of the first member's payload: what is before the stream, then what is behind it.

    Where the stream lies in the first member's payload follows from that payload's
    length, and the number and type of the elements. Every field MUST agree with the codec that decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from penstock.codec.base import (
    HEADER_BYTES,
    ITEMSIZE,
    Bytes,
    Codec,
    ErrorBound,
    Fidelity,
    Words,
    read_header,
)
from penstock.codec.byteplane import BytePlane
from penstock.codec.casts import BFloat16, Float8, Float16
from penstock.codec.int8 import Int8
from penstock.codec.zero_value import ZeroValue
from penstock.core.errors import CodecError, ConfigError

__all__ = ["Chain", "of", "parse"]

_PREFIX_BYTES: Final = 8
_MOST_MEMBERS: Final = 3
_FLOAT8: Final = Float8()
_INT8: Final = Int8()


class _Kind(Enum):
    """What a member does to the bytes, and so what may follow it."""

    SPARSE = "sparse"
    CAST = "cast"
    PLANES = "planes"


@dataclass(frozen=True, slots=True)
class _Member:
    """What a chain knows of a codec."""

    codec: Codec
    kind: _Kind
    stream: Callable[[int, int, str], slice]
    """Of the payload's bytes, the elements and their type: where in the payload the stream lies."""
    dtype: str | None = None
    """The type of the stream's elements; ``None``: as the source's."""


def _behind_bitmap(payload_bytes: int, count: int, dtype: str) -> slice:
    return slice(8 * -(-count // 64), payload_bytes)


def _all(payload_bytes: int, count: int, dtype: str) -> slice:
    return slice(0, payload_bytes)


def _behind_float8_scales(payload_bytes: int, count: int, dtype: str) -> slice:
    return slice(_FLOAT8.scales_bytes(count), payload_bytes)


def _behind_int8_scales(payload_bytes: int, count: int, dtype: str) -> slice:
    return slice(_INT8.scales_bytes(count), payload_bytes)


_MEMBERS: Final = (
    _Member(ZeroValue(), _Kind.SPARSE, _behind_bitmap),
    _Member(Float16(), _Kind.CAST, _all, "float16"),
    _Member(BFloat16(), _Kind.CAST, _all, "bfloat16"),
    _Member(_FLOAT8, _Kind.CAST, _behind_float8_scales, "uint8"),
    _Member(_INT8, _Kind.CAST, _behind_int8_scales, "int8"),
    _Member(BytePlane(), _Kind.PLANES, _all),
)
_BY_NAME: Final = {member.codec.name: member for member in _MEMBERS}
_BY_ID: Final = {member.codec.id: member for member in _MEMBERS}


def parse(name: str) -> Chain:
    """The chain of that name: its members' names with ``+`` between.

    Raises:
        ConfigError: There is no such member, or one may not follow the other.
    """
    names = [each.strip() for each in name.split("+")]
    for each in names:
        if each not in _BY_NAME:
            known = ", ".join(_BY_NAME)
            raise ConfigError(f"chain {name!r}: {each!r} is no member; members are {known}")
    return Chain([_BY_NAME[each].codec for each in names])


def of(frame: Bytes) -> Chain:
    """The chain that made ``frame``. Raises CodecError where no chain did."""
    header = read_header(frame)
    prefix = frame[HEADER_BYTES : HEADER_BYTES + min(header.payload_bytes, _PREFIX_BYTES)].tobytes()
    if header.codec != Chain.id or header.raw or len(prefix) < _PREFIX_BYTES:
        raise CodecError(f"a frame of codec {header.codec} does not say which members made it")
    numbers = prefix[2 : 2 + prefix[0]]
    if len(numbers) != prefix[0] or any(number not in _BY_ID for number in numbers):
        raise CodecError(f"a damaged frame: a chain of the codecs with numbers {list(numbers)}")
    try:
        return Chain([_BY_ID[number].codec for number in numbers])
    except ConfigError as error:
        raise CodecError(f"a damaged frame: {error}") from None


class Chain(Codec):
    """Each member encodes the stream of the one before it.

    Fidelity is the weakest member's. The bound is the cast's; but where a sparse member comes before a
    cast with blocks, a block holds elements from anywhere: the bound is relative to the largest of all.

    Attributes:
        members: In order of encoding; two or three.
    """

    id = 10

    def __init__(self, members: Sequence[Codec]) -> None:
        self.members = tuple(members)
        self.name = "+".join(member.name for member in self.members)
        _check_members(self.name, self.members)
        self._member = _BY_NAME[members[0].name]
        self._first = self._member.codec
        self._second = members[1] if len(members) == 2 else Chain(members[1:])
        self.dtypes = frozenset(
            dtype for dtype in self._first.dtypes if self._second.accepts(self._stream_dtype(dtype))
        )
        if not self.dtypes:
            raise ConfigError(
                f"chain {self.name}: what {self._first.name} gives, {self._second.name} does not take"
            )
        exact = all(member.fidelity is Fidelity.EXACT for member in self.members)
        self.fidelity = Fidelity.EXACT if exact else Fidelity.BOUNDED
        numbers = bytes(member.id for member in self.members)
        self._numbers = numbers.ljust(_PREFIX_BYTES - 2, b"\0")

    def _stream_dtype(self, dtype: str) -> str:
        return self._member.dtype or dtype

    def _most_bytes(self, dtype: str, count: int) -> tuple[int, int]:
        """The longest payload of the first member, and what of it is not stream."""
        spec = self._first.spec(dtype, count * ITEMSIZE[dtype])
        payload = spec.bound_bytes - HEADER_BYTES
        stream = self._member.stream(payload, count, dtype)
        return payload, payload - max(stream.stop - stream.start, 0)

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        payload, rest = self._most_bytes(dtype, count)
        first = self._first.spec(dtype, count * ITEMSIZE[dtype])
        # an EXACT first member may be left out, and then all that it could make is stream
        stream = payload if self._first.fidelity is Fidelity.EXACT else payload - rest
        second = self._second.spec(self._stream_dtype(dtype), stream)
        scratch = payload + first.scratch_bytes + second.scratch_bytes
        if self.fidelity is Fidelity.EXACT:
            scratch += second.bound_bytes
        bound = first.error_bound
        if second.error_bound is not None:
            whole = second.error_bound.block > 1
            bound = (
                replace(second.error_bound, block=max(count, 1)) if whole else second.error_bound
            )
        return _PREFIX_BYTES + second.bound_bytes + rest, scratch, bound

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        most, _ = self._most_bytes(dtype, words.size)
        inner = np.empty(most, np.uint8)
        length = self._first._encode(words, inner, dtype)
        exact = self._first.fidelity is Fidelity.EXACT
        raw = length is None or (exact and length >= words.nbytes)
        inner = words.view(np.uint8) if raw else inner[:length]
        where = slice(0, inner.size) if raw else self._member.stream(inner.size, words.size, dtype)
        body = payload[_PREFIX_BYTES:]
        middle = self._encode_stream(inner[where], body, self._stream_dtype(dtype))
        end = (middle or 0) + inner.size - (where.stop - where.start)
        if middle is None or end > body.size:
            return None
        payload[:_PREFIX_BYTES] = np.frombuffer(self._prefix(raw), np.uint8)
        body[middle : middle + where.start] = inner[: where.start]
        body[middle + where.start : end] = inner[where.stop :]
        return _PREFIX_BYTES + end

    def _encode_stream(self, stream: Bytes, room: Bytes, dtype: str) -> int | None:
        """The second member's frame, by way of scratch memory where only its bound has no room."""
        bound = self._second.spec(dtype, stream.size).bound_bytes
        if bound <= room.size:
            return self._second.encode(stream, room, dtype=dtype)
        scratch = np.empty(bound, np.uint8)
        length = self._second.encode(stream, scratch, dtype=dtype)
        if length > room.size:
            return None
        room[:length] = scratch[:length]
        return length

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        raw = self._is_raw(payload)
        frame = payload[_PREFIX_BYTES:]
        header = read_header(frame)
        if header.dtype != self._stream_dtype(dtype):
            raise CodecError(f"codec {self.name}: a stream of {header.dtype}, made from {dtype}")
        rest = frame[HEADER_BYTES + header.payload_bytes :]
        most, _ = self._most_bytes(dtype, words.size)
        length = header.source_bytes + rest.size
        where = self._member.stream(length, words.size, dtype)
        if not raw and (length > most or where.stop - where.start != header.source_bytes):
            raise CodecError(
                f"codec {self.name}: a stream of {header.source_bytes} bytes and {rest.size} others"
                f" for {words.size} {dtype}"
            )
        if raw:
            self._decode_raw(frame, rest, words)
            return
        inner = np.empty(length, np.uint8)
        inner[: where.start] = rest[: where.start]
        inner[where.stop :] = rest[where.start :]
        self._second.decode(frame, inner[where])
        self._first._decode(inner, words, dtype)

    def _decode_raw(self, frame: Bytes, rest: Bytes, words: Words) -> None:
        if rest.size:
            raise CodecError(f"codec {self.name}: {rest.size} bytes behind the stream")
        self._second.decode(frame, words.view(np.uint8))

    def _prefix(self, raw: bool) -> bytes:
        return bytes([len(self.members), raw]) + self._numbers

    def _is_raw(self, payload: Bytes) -> bool:
        found = payload[:_PREFIX_BYTES].tobytes()
        allowed = (False, True) if self._first.fidelity is Fidelity.EXACT else (False,)
        for raw in allowed:
            if found == self._prefix(raw):
                return raw
        raise CodecError(f"codec {self.name}: a chain that begins {found.hex()!r} is another one")


_MAY_FOLLOW: Final = {
    _Kind.SPARSE: (_Kind.CAST, _Kind.PLANES),
    _Kind.CAST: (_Kind.SPARSE, _Kind.PLANES),
    _Kind.PLANES: (),
}


def _check_members(name: str, members: Sequence[Codec]) -> None:
    if not 2 <= len(members) <= _MOST_MEMBERS:
        raise ConfigError(f"chain {name}: {len(members)} members; it takes two or three")
    for member in members:
        if member.name not in _BY_NAME:
            raise ConfigError(f"chain {name}: {member.name} has no row of elements to hand on")
    kinds = [_BY_NAME[member.name].kind for member in members]
    for index, kind in enumerate(kinds[1:], 1):
        before = kinds[index - 1]
        if kind not in _MAY_FOLLOW[before] or kinds.count(kind) > 1:
            raise ConfigError(
                f"chain {name}: {members[index].name} ({kind.value}) behind"
                f" {members[index - 1].name} ({before.value}) makes nothing shorter; take sparse and"
                " cast in either order, each once, then planes"
            )
