"""Device memory of what is made again in backward.

It is taken before a module is run again, and given back when what the module made dies.

Autograd holds these storages, through ``torch.utils.checkpoint``, and not the executor: they are never
moved. But they are resident, so they count against the budget like everything else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import torch

from penstock.core.locks import defer
from penstock.runtime.storage import TensorRef
from penstock.store.account import Account

REMADE: Final = "recomputed"
"""Owner, in the device budget, of storages that are made again."""


class Remaking:
    """The memory of one module that is being run again. Take it first; ``close`` it when it has run."""

    def __init__(self, nbytes: int, *, take: Callable[[int], None], budget: Account) -> None:
        """Take ``nbytes`` by ``take``, which waits for room. Raises BudgetError if there can be none."""
        self._take = take
        self._budget = budget
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        take(nbytes)
        self._left_bytes = nbytes

    def made(self, storage: torch.UntypedStorage) -> bool:
        """Charge a storage until it dies, once. Whether this is the first time that it is said."""
        known = self._made.get(storage._cdata)
        if known is not None and known() is storage:
            return False
        nbytes = storage.nbytes()
        missing = nbytes - self._left_bytes
        if missing > 0:  # more than the first time
            self._take(missing)
            self._left_bytes += missing
        self._left_bytes -= nbytes
        self._made[storage._cdata] = TensorRef(storage)
        weakref.finalize(storage, defer, self._budget.free, nbytes, REMADE).atexit = False
        return True

    def close(self) -> None:
        """The module has run: what was taken and not used is given back. Idempotent."""
        left, self._left_bytes = self._left_bytes, 0
        if left:
            self._budget.free(left, REMADE)
