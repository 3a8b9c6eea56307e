"""Reads of spilled storages: ahead, as far as the window allows, or while backward waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

import torch

from penstock.core.errors import BudgetError, ClosedError, PenstockError, RestoreError
from penstock.io.engine import Priority
from penstock.observe.recorder import Recorder, Stage, StallCause
from penstock.runtime.active_orders import ActiveOrders
from penstock.runtime.eviction import Eviction
from penstock.runtime.storage import Residency, SavedStorage
from penstock.runtime.table import in_memory
from penstock.runtime.transfers import Transfers, session_closed


class Reads:
    """Begins reads. Thread-safe; called without the runtime's lock."""

    def __init__(
        self,
        *,
        active: ActiveOrders,
        transfers: Transfers,
        eviction: Eviction,
        recorder: Recorder,
        restored_bytes: Callable[[], int],
    ) -> None:
        """Read nothing yet.

        Args:
            active: Order of need, read window and triggers.
            transfers: Moves the bytes.
            eviction: Finds room for demanded storages.
            recorder: Receives spans of waits.
            restored_bytes: Returns the device memory in use for restored storages.
        """
        self._active = active
        self._transfers = transfers
        self._eviction = eviction
        self._recorder = recorder
        self._restored_bytes = restored_bytes

    def demand(self, saved: SavedStorage) -> torch.UntypedStorage:
        """Read a storage from a tier while the caller waits; return it.

        Raises:
            RestoreError: They cannot be read back.
            BudgetError: There can be no room for them.
            ClosedError: The session is closed.
        """
        start_ns = self._recorder.clock.now_ns()
        cause = StallCause.LATE
        while True:
            with self._transfers.table.lock:
                storage = in_memory(saved)
                transfer = saved.read if saved.state is Residency.READING else None
            if storage is not None:
                break
            if self._transfers.closed:
                raise session_closed(saved.label)
            try:
                if transfer is not None:
                    transfer.promote(Priority.DEMAND)
                    transfer.wait()
                else:
                    cause = StallCause.DEMAND
                    self._begin_demand(saved)
            except torch.OutOfMemoryError as error:  # the device has no memory for a frame
                self._recorder.count("device.out_of_memory")
                if not self._makes_room(saved):
                    raise error from None
            except (CancelledError, ClosedError, OSError) as error:
                raise self._restore_error(saved, error) from error
            except PenstockError as error:
                if isinstance(error, MemoryError):
                    raise
                raise self._restore_error(saved, error) from error
        if cause is StallCause.DEMAND:
            self._recorder.count("prefetch.missed")
        self._eviction.stalled(start_ns, cause, saved.label)
        now_ns = self._recorder.clock.now_ns()
        saved.record.waited_ns += now_ns - start_ns
        self._recorder.span(Stage.UNPACK, start_ns, now_ns, nbytes=saved.nbytes, slot=saved.label)
        return storage

    def _makes_room(self, saved: SavedStorage) -> bool:
        """Evict something else; return False if nothing is left to evict."""
        try:
            return self._eviction.make(
                saved.nbytes, name=saved.label, of_pass=saved.of_pass, saved=saved
            )
        except BudgetError:
            return False

    def _begin_demand(self, saved: SavedStorage) -> None:
        transfers = self._transfers
        if transfers.fetch(saved, Priority.DEMAND):
            self.ahead(saved, again=saved.pending <= 0)
            return
        needed = transfers.mover.charge_bytes(saved.ticket)
        if not self._eviction.make(needed, name=saved.label, of_pass=saved.of_pass, saved=saved):
            transfers.fetch(saved, Priority.DEMAND, force=True)

    def ahead(self, saved: SavedStorage, *, again: bool) -> None:
        """Begin to read what is needed after ``saved``, as far as the window allows.

        Args:
            saved: The storage that is being unpacked.
            again: Whether its graph has been walked before, so that nothing is pending in it.
        """
        of_pass = saved.of_pass
        orders, transfers = self._active.orders, self._transfers
        with transfers.table.lock:
            of_pass.arrive(saved, orders.ranks)
            if orders.triggers:
                place = orders.ranks.get(saved.key.match_key, -1)
                of_pass.place = max(of_pass.place, place)
        while True:
            with transfers.table.lock:
                following = of_pass.next_spilled(again=again)
            if following is None or transfers.closed:
                return
            key, triggers = following.record.key, orders.triggers
            if triggers and triggers.get(key.match_key, -1) > of_pass.place:
                return
            if not self._window_allows(following):
                of_pass.window_full = True
                return
            if not transfers.fetch(following, Priority.PREFETCH):
                return

    def _window_allows(self, saved: SavedStorage) -> bool:
        window = self._active.orders.window_bytes
        if window is None:
            return True
        needed = self._transfers.mover.target_bytes(saved.ticket)
        return self._restored_bytes() + needed <= window

    def _restore_error(self, saved: SavedStorage, error: BaseException) -> PenstockError:
        if self._transfers.closed:
            return session_closed(saved.label)
        return RestoreError(f"cannot restore {saved.label} for its backward: {error}")
