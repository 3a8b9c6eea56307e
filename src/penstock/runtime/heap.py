"""The process's own heap as memory for what comes back, where the C library keeps what is freed.

[Note: heap or arena]
    What comes back rests in an arena, whose idle pages count against the budget. So whenever forward
    needs the budget they are given back to the system, and backward takes new ones, every step. The
    system zeroes a page in microseconds, but where a virtual machine returns free pages to its host, a
    page that was free for a second takes fifty times as long (``penstock doctor`` tells).

    There it is best to have the C library keep what is freed, and tensors that die in forward leave it as
    much memory as backward needs. So where it was told to (glibc's ``MALLOC_MMAP_THRESHOLD_`` and
    ``MALLOC_TRIM_THRESHOLD_``, both of a gibibyte or more), what comes back goes into the same heap: no
    new pages in the steady state, and nothing idle is held besides. Where the C library gives large
    blocks back at once, each of them would be new pages, so there it is the arena.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core import knobs
from penstock.core.errors import ClosedError, ConfigError
from penstock.core.locks import Lock, defer
from penstock.core.process import fork_guard
from penstock.core.units import GIB, round_up
from penstock.io.mapping import PAGE_BYTES
from penstock.store.account import Account

_KEEPS: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables that glibc reads when the process starts."""


def heap_is_better() -> bool:
    """Return whether to restore into the heap: as ``PENSTOCK_RESTORE_INTO`` says, or see above."""
    choice = knobs.restore_into()
    if choice != "auto":
        return choice == "heap"
    texts = [os.environ.get(name, "") for name in _KEEPS]
    return all(text.isdigit() and int(text) >= GIB for text in texts)


class HeapBlock:
    """Memory of a heap that begins at a page. Its holder must ``free`` it, or ``lend`` it, once.

    Attributes:
        address: Where it begins.
        nbytes: How long it is.
    """

    __slots__ = ("_heap", "_out", "_storage", "address", "nbytes")

    def __init__(self, heap: Heap, storage: torch.UntypedStorage, nbytes: int) -> None:
        """For the heap."""
        self._heap = heap
        self._storage: torch.UntypedStorage | None = storage
        self._out = True
        self.address = round_up(storage.data_ptr(), PAGE_BYTES)
        self.nbytes = nbytes

    def free(self) -> None:
        """Return the memory. Raises ClosedError if it was freed or lent before."""
        self._hand_over()
        self._return()

    def lend(self, skew: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes ``[skew, skew + nbytes)`` as an array whose death frees the block. No copy.

        Raises:
            ConfigError: The range does not lie in the block.
            ClosedError: The block was freed or lent before.
        """
        if skew < 0 or nbytes <= 0 or skew + nbytes > self.nbytes:
            raise ConfigError(f"{nbytes} bytes at {skew} do not lie in a block of {self.nbytes}")
        self._hand_over()
        buffer = (ctypes.c_uint8 * nbytes).from_address(self.address + skew)
        array: NDArray[np.uint8] = np.frombuffer(memoryview(buffer), np.uint8)
        weakref.finalize(array, defer, self._return).atexit = False
        return array

    def _hand_over(self) -> None:
        if not self._out:
            raise ClosedError(f"a block of {self.nbytes} bytes was freed or lent before")
        self._out = False

    def _return(self) -> None:
        self._storage = None
        self._heap._give_back(self.nbytes)


class Heap:
    """Takes blocks from torch's allocator, under a byte budget, as an ``Arena`` does. Thread-safe.

    Nothing idle is held: what is used, what is charged and what is touched are the same.

    Attributes:
        touch_ns_per_byte: Nothing: what is freed stays touched.
    """

    touch_ns_per_byte: Final = 0.0

    def __init__(self, *, budget: Account, owner: str) -> None:
        """Hold nothing yet.

        Args:
            budget: What blocks are charged to.
            owner: As which they are.
        """
        self._budget = budget
        self._owner = owner
        self._lock = Lock()
        self._used_bytes = 0
        self._guard = fork_guard()

    @property
    def used_bytes(self) -> int:
        """Bytes that blocks hold, and are charged for, now."""
        return self._used_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes resident, and charged to the budget, now."""
        return self._used_bytes

    @staticmethod
    def charge_bytes(nbytes: int) -> int:
        """Return a block's charge to the budget: a page more, since it begins at a page."""
        return nbytes + PAGE_BYTES

    def allocate(self, nbytes: int) -> HeapBlock | None:
        """Take ``nbytes``, contents undefined, from where a page begins; ``None`` if the budget refuses.

        Raises:
            ConfigError: ``nbytes`` is not positive.
            ClosedError: This process was forked from the heap's maker.
            MemoryError: The system has no such memory.
        """
        if nbytes <= 0:
            raise ConfigError(f"a block of {nbytes} bytes cannot be allocated")
        if self._guard.in_child:
            raise self._guard.error("this memory", "open a session here")
        charge = self.charge_bytes(nbytes)
        if not self._budget.try_take(charge, self._owner):
            return None
        try:
            storage = torch.UntypedStorage(charge)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # as torch says it
            self._budget.free(charge, self._owner)
            raise MemoryError(f"no memory for {nbytes} bytes that come back: {error}") from error
        with self._lock:
            self._used_bytes += charge
        return HeapBlock(self, storage, nbytes)

    def trim(self, nbytes: int | None = None) -> int:
        """Nothing is idle: 0."""
        return 0

    def close(self) -> None:
        """Each block goes when it is freed; nothing else is held."""

    def _give_back(self, nbytes: int) -> None:
        if self._guard.in_child:
            return  # the account is the parent's, and another thread may have held its lock
        charge = self.charge_bytes(nbytes)
        with self._lock:
            self._used_bytes -= charge
        self._budget.free(charge, self._owner)
