"""Samples in memory, until whoever asked for them has copied, decoded or handed on what it needs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.locks import Lock, defer
from penstock.data.permutation import Numbers
from penstock.data.ring import ByteRing, Span, Taken

ALIGNED_BYTES: Final = 64
"""Alignment of torch's own memory: with another, kernels may compute other bits."""
LEAST_LENT_BYTES: Final = 16 << 10
"""Less is copied in no more time, and would keep a group from being used again."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleGroup:
    """Samples in memory, until ``free``."""

    samples: Numbers
    offset: Numbers
    """``[samples, fields]``: where in ``ring.bytes``."""
    nbytes: Numbers
    """``[samples, fields]``; -1: the sample lacks the field."""
    file: Numbers
    ring: ByteRing
    taken: Taken
    lock: Lock
    lends: bool
    """True if ``lend`` may be asked: no byte is in two samples, and the ring has room beside it."""
    bad: dict[int, Exception] = field(default_factory=dict)
    """By row: why it could not be read."""

    def lend(self, offset: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Bytes of some rows as an array that outlives the group; see [Note: lent memory] of the ring.

        Nobody may have the same bytes once more, or look at them through the group from now on. None:
        they are to be copied. Thread-safe.
        """
        if (
            not self.lends
            or nbytes < LEAST_LENT_BYTES
            or (self.ring.address + offset) % ALIGNED_BYTES
        ):
            return None
        span = (offset, offset + nbytes)
        with self.lock:
            array = self.ring.lend(self.taken, span)
        back = (_give_back, self.lock, self.ring, self.taken, span)
        weakref.finalize(array, defer, *back).atexit = False
        return array

    def free(self) -> None:
        """Give the memory back, but for what is lent; once."""
        with self.lock:
            self.ring.free(self.taken)


def _give_back(lock: Lock, ring: ByteRing, taken: Taken, span: Span) -> None:
    if ring.guard.in_child:
        return  # the memory is the parent's, and another thread may have held the lock
    with lock:
        ring.give_back(taken, span)
