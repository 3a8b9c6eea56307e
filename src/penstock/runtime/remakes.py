"""Saved storages that are made again by a recipe when they are needed; see [Note: recipes].

To the executor they are spilled ones, whose bytes no tier has: their ``remake`` makes them. It runs in
the thread that needs them, and what it makes counts against the budget like what a module that is run
again makes (:mod:`.remade`). The first time it is compared with what was dropped, bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Protocol

import torch

from penstock.core.errors import HookError
from penstock.core.locks import Lock
from penstock.observe.recorder import Recorder, Stage
from penstock.runtime.digests import Comparison, digest_of_storage
from penstock.runtime.eviction import Eviction
from penstock.runtime.remade import REMADE, Remaking
from penstock.runtime.storage import Remake, Residency, SavedStorage, TensorRef
from penstock.runtime.table import in_memory
from penstock.runtime.transfers import Transfers
from penstock.store.account import Account

_ADVICE: Final = "give recompute=False, or a plan that does not make it again"


class Maker(Protocol):
    """Knows how storages were made."""

    def remake_of(self, storage: torch.UntypedStorage, version: int) -> Remake | None:
        """How to make this storage again as it is now; ``None``: not known."""
        ...

    def is_making(self, storage: torch.UntypedStorage) -> bool:
        """Return whether it will be known when the call ends that is under way in this thread."""
        ...


class Remakes:
    """Drops and makes again. Thread-safe.

    Attributes:
        maker: Who knows; ``None``: nothing is made again.
    """

    def __init__(
        self, *, transfers: Transfers, eviction: Eviction, budget: Account, recorder: Recorder
    ) -> None:
        """For one executor."""
        self.maker: Maker | None = None
        self._transfers = transfers
        self._lock: Lock = transfers.table.lock
        self._eviction = eviction
        self._budget = budget
        self._recorder = recorder
        self._proven: set[str] = set()

    def drop_saved(self, saved: SavedStorage) -> bool:
        """Drop a storage that has just been saved, now or when the call ends that makes it.

        Returns:
            Whether that can be; else it is to be held like any other.
        """
        maker, storage = self.maker, saved.storage
        if maker is None or storage is None:
            return False
        remake = maker.remake_of(storage, saved.version)
        if remake is None:
            saved.awaits_maker = maker.is_making(storage)
            return saved.awaits_maker
        self._drop(saved, storage, remake)
        return True

    def made(self, storage: torch.UntypedStorage, version: int, remake: Remake) -> None:
        """A call has ended that made a storage: drop what was saved of it meanwhile, if that is wanted.

        Args:
            storage: As it is now.
            version: Of its tensor.
            remake: How to make it again.
        """
        saved = self._transfers.table.entries.get(storage._cdata)
        if saved is None or not saved.awaits_maker or saved.source() is not storage:
            return
        saved.awaits_maker = False
        if saved.version == version:
            self._drop(saved, storage, remake)

    def _drop(self, saved: SavedStorage, storage: torch.UntypedStorage, remake: Remake) -> None:
        """Hold a RESIDENT storage no longer; whoever else has it may keep it."""
        self._transfers.mover.free_early(storage)
        if remake.name not in self._proven:
            remake.digest = digest_of_storage(storage)
        with self._lock:
            if saved.state is not Residency.RESIDENT or saved.writing:
                return
            self._transfers.table.withdraw(saved, storage)
            saved.remake = remake
            saved.state = Residency.SPILLED
            del storage
            self._transfers.table.drop_source(saved)

    def demand(self, saved: SavedStorage) -> torch.UntypedStorage:
        """Make a storage again, for the calling thread; waits for room.

        Raises:
            BudgetError: There can be no room for it.
            HookError: It is not what it was.
            InPlaceError: Something that it is made from has been modified since.
        """
        remake = saved.remake
        assert remake is not None, f"{saved.label} is not made again"
        with remake.lock:
            with self._lock:
                storage = in_memory(saved)
            if storage is not None:
                return storage
            start_ns = self._recorder.clock.now_ns()
            remaking = Remaking(saved.nbytes, take=partial(self._take, saved), budget=self._budget)
            try:
                storage = remake.make().untyped_storage()
                self._prove(saved, remake, storage)
                remaking.made(storage)
            finally:
                remaking.close()
            self._transfers.mover.made(storage)
            with self._lock:
                if saved.state is Residency.SPILLED:
                    saved.state = Residency.RESTORED
                    saved.storage = storage
                    saved.restored = TensorRef(storage)
                    self._transfers.restored[saved] = None
        end_ns = self._recorder.clock.now_ns()
        span = self._recorder.span
        span(Stage.RECOMPUTE, start_ns, end_ns, nbytes=saved.nbytes, slot=remake.name)
        return storage

    def _take(self, saved: SavedStorage, nbytes: int) -> None:
        if not self._budget.try_take(nbytes, REMADE):
            of_pass = saved.of_pass
            self._eviction.take(nbytes, REMADE, name=saved.label, of_pass=of_pass, saved=saved)

    def _prove(self, saved: SavedStorage, remake: Remake, made: torch.UntypedStorage) -> None:
        if made.nbytes() != saved.nbytes:
            raise HookError(
                f"{remake.name} makes {made.nbytes()} bytes when it is called again for {saved.label},"
                f" which had {saved.nbytes}; {_ADVICE}"
            )
        if remake.digest is None:
            return
        if Comparison(remake.digest, digest_of_storage(made)).differ():
            raise HookError(
                f"{remake.name} computes something else when it is called again: {saved.label}, of"
                f" {saved.nbytes} bytes, differs in its bits; {_ADVICE}"
            )
        self._proven.add(remake.name)
