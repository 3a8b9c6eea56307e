"""Saved storages below the floor: counted, and never moved. Their tensors are held by the handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from penstock.core.locks import Lock
from penstock.core.process import fork_guard
from penstock.core.units import KIB, round_up
from penstock.runtime.storage import Pass, SmallStorage, TensorRef
from penstock.runtime.traffic import SMALL
from penstock.store.account import Account

if TYPE_CHECKING:
    from penstock.runtime.room import Eviction

CREDIT_BYTES: Final = 256 * KIB
"""Taken from the budget at a time for them; so the charge is never below what they hold."""


class SmallStorages:
    """All of them, and what is charged for them.

    Attributes:
        table: By their address: whose it is, ``source`` tells, for addresses are used again.
        nbytes: What they hold.
    """

    def __init__(
        self, *, budget: Account, room: Eviction, lock: Lock, current_pass: Callable[[], Pass]
    ) -> None:
        """Count nothing yet.

        Args:
            budget: The device memory that they are charged to.
            room: Finds room in it.
            lock: The runtime's lock.
            current_pass: The pass that is being saved.
        """
        self.table: dict[int, SmallStorage] = {}
        self.nbytes = 0
        self._taken_bytes = 0
        self._budget = budget
        self._room = room
        self._lock = lock
        self._current_pass = current_pass
        self._guard = fork_guard()

    def save(self, storage: torch.UntypedStorage) -> SmallStorage:
        """Count a storage that stays; once, however many handles it gets.

        Raises:
            BudgetError: It can never fit.
        """
        cdata = storage._cdata
        small = self.table.get(cdata)
        if small is not None and small.source() is storage and small.handles > 0:
            small.handles += 1
            return small
        nbytes = storage.nbytes()
        current = self._current_pass()
        current.small_count += 1
        self.nbytes += nbytes
        current.small_bytes = max(current.small_bytes, self.nbytes)
        if self.nbytes > self._taken_bytes:
            self._take(current)
        small = self.table[cdata] = SmallStorage(cdata, nbytes, TensorRef(storage), 1)
        return small

    def _take(self, current: Pass) -> None:
        """Take for them in advance: one by one would cost more than to save them."""
        missing = self.nbytes - self._taken_bytes
        nbytes = round_up(missing, CREDIT_BYTES)
        if not self._budget.try_take(nbytes, SMALL):
            nbytes = missing
            name = f"{missing} bytes of tensors below the floor"
            try:
                self._room.take(nbytes, SMALL, name=name, of_pass=current, saved=None)
            except BaseException:
                self.nbytes -= missing
                raise
        self._taken_bytes += nbytes

    def release(self, small: SmallStorage) -> None:
        """A handle has died. Call it through ``locks.defer``."""
        if self._guard.in_child:
            return
        with self._lock:
            small.handles -= 1
            if small.handles > 0:
                return
            if self.table.get(small.cdata) is small:
                del self.table[small.cdata]
            self.nbytes -= small.nbytes
            spare = self._taken_bytes - self.nbytes
            if spare > 4 * CREDIT_BYTES or not self.nbytes:
                self._taken_bytes -= spare
                self._budget.free(spare, SMALL)
