"""Codec for dense floats: exponents of neighbouring elements in a few bits each, the rest unchanged.

Mantissas are noise, so there is hardly anything to win but the exponents' entropy, which is less than
three of their eight bits. Two ways of the same format serve two needs: ``Exponent``, the codec of
activations and checkpoints, takes codes of four bits wherever they suffice, which is fast; records of
optimizers (:mod:`penstock.optim.squeeze`), for which flash is the limit, take three where that is fewer
bytes. ``benchmarks/micro/codecs.py`` measures the codec beside blosc2, zstd and lz4, and on what networks
save; ``benchmarks/micro/packing.py`` measures both ways on states of optimizers.

[Note: format exponent]
    Elements have ``w`` bytes, 2 (bfloat16) or 4 (float32): a sign, 8 bits of exponent, a mantissa. Whole
    blocks of 512 elements are encoded. A payload is the heads of all blocks, then their bodies, then the
    elements behind the last whole block, as they are. All numbers are little-endian.

    A head is u8 kind, u8 greatest top, u16 number of exceptions. Kinds are 0 raw, 1 zeros, 2 and 3 codes
    of three bits, 4 and 5 codes of four bits. In kinds 2 and 4 elements are rotated left by one bit, so
    that the exponent is the highest byte, the *top*, and the sign the lowest bit. In kinds 3 and 5, which
    a block has where no element has a sign, they are not: the top is seven bits of the exponent, and a
    code stands for two binades. ``base`` is the greatest top less 7 (three bits) or 15 (four bits), but
    0 at least. A code ``c`` from 1 on is the top ``base + c``. A body is

    - of zeros: nothing; of raw: the elements, ``512 * w`` bytes;
    - of all others: 512 bytes, of each element the byte below the top; of float32, then, 512 u16, of
      each element the lower 16 bits; then the codes and the exceptions.
    - Four bits: 256 bytes, with the codes of elements ``i`` in the low and ``256 + i`` in the high four
      bits of byte ``i``. Code 0 is the top 0. There are no exceptions.
    - Three bits: three planes of 64 bytes; the codes of elements ``i``, ``i + 64``, ..., ``i + 448`` are
      the 24 bits of bytes ``i`` of the planes, from the lowest bit of the first plane on. The tops of
      elements with code 0, *exceptions*, stand behind: those of elements ``i``, ``i + 64``, ... before
      those of ``i + 1``. A byte 0 makes their number even; a reader ignores it. There are as many as the
      head says, 318 at most; in normally distributed elements one in thirty is one.

    Heads of raw and zeros have 0 for the greatest top. Anything else is damage.

Not for float16 and float64, whose exponents are not of 8 bits: one bit in sixteen and seven in sixty-four
are not worth a second format.
"""

from __future__ import annotations

from penstock.codec.base import Bytes, Codec, Fidelity, Words
from penstock.codec.kernels import exponent as kernels
from penstock.core.errors import CodecError

__all__ = ["Exponent"]


class Exponent(Codec):
    """Codec of exponents in three or four bits, the rest unchanged. Lossless; bfloat16 and float32."""

    name = "exponent"
    id = 11
    dtypes = frozenset({"bfloat16", "float32"})
    fidelity = Fidelity.EXACT

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        length = int(kernels.encode(words, payload, False))
        return None if length < 0 else length

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        place = int(kernels.decode(payload, words))
        if place >= 0:
            raise CodecError(
                f"codec {self.name}: a payload of {payload.size} bytes for {words.size} {dtype} is"
                f" damaged at byte {place}"
            )
