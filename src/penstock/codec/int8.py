"""One byte for every element, in steps of 1/126 of the largest magnitude in its block of 256.

Lossy, for who asks for it. Blockwise absmax quantization as in Dettmers et al., "8-bit Optimizers via
Block-wise Quantization" (ICLR 2022), section 2.1, here linear and with smaller blocks.

[Note: int8]
    A block of 256 elements shares a step, a float32: its largest finite magnitude divided by 126, and at
    least 2^-120, so that subnormal float32s need no care. An element's code is its value divided by the
    step, rounded to nearest even: -126 to 126. The other three codes MUST stand for what is not finite:
    127 for infinity, -127 for its negative, -128 for NaN. So a non-finite element costs its neighbours
    nothing, and all others no more than steps of 1/126 where 1/127 were possible. -0.0 becomes 0.

    A decoded value is the code times the step, at most the largest finite float32.
"""

from __future__ import annotations

import numpy as np

from penstock.codec.base import ErrorBound, Words
from penstock.codec.blockwise import Blockwise, scratch_bytes
from penstock.codec.casts import LARGEST
from penstock.codec.kernels import int8 as kernels
from penstock.core.errors import CodecError

__all__ = ["LEAST_STEP", "Int8"]

LEAST_STEP = np.float32(2.0**-120)
_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""What narrowing the decoded value to the source's type adds, relative to it."""


class Int8(Blockwise):
    """Blockwise absmax int8: see [Note: int8]."""

    name = "int8"
    id = 9
    block = 256
    scale_dtype = np.float32
    code_dtype = np.int8

    def _spec(self, dtype: str, count: int) -> tuple[int, int, ErrorBound | None]:
        # half a step; what float32 rounds in step, quotient and product; what narrowing rounds
        relative = 1 / 252 + 2.0**-22 + _ROUNDING[dtype]
        # float16 subnormals are narrowed by up to 2^-25, in blocks up to 2^-14: half a step of those
        # and that come to less than 2^-21
        absolute = 2.0**-21 if dtype == "float16" else 2.0**-120
        bound = ErrorBound(
            relative=relative, absolute=absolute, largest=LARGEST[dtype], block=self.block
        )
        return self._payload_bytes(count), scratch_bytes(dtype, count), bound

    def _to_codes(self, source: Words, scales: Words, codes: Words, dtype: str) -> None:
        kernels.to_int8(source, scales, codes, LEAST_STEP)

    def _from_codes(self, scales: Words, codes: Words, out: Words) -> None:
        kernels.from_int8(scales, codes, out.view(np.float32))

    def _check_scales(self, scales: Words, dtype: str) -> None:
        if not ((scales >= LEAST_STEP) & (scales < np.inf)).all():
            raise CodecError(f"codec {self.name}: a step that is no number of {LEAST_STEP} or more")
