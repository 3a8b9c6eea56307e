"""Reference of the kernels of the codec ``int8``."""

from __future__ import annotations

import numpy as np

from penstock.codec.base import Words


def to_int8(source: Words, scales: Words, codes: Words, least: np.float32) -> None:
    """Encode as the kernel of the same name, a block at a time."""
    for block in range(scales.size):
        part = slice(block * 256, block * 256 + 256)
        values = source[part].view(np.float32)
        finite = np.isfinite(values)
        top = np.max(np.abs(values), where=finite, initial=0)
        scales[block] = max(top / np.float32(126), least)
        steps = np.rint(np.where(finite, values, 0) / scales[block])
        beyond = np.where(np.isnan(values), -128, np.where(values > 0, 127, -127))
        codes[part] = np.where(finite, steps, beyond)


def from_int8(scales: Words, codes: Words, out: Words) -> None:
    """Decode as the kernel of the same name."""
    largest = np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        values = codes.astype(np.float32) * np.repeat(scales, 256)[: codes.size]
    out[:] = np.clip(values, -largest, largest)
    out[codes == 127] = np.inf
    out[codes == -127] = -np.inf
    out[codes == -128] = np.nan
