"""Codecs in torch operations, for tensors that should shrink before they leave their device.

Each module is one codec: ``CODEC``, its host form, and two functions that write and read the same bytes:

- ``encode(words, dtype) -> payload``: ``words`` is one-dimensional, integers of the element's width
  (uint8, int16, int32, int64); ``payload`` is uint8, on the same device. ``None`` if the payload of a
  lossless codec would not be shorter.
- ``decode(payload, count, dtype) -> words``. Raises CodecError for a damaged payload.

They wait for the device only if a size or a check depends on the data; they run on the current stream.
:mod:`penstock.codec.device.base` adds frames.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from penstock.codec.device import (
    bfloat16,
    exponent,
    int8,
    narrow,
    positive,
    zero_value,
)

FORMS: Final[dict[str, ModuleType]] = {
    "zero-value": zero_value,
    "positive": positive,
    "narrow": narrow,
    "exponent": exponent,
    "bfloat16": bfloat16,
    "int8": int8,
}
"""Device forms of codecs, by name."""

SCRATCH: Final[dict[str, tuple[int, int]]] = {
    "zero-value": (10, 2),
    "positive": (5, 2),
    "narrow": (4, 2),
    "exponent": (24, 2),
    "bfloat16": (32, 0),
    "int8": (41, 0),
}
"""Largest device memory of each, in bytes per element and per byte of the source; see ``scratch_bytes``
in :mod:`penstock.codec.device.base`."""

KERNEL_SCRATCH: Final[dict[str, tuple[int, int]]] = {"exponent": (1, 2)}
"""The same where Triton kernels of that name are used, :mod:`penstock.codec.device.kernels`.

``exponent`` holds the payload and the frame, or the words twice where a tail is joined to them. Beside
them it has 20 bytes for each block of 512 elements when it encodes, and 17 when it decodes, and a prefix
sum takes less than that inside.
"""
