"""Store the exponents of neighbours in four bits each, and everything else as it is: for dense floats.

[Note: format byteplane]
    Elements have ``w`` bytes, 2 (bfloat16) or 4 (float32): a sign, 8 bits of exponent, a mantissa. Every
    whole block of 512 elements is a head of two bytes and a body; behind all blocks are the elements
    that make none, as they are. The head is u8 kind and u8 greatest exponent of the block.

    - Kind 0, raw: the greatest exponent MUST be given as 0; the body is the elements, ``512 * w`` bytes.
    - Kind 1, packed: 256 bytes with the codes of elements ``i`` in the low and ``256 + i`` in the high
      four bits of byte ``i``; 512 bytes with each element's sign in the highest bit and the highest
      seven bits of its mantissa below; then for float32 the lowest byte of every element, and the next
      lowest of every element. Code 0 is exponent 0, thus zeros; code ``c`` from 1 on is the exponent
      ``c + greatest - 15``, modulo 256.

    Any other kind, and any other length, is damage. A block is packed if and only if all its exponents
    have codes, which take float32 to 0.88 and bfloat16 to 0.76 of its bytes.

Mantissas are noise, so that there is hardly anything to win but the exponent's entropy.
``benchmarks/micro/codecs.py`` measures this codec beside blosc2, zstd and lz4 on dense float32, and on
what networks save; the figures are in ``benchmarks/results/codecs.json``.

Not for float16 and float64, whose exponents are not of 8 bits: one bit in sixteen and seven in sixty-four
are not worth a second format.
"""

from __future__ import annotations

from penstock.codec.base import Bytes, Codec, Fidelity, Words
from penstock.codec.kernels import byteplane as kernels
from penstock.core.errors import CodecError

__all__ = ["BytePlane"]


class BytePlane(Codec):
    """Exponents in four bits, everything else as it is. Lossless; bfloat16 and float32."""

    name = "byteplane"
    id = 5
    dtypes = frozenset({"bfloat16", "float32"})
    fidelity = Fidelity.EXACT

    def _encode(self, words: Words, payload: Bytes, dtype: str) -> int | None:
        length = int(kernels.encode(words, payload))
        return None if length < 0 else length

    def _decode(self, payload: Bytes, words: Words, dtype: str) -> None:
        place = int(kernels.decode(payload, words))
        if place >= 0:
            raise CodecError(
                f"codec {self.name}: a payload of {payload.size} bytes for {words.size} {dtype} is"
                f" damaged at byte {place}"
            )
