"""A random permutation that takes no memory: any element is computed from its place alone.

A Feistel network permutes the numbers of an even number of bits, whatever its round function is (Luby and
Rackoff, SIAM J. Comput. 1988); walking on from a number outside the range until one lies inside makes it
a permutation of exactly ``n`` (Black and Rogaway, CT-RSA 2002). Fewer than four steps are expected.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError

_ROUNDS: Final = 8
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_STIR: Final = np.uint64(0xD6E8FEB86659FD93)
_HALF: Final = np.uint64(32)

Numbers = NDArray[np.int64]


class Permutation:
    """A permutation of ``range(n)``, the same for the same key."""

    def __init__(self, n: int, *key: int | str) -> None:
        """Derive the rounds' keys.

        Args:
            n: How many numbers are permuted, less than 2**62.
            key: Whatever the permutation depends on: a seed, an epoch, ...

        Raises:
            ConfigError: ``n`` is out of range.
        """
        if not 0 <= n < 1 << 62:
            raise ConfigError(f"a permutation of {n} numbers: it must be 0 to 2**62")
        self.n = n
        self._shift = np.uint64(max(1, -(-max(n - 1, 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._shift)) - 1)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, places: Numbers) -> Numbers:
        """Return the numbers at some places, each in ``range(n)``."""
        found = self._once(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self.n)
        while len(outside):
            found[outside] = self._once(found[outside])
            outside = outside[found[outside] >= self.n]
        return found.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._shift, values & self._mask
        for key in self._keys:
            mixed = (right ^ key) * _MIX
            mixed ^= mixed >> _HALF
            mixed *= _STIR
            mixed >>= _HALF
            mixed ^= left
            mixed &= self._mask
            left, right = right, mixed
        values = left << self._shift
        values |= right
        return values
