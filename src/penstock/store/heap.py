"""Pool on the C library's heap, for processes whose C library keeps what is freed.

[Note: heap or arena]
    Restored storages lie in an arena, whose idle pages count against the budget. So whenever forward
    needs the budget, these pages are freed, and backward takes new ones, every step. The system zeroes
    a page in microseconds, but where a virtual machine returns free pages to its host, a page that was
    free for a second takes fifty times as long (``penstock doctor`` measures it).

    There it is best that the C library keeps what is freed: tensors that die in forward leave as much
    memory as backward needs. So where it is set to keep it (glibc's ``MALLOC_MMAP_THRESHOLD_`` and
    ``MALLOC_TRIM_THRESHOLD_``, both of a gibibyte or more), storages are restored into the same heap: no
    new pages in the steady state, and no idle ones either. Where the C library returns large blocks to
    the system at once, each block would be new pages, so there it is the arena.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from penstock.core import knobs
from penstock.core.errors import ConfigError
from penstock.core.units import GIB, round_up
from penstock.io.mapping import PAGE_BYTES
from penstock.store.account import Account
from penstock.store.pool import Block, Pool

_KEEPS: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Environment variables that glibc reads when the process starts."""
_malloc: Final = ctypes.pythonapi.PyMem_RawMalloc  # the C library's, but seen by tracemalloc
_malloc.restype = ctypes.c_void_p
_malloc.argtypes = (ctypes.c_size_t,)
_free: Final = ctypes.pythonapi.PyMem_RawFree
_free.restype = None
_free.argtypes = (ctypes.c_void_p,)


def heap_is_better() -> bool:
    """Return True if storages go into the heap: by ``PENSTOCK_RESTORE_INTO``, or see above."""
    choice = knobs.restore_into()
    if choice != "auto":
        return choice == "heap"
    texts = [os.environ.get(name, "") for name in _KEEPS]
    return all(text.isdigit() and int(text) >= GIB for text in texts)


class Heap(Pool):
    """Pool that takes each block from the C library. Nothing idle is held, so nothing is to be trimmed.

    What is used and what is touched differ by a page for each block, since a block begins at a page.
    """

    def __init__(self, *, account: Account | None = None, owner: str = "heap") -> None:
        """Hold nothing yet; see ``Pool``."""
        super().__init__(account, owner)

    def charge_bytes(self, nbytes: int) -> int:
        """Return a block's charge to the account: a page more, since it begins at a page."""
        return nbytes + PAGE_BYTES

    def _allocate(self, nbytes: int, alignment: int, force: bool) -> Block | None:
        if alignment > PAGE_BYTES:
            raise ConfigError(f"blocks of {self!r} begin at pages, not at multiples of {alignment}")
        charge = self.charge_bytes(nbytes)
        if not self.account.try_take(charge, self.owner):
            if not force:
                return None
            self.account.force(charge, self.owner)
        memory = _malloc(charge)
        if not memory:
            self.account.free(charge, self.owner)
            raise MemoryError(f"the system has no memory for {nbytes} bytes of {self.owner}")
        with self._lock:
            self._used_bytes += nbytes
            self._touched_bytes += charge
        return Block(self, memory, round_up(memory, PAGE_BYTES), nbytes)

    def _release(self, block: Block) -> int:
        _free(block.place)
        charge = self.charge_bytes(block.nbytes)
        self._touched_bytes -= charge
        return charge
