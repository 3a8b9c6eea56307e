"""``zero-value`` and a second codec behind it: ``chain.parse("zero-value+bfloat16")``.

The payload of ``zero-value`` ends with a row of elements: those that are not zero. A chain hands that
row, its *stream*, to the second codec and keeps the rest of the payload, the bitmap, as it is.
FlashNeuron (FAST 2021, section 4.3) compresses so: sparse form first, then its values to FP16.

[Note: format chain]
    1. u8 2, the number of members; u8 raw: 1 if ``zero-value`` was left out, because the source would not
       have become shorter, and the stream is the source itself; two u8, the members' numbers; four zeros.
    2. The stream, as a frame (base.py) of the second member, of the source's type.
    3. The bitmap, unless raw.

    Every field MUST agree with the codec that decodes.
"""

from __future__ import annotations

from dataclasses import replace
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
from penstock.codec.casts import BFloat16
from penstock.codec.exponent import Exponent
from penstock.codec.int8 import Int8
from penstock.codec.positive import bitmap_bytes
from penstock.codec.zero_value import ZeroValue
from penstock.core.errors import CodecError, ConfigError

__all__ = ["Chain", "of", "parse"]

_PREFIX_BYTES: Final = 8
_FIRST: Final = ZeroValue()
_SECOND: Final[tuple[Codec, ...]] = (Exponent(), BFloat16(), Int8())


def parse(name: str) -> Chain:
    """Return the chain of that name: ``zero-value+`` and another codec's.

    Raises:
        ConfigError: There is no such chain.
    """
    names = [each.strip() for each in name.split("+")]
    for second in _SECOND:
        if names == [_FIRST.name, second.name]:
            return Chain(second)
    known = ", ".join(Chain(second).name for second in _SECOND)
    raise ConfigError(f"there is no chain {name!r}; there are {known}")


def of(frame: Bytes) -> Chain:
    """Return the chain that made ``frame``. Raises CodecError where none did."""
    header = read_header(frame)
    prefix = frame[HEADER_BYTES : HEADER_BYTES + min(header.payload_bytes, _PREFIX_BYTES)].tobytes()
    if header.codec != Chain.id or header.raw or len(prefix) < _PREFIX_BYTES:
        raise CodecError(f"a frame of codec {header.codec} does not say which members made it")
    for second in _SECOND:
        if prefix == _prefix(second, bool(prefix[1])):
            return Chain(second)
    raise CodecError(f"a damaged frame: there is no chain that begins {prefix.hex()!r}")


class Chain(Codec):
    """Chain of ``zero-value`` and a second codec, which encodes the elements that are not zero.

    Fidelity and bound are the second codec's; but a block of its holds elements from anywhere, so a bound
    that is relative to the largest in a block is relative to the largest of all.
    """

    id = 10

    def __init__(self, second: Codec) -> None:
        self.name = f"{_FIRST.name}+{second.name}"
        self.dtypes = second.dtypes
        self.fidelity = second.fidelity
        self._second = second

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        nbytes = count * ITEMSIZE[dtype]
        second = self._second.spec(dtype, nbytes)
        scratch = nbytes + second.scratch_bytes
        if self.fidelity is Fidelity.EXACT:
            scratch += second.bound_bytes
        bound = second.error_bound
        if bound is not None and bound.block > 1:
            bound = replace(bound, block=max(count, 1))
        head = min(bitmap_bytes(count), nbytes)
        return _PREFIX_BYTES + second.bound_bytes + head, scratch, bound

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        inner = np.empty(words.nbytes, np.uint8)
        length = _FIRST._encode(words, inner, dtype)
        raw = length is None or length >= words.nbytes
        head = 0 if raw else bitmap_bytes(words.size)
        inner = words.view(np.uint8) if raw else inner[:length]
        body = payload[_PREFIX_BYTES:]
        middle = self._encode_stream(inner[head:], body, dtype)
        if middle is None or middle + head > body.size:
            return None
        payload[:_PREFIX_BYTES] = np.frombuffer(_prefix(self._second, raw), np.uint8)
        body[middle : middle + head] = inner[:head]
        return _PREFIX_BYTES + middle + head

    def _encode_stream(self, stream: Bytes, room: Bytes, dtype: str) -> int | None:
        """Encode with the second codec, through scratch memory if only its upper bound does not fit."""
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
        if header.dtype != dtype:
            raise CodecError(f"codec {self.name}: a stream of {header.dtype}, made from {dtype}")
        bitmap = frame[HEADER_BYTES + header.payload_bytes :]
        if raw:
            if bitmap.size:
                raise CodecError(f"codec {self.name}: {bitmap.size} bytes behind the stream")
            self._second.decode(frame, words.view(np.uint8))
            return
        length = bitmap.size + header.source_bytes
        if bitmap.size != bitmap_bytes(words.size) or length > words.nbytes:
            raise CodecError(
                f"codec {self.name}: a stream of {header.source_bytes} bytes and {bitmap.size} others"
                f" for {words.size} {dtype}"
            )
        inner = np.empty(length, np.uint8)
        inner[: bitmap.size] = bitmap
        self._second.decode(frame, inner[bitmap.size :])
        _FIRST._decode(inner, words, dtype)

    def _is_raw(self, payload: Bytes) -> bool:
        found = payload[:_PREFIX_BYTES].tobytes()
        for raw in (False, True):
            if found == _prefix(self._second, raw):
                return raw
        raise CodecError(f"codec {self.name}: a chain that begins {found.hex()!r} is another one")


def _prefix(second: Codec, raw: bool) -> bytes:
    return bytes([2, raw, _FIRST.id, second.id]).ljust(_PREFIX_BYTES, b"\0")
