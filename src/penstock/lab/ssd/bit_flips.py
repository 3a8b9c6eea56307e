"""Bit errors in real memory, as a die would pass them to its processing element.

:class:`BitFlips` is called with data that were read: from
:class:`penstock.testing.corrupting_engine.CorruptingEngine`, and with ``OnFlash.wrap_engine`` for the
records of a real optimizer.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.locks import Lock
from penstock.lab.ssd.faults import NO_CODE, Bch

_TOP: Final = np.uint32(0x4000_0000)
"""Highest bit of an exponent, which is set exactly for numbers of 2 or more and for NaN."""
_EXPONENT: Final = np.uint32(0x7F80_0000)


class DieCheck(enum.StrEnum):
    """Check of a die on FP32 words that it has read."""

    NONE = "none"
    NAN = "nan"
    """Clear the top exponent bit where the exponent is all ones (NaN or infinite), like OptimStore."""
    BELOW_TWO = "below-two"
    """Clear the top bit of every exponent, for states that are known to stay below 2."""


class BitFlips:
    """Source of bit errors. Thread-safe; errors depend on the seed and on the order of reads.

    Attributes:
        bits: Number of bits read.
        flipped: Number of bits left wrong by the code.
        caught: Number of words that the check has changed.
    """

    def __init__(
        self, rate: float, *, code: Bch = NO_CODE, check: DieCheck = DieCheck.NONE, seed: int = 1
    ) -> None:
        """Flip each bit with the same probability.

        Args:
            rate: Raw error rate: see :func:`penstock.lab.ssd.faults.raw_rate`.
            code: Code on the way; words with more errors than it corrects stay as they are.
            check: Check after the code.
            seed: Seed of the errors.

        Raises:
            ConfigError: The rate is invalid.
        """
        if not 0 <= rate <= 0.5:
            raise ConfigError(f"a rate of errors is {rate}; it must be 0 to 0.5")
        self._rate = rate
        self._code = code
        self._check = check
        self._random = np.random.default_rng(seed)
        self._lock = Lock()
        self.bits = self.flipped = self.caught = 0

    def __call__(self, address: int, nbytes: int) -> None:
        """Corrupt ``nbytes`` at ``address``, which a check reads as FP32 words."""
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        with self._lock:
            self.bits += 8 * nbytes
            wrong = self._wrong(8 * nbytes)
            self.flipped += wrong.size
        np.bitwise_xor.at(memory, wrong >> 3, (1 << (wrong & 7)).astype(np.uint8))
        if self._check is not DieCheck.NONE:
            self._look(memory[: nbytes - nbytes % 4].view(np.uint32))

    def _wrong(self, bits: int) -> npt.NDArray[np.int64]:
        """Draw the bits that the code leaves wrong; parity bits of a word may be wrong as well."""
        code = self._code
        words = -(-bits // code.data_bits)
        count = int(self._random.binomial(words * code.bits, self._rate))
        at = np.unique(self._random.integers(0, words * code.bits, count))
        word, place = np.divmod(at, code.bits)
        if code.corrects:
            many = np.bincount(word, minlength=words) > code.corrects
            word, place = word[many[word]], place[many[word]]
        found = (word * code.data_bits + place)[place < code.data_bits]
        inside: npt.NDArray[np.int64] = found[found < bits]
        return inside

    def _look(self, words: npt.NDArray[np.uint32]) -> None:
        seen = words & _EXPONENT
        odd = seen == _EXPONENT if self._check is DieCheck.NAN else (words & _TOP) != 0
        found = np.flatnonzero(odd)
        words[found] ^= _TOP
        if found.size:
            with self._lock:
                self.caught += found.size
