"""The table of codecs: by name for plans and knobs, by number for frames.

A name with ``+`` in it is a chain, ``"zero-value+bfloat16"``; a chain's frame says what it is made of.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Final

from penstock.codec.base import Bytes, Codec, Fidelity, read_header
from penstock.core.errors import CodecError, ConfigError

_MODULES: Final = {
    "zero-value": ("zero_value", "ZeroValue"),
    "positive": ("positive", "Positive"),
    "narrow": ("narrow", "Narrow"),
    "bfloat16": ("casts", "BFloat16"),
    "int8": ("int8", "Int8"),
    "exponent": ("exponent", "Exponent"),
}
"""Where each is. They are loaded when one is asked for: compiled code takes a while to load."""
CHAIN_ID: Final = 10


def names() -> tuple[str, ...]:
    """Every codec's name but for chains, in the order of their numbers."""
    return tuple(_MODULES)


def get(name: str) -> Codec:
    """The codec of that name; one instance serves all.

    Raises:
        ConfigError: There is none, or no such chain; lists the known ones.
    """
    if "+" in name:
        chain: Codec = importlib.import_module("penstock.codec.chain").parse(name)
        return chain
    try:
        return _codec(name)
    except KeyError:
        known = ", ".join(names())
        raise ConfigError(
            f"there is no codec {name!r}; there are {known}, and chains of them with + between"
        ) from None


def by_id(number: int) -> Codec:
    """The codec that a frame's header names.

    Raises:
        CodecError: It is not known, or the chains', of which only a frame says which: ``codec_of``.
    """
    for codec in _codecs():
        if codec.id == number:
            return codec
    known = ", ".join(f"{codec.id} {codec.name}" for codec in _codecs())
    raise CodecError(
        f"there is no codec with number {number}; known are {known}, and {CHAIN_ID} for chains,"
        " which need the frame: codec_of(frame)"
    )


def codec_of(frame: Bytes) -> Codec:
    """A codec that decodes ``frame``. Raises CodecError if its header is damaged, or names none."""
    header = read_header(frame)
    if header.codec != CHAIN_ID:
        return by_id(header.codec)
    if header.raw:  # the source as it was: lossless chains are alike then
        return get("zero-value+exponent")
    chain: Codec = importlib.import_module("penstock.codec.chain").of(frame)
    return chain


def lossless_for(dtype: str) -> tuple[Codec, ...]:
    """The codecs, but for chains, that give back every bit of elements of this type."""
    exact = (codec for codec in _codecs() if codec.fidelity is Fidelity.EXACT)
    return tuple(codec for codec in exact if codec.accepts(dtype))


@cache
def _codec(name: str) -> Codec:
    module, kind = _MODULES[name]
    codec: Codec = getattr(importlib.import_module(f"penstock.codec.{module}"), kind)()
    return codec


def _codecs() -> tuple[Codec, ...]:
    return tuple(_codec(name) for name in _MODULES)


def decode(frame: Bytes, out: Bytes, *, dtype: str | None = None) -> None:
    """Decode a frame of any codec to all of ``out``, as ``Codec.decode``.

    Raises:
        CodecError: The frame is damaged, of an unknown codec, or of another length than ``out``.
        ConfigError: A buffer is not what it must be.
    """
    codec_of(frame).decode(frame, out, dtype=dtype)
