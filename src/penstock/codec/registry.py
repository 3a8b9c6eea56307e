"""Table of codecs: by name for plans and knobs, by number for frames.

A name with ``+`` is a chain, ``"zero-value+bfloat16"``; a chain's frame names its members.
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
"""Module and class of each codec. They are imported on demand: compiled code is slow to load."""
CHAIN_ID: Final = 10


def names() -> tuple[str, ...]:
    """Return the names of all codecs except chains, in the order of their numbers."""
    return tuple(_MODULES)


def get(name: str) -> Codec:
    """Return the codec of that name; one shared instance.

    Raises:
        ConfigError: There is no such codec or chain; lists the known ones.
    """
    if "+" in name:
        chain: Codec = importlib.import_module("penstock.codec.chain").parse(name)
        return chain
    try:
        return _codec(name)
    except KeyError:
        known = ", ".join(names())
        raise ConfigError(
            f"there is no codec {name!r}; there are {known}, and chains such as zero-value+exponent"
        ) from None


def by_id(number: int) -> Codec:
    """Return the codec with the number of a frame's header.

    Raises:
        CodecError: The number is not known, or that of chains, which need the frame: ``codec_of``.
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
    """Return a codec that decodes ``frame``. Raises CodecError for a damaged or unknown header."""
    header = read_header(frame)
    if header.codec != CHAIN_ID:
        return by_id(header.codec)
    if header.raw:  # any lossless chain decodes an unencoded source
        return get("zero-value+exponent")
    chain: Codec = importlib.import_module("penstock.codec.chain").of(frame)
    return chain


def lossless_for(dtype: str) -> tuple[Codec, ...]:
    """Return the lossless codecs, except chains, for elements of this type."""
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
        ConfigError: A buffer is unsuitable.
    """
    codec_of(frame).decode(frame, out, dtype=dtype)
