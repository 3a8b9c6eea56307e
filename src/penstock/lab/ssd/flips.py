"""Wrong bits put into real memory, as a die would hand them to its processing element.

:class:`Flips` is called with what has been read: it goes into :class:`penstock.io.spoiled.SpoiledEngine`,
and with ``penstock.optim.through`` into the records of a real optimizer.
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
"""The highest bit of an exponent: it is set if and only if a number is 2 or more, or none."""
_EXPONENT: Final = np.uint32(0x7F80_0000)


class Check(enum.StrEnum):
    """What a die looks at in words of FP32 that it has read."""

    NONE = "none"
    NAN = "nan"
    """Where the exponent is all ones (a NaN, or infinite) its top bit is cleared, as OptimStore does."""
    BELOW_TWO = "below-two"
    """The top bit of every exponent is cleared: for states that are known to stay below 2."""


class Flips:
    """Spoils memory. Thread-safe; what is flipped depends on the seed and on the order of reads.

    Attributes:
        bits: That were read.
        flipped: Of these, how many were left wrong by the code.
        caught: Words that the check has changed.
    """

    def __init__(
        self, rate: float, *, code: Bch = NO_CODE, check: Check = Check.NONE, seed: int = 1
    ) -> None:
        """Flip each bit with the same probability.

        Args:
            rate: Of raw errors: see :func:`penstock.lab.ssd.faults.raw_rate`.
            code: What corrects on the way; words with more errors than it corrects stay as they are.
            check: What is looked at after that.
            seed: Of what is random.

        Raises:
            ConfigError: A rate that is none.
        """
        if not 0 <= rate <= 0.5:
            raise ConfigError(f"a rate of errors is {rate}, it must be 0 to 0.5")
        self._rate = rate
        self._code = code
        self._check = check
        self._random = np.random.default_rng(seed)
        self._lock = Lock()
        self.bits = self.flipped = self.caught = 0

    def __call__(self, address: int, nbytes: int) -> None:
        """Spoil ``nbytes`` at ``address``, which are FP32 words, as far as a check looks at them."""
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        with self._lock:
            self.bits += 8 * nbytes
            wrong = self._wrong(8 * nbytes)
            self.flipped += wrong.size
        np.bitwise_xor.at(memory, wrong >> 3, (1 << (wrong & 7)).astype(np.uint8))
        if self._check is not Check.NONE:
            self._look(memory[: nbytes - nbytes % 4].view(np.uint32))

    def _wrong(self, bits: int) -> npt.NDArray[np.int64]:
        """Which bits the code leaves wrong; a word's parity may be wrong as well."""
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
        odd = seen == _EXPONENT if self._check is Check.NAN else (words & _TOP) != 0
        found = np.flatnonzero(odd)
        words[found] ^= _TOP
        if found.size:
            with self._lock:
                self.caught += found.size
