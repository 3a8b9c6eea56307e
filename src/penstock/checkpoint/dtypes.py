"""Element types: as torch names them, and as a header of safetensors does."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class Kind:
    """An element type.

    Attributes:
        dtype: torch's.
        code: That of safetensors for what is stored.
        parts: How many of those make one element: 1, or 2 for a complex number, or its bytes.
    """

    dtype: torch.dtype
    code: str
    parts: int = 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


_CODES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    # readers know no code for these, or only of late: parts of an element are one more dimension
    "complex64": "F32",
    "complex128": "F64",
    "float8_e4m3fnuz": "U8",
    "float8_e5m2fnuz": "U8",
    "float8_e8m0fnu": "U8",
}

DTYPES: Final = {
    name: Kind(getattr(torch, name), code, 2 if name.startswith("complex") else 1)
    for name, code in _CODES.items()
    if hasattr(torch, name)
}
"""By torch's name."""


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """Torch's name of it, without the module."""
    return str(dtype).removeprefix("torch.")
