"""Transfers of saved storages between device memory and tiers, and their states meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, Final, Protocol

import torch

from penstock.core.errors import (
    BudgetError,
    ClosedError,
    NoSpaceError,
    PenstockError,
    RestoreError,
    SourceChangedError,
    TransferError,
)
from penstock.core.units import format_bytes
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder, Stage, StallCause
from penstock.runtime.active_orders import ActiveOrders
from penstock.runtime.movers import Mover, Transport
from penstock.runtime.storage import Encoding, Pass, Residency, SavedStorage, TensorRef
from penstock.runtime.table import StorageTable, in_memory, is_edited, is_settled
from penstock.store.account import Account
from penstock.store.base import Tier

LATEST_SHARE: Final = 0.25
"""Weight of the latest write in the running mean of the time that writes take."""
EDIT_PATIENCE_S: Final = 0.05
"""Longest wait for the new version of a storage that was changed while it was written."""


class Transfers:
    """Writes and reads saved storages, and keeps their states. Thread-safe.

    Attributes:
        table: Saved storages, with the runtime's lock.
        writing: Writes under way.
        writing_bytes: Bytes of the storages that they free.
        write_ns_per_byte: Running mean of the time from the beginning of a write to its end.
        reading: Reads under way.
        restored: Storages in the state RESTORED.
        active: Orders in force; they have encodings for storages that no tier has room for.
        transport: Writes, reads and discards: the mover, or the encoding stage in front of it.
        failed: True once a tier has refused or lost a write.
        closed: True once the session is closed: nothing moves any more.
    """

    def __init__(
        self,
        *,
        table: StorageTable,
        tiers: dict[str, Tier],
        mover: Mover,
        budget: Account,
        active: ActiveOrders,
        recorder: Recorder,
    ) -> None:
        """Move nothing yet. ``budget`` is the device's."""
        self.table = table
        self._lock = table.lock
        self._changed = table.changed
        self.writing = 0
        self.writing_bytes = 0
        self.write_ns_per_byte = 0.0
        self.reading = 0
        self.restored: dict[SavedStorage, None] = {}
        self.failed = False
        self._told_of_change = False
        self.closed = False
        self.tiers = tiers
        self.mover = mover
        self.transport: Transport = mover
        self.active = active
        self._budget = budget
        self._recorder = recorder

    # -- out --------------------------------------------------------------------------------------

    def spill(self, saved: SavedStorage, first_tier: str, encoding: Encoding | None = None) -> None:
        """Begin to write a RESIDENT storage to ``first_tier``, or to another if that is full.

        Nothing happens while something may still write it.
        """
        storage = saved.storage
        if storage is not None and not self.mover.frees(storage):
            self._keep_graph_memory(saved)
            return
        del storage
        if encoding is None and self.active.shortage:
            encoding = self.active.fallback_encoding(saved.record)
        with self._lock:
            storage = saved.storage
            if saved.state is not Residency.RESIDENT or storage is None or saved.writing:
                return
            if not is_settled(saved):
                return
            self.table.withdraw(saved, storage)
            saved.stuck = False
            saved.state = Residency.WRITING
            saved.writing = True
            saved.encoding = encoding
            self.writing += 1
            self.writing_bytes += saved.nbytes
            del storage
        self._write(saved, self._order(first_tier))

    def _write(self, saved: SavedStorage, tiers: list[Tier], *, full: bool = False) -> None:
        """Write a WRITING storage to the first of ``tiers`` that takes it.

        Args:
            saved: The storage.
            tiers: Tiers that have not refused it. If all do, and the last one is full, all are asked
                again for an encoded storage, where there is an encoding for it.
            full: Whether the last tier that was asked is full.
        """
        while True:
            encoding = None
            if full and not tiers and saved.encoding is None:
                encoding = self.active.encoding_when_refused(saved.record)
            with self._lock:
                storage = saved.storage
                if saved.state is not Residency.WRITING or storage is None:
                    self._fail_write(saved, stuck=False)  # it was needed, or it is dead
                    return
                if encoding is not None:
                    saved.encoding, tiers = encoding, self._order("")
                if not tiers:
                    saved.refused_at_bytes = self.held_bytes if full else -1
                    self._fail_write(saved)
                    return
            tier, *tiers = tiers
            start_ns = self._recorder.clock.now_ns()
            try:
                ticket = self.transport.write(storage, tier, saved.label, encoding=saved.encoding)
            except TransferError as error:  # full, most often; or the file cannot even be made
                full = isinstance(error, NoSpaceError)
                self._note_failure(f"spill.full.{tier.spec.name}", saved, error)
                # its frames hold the handle, and a tier may hold the error
                error.__traceback__ = None
                continue
            except BaseException:  # Ctrl-C, for example: waits for writes must not include this one
                with self._lock:
                    self._fail_write(saved, stuck=False)
                raise
            with self._lock:
                saved.ticket, saved.tier = ticket, tier
                saved.of_pass.spilled = True
            del storage  # or this frame would keep it alive when the write is done
            ticket.written.add_done_callback(partial(self._written, saved, start_ns, tiers))
            return

    def can_spill(self, saved: SavedStorage) -> bool:
        """Return whether a RESIDENT storage can be spilled, as far as is known. Under the lock."""
        return not saved.stuck or self.held_bytes < saved.refused_at_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that tiers hold."""
        return sum(tier.held_bytes for tier in self.tiers.values())

    @property
    def restored_bytes(self) -> int:
        """Device memory in use for restored storages, without an arena's idle pages."""
        return self.mover.used_bytes(self._budget)

    def usage(self) -> str:
        """Return how full the tiers are, as text for errors."""
        return ", ".join(
            f"{name} holds {format_bytes(tier.held_bytes)} of {format_bytes(tier.spec.capacity_bytes)}"
            for name, tier in self.tiers.items()
        )

    def _order(self, first: str) -> list[Tier]:
        names = [first, *(name for name in self.tiers if name != first)]
        return [self.tiers[name] for name in names if name in self.tiers]

    def _written(
        self, saved: SavedStorage, start_ns: int, others: list[Tier], transfer: Transfer
    ) -> None:
        """Handle the end of a write, in a worker of the engine or in the thread that cancelled it.

        ``others`` are the tiers that were not asked: lengths of frames are known late, so a tier may turn
        out to be full only when some of them are written.
        """
        error = transfer.error
        self._await_edit(saved, error)
        taken = (self._recorder.clock.now_ns() - start_ns) / saved.nbytes
        full = isinstance(error, NoSpaceError)
        ticket = None
        changed = False
        with self._lock:
            if error is None:
                self.write_ns_per_byte += (taken - self.write_ns_per_byte) * LATEST_SHARE
            if saved.state is Residency.DEAD:  # its charge and ticket were left to this write
                ticket, saved.ticket = saved.ticket, None
                self.table.free(saved.nbytes)
                self._end_write(saved)
                full = False
            elif error is not None:
                ticket, saved.ticket = saved.ticket, None
                waits = saved.state is Residency.WRITING  # it has not been needed meanwhile
                full = full and waits
                if not full:
                    # else a kernel of backward may have: oneDNN's LSTM writes to what it has saved
                    changed = (
                        waits and isinstance(error, SourceChangedError) and not is_edited(saved)
                    )
                    broken = isinstance(error, OSError) and not isinstance(error, NoSpaceError)
                    self._fail_write(saved, stuck=broken or changed)
            else:
                if saved.encoding is not None:
                    saved.record.frame_bytes = getattr(saved.ticket, "frame_bytes", None)
                if saved.state is Residency.WRITING:
                    saved.state = Residency.SPILLED
                    self.table.drop_source(saved)
                # else it was needed meanwhile: it stays, a later spill is free
                self._end_write(saved)
        if ticket is not None:
            self.transport.discard(saved.tier, ticket)
        if isinstance(error, OSError):
            self._note_failure(f"spill.failed.{saved.tier.spec.name}", saved, error)
        elif changed:
            assert isinstance(error, SourceChangedError)
            self._told_of_change = True
            self._note_failure("spill.source_changed", saved, error)
        if full:
            self._write(saved, others, full=True)

    def _await_edit(self, saved: SavedStorage, error: BaseException | None) -> None:
        """Wait until an operator that is changing a WRITING storage in place gives it its new version.

        An operator does that when its kernel is over. Called without the lock, in a worker of the engine;
        no longer once there was a change that autograd does not know, since others are only counted.
        """
        if self._told_of_change or not isinstance(error, SourceChangedError):
            return
        end = time.monotonic() + EDIT_PATIENCE_S
        while saved.state is Residency.WRITING and not is_edited(saved) and time.monotonic() < end:
            time.sleep(0.0005)

    def _end_write(self, saved: SavedStorage) -> None:
        saved.writing = False
        self.writing -= 1
        self.writing_bytes -= saved.nbytes
        self._changed.notify_all()

    def _fail_write(self, saved: SavedStorage, *, stuck: bool = True) -> None:
        """End a write that has failed or is not wanted any more. Under the lock."""
        if saved.state is Residency.DEAD:  # its charge was left to this write
            self.table.free(saved.nbytes)
        elif stuck:
            saved.stuck = self.failed = True
        if saved.state is Residency.WRITING:
            saved.state = Residency.RESIDENT
        self._end_write(saved)

    def _keep_graph_memory(self, saved: SavedStorage) -> None:
        """Keep a storage whose memory would not be freed; the next plan keeps its slot, too."""
        with self._lock:
            saved.stuck, saved.refused_at_bytes = True, -1
            saved.record.held_elsewhere = True
        self._recorder.count("kept.graph_memory")
        first = self._recorder.warn(
            "kept.graph_memory",
            f"{saved.label} stays: it is memory of a CUDA graph (torch.compile with"
            ' mode="reduce-overhead", or torch.cuda.graph) or of another torch.cuda.MemPool, which'
            " gives it to nobody else; compile without CUDA graphs what is to be offloaded; further"
            " ones are only counted",
        )
        if first:
            self._recorder.mark("graph_memory", slot=saved.label, nbytes=saved.nbytes)

    # -- back -------------------------------------------------------------------------------------

    def fetch(self, saved: SavedStorage, priority: Priority, *, force: bool = False) -> bool:
        """Begin to read a SPILLED storage; False if there is no room for it.

        Args:
            saved: What to read; nothing happens in any other state.
            priority: DEMAND if a thread waits for it.
            force: Exceed the budget if need be.
        """
        with self._lock:
            if saved.state is not Residency.SPILLED:
                return True
            ticket = saved.ticket
        target = self.mover.allocate(ticket, force=force)  # may take long on a device
        if target is None:
            return False
        with self._lock:
            ours = saved.state is Residency.SPILLED
            if ours:
                try:
                    transfer = self.transport.read(saved.tier, ticket, target, priority)
                except PenstockError:  # not of a signal's handler: the read may have begun
                    self.mover.drop(target)
                    raise
                saved.state = Residency.READING
                saved.target, saved.read = target, transfer
                self.reading += 1
        if ours:
            transfer.add_done_callback(partial(self._arrived, saved))
        else:  # another thread was quicker, or its last handle has died
            self.mover.drop(target)
        return True

    def _arrived(self, saved: SavedStorage, transfer: Transfer) -> None:
        """Handle the end of a read, in a worker of the engine."""
        with self._lock:
            self.reading -= 1
            target, saved.target, saved.read = saved.target, None, None
            if saved.state is Residency.DEAD:
                self.mover.drop(target)
            elif transfer.error is not None:
                self.mover.drop(target)
                saved.state = Residency.SPILLED
            else:
                saved.state = Residency.RESTORED
                saved.storage = self.mover.finish(target)
                saved.restored = TensorRef(saved.storage)
                self.restored[saved] = None
            self._changed.notify_all()

    def retire(self, saved: SavedStorage) -> None:
        """Drop the reference to a RESTORED storage: its users keep it alive. Under the lock."""
        del self.restored[saved]
        saved.state = Residency.SPILLED
        saved.storage = None

    # -- end --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until nothing is being written or read."""
        with self._lock:
            while self.writing or self.reading:
                self._changed.wait()

    def free(self, saved: SavedStorage) -> Any | None:
        """Free a storage without handles. Under the lock; from finalizers, by ``defer``.

        Returns:
            A ticket for ``discard``, once the lock is released.
        """
        ticket = saved.ticket
        if saved.state in (Residency.RESIDENT, Residency.WRITING):
            saved.storage = None
            if not saved.writing:
                self.table.free(saved.nbytes)
        elif saved.state is Residency.RESTORED:
            self.retire(saved)
        saved.state = Residency.DEAD
        saved.of_pass.remove(saved)
        if self.writing or self.reading:
            self._changed.notify_all()
        return ticket

    def discard(self, saved: SavedStorage, ticket: Any) -> None:
        """Discard the ticket of a storage that was freed; a write under way does it when it ends."""
        if saved.writing:
            ticket.written.cancel()
        elif saved.ticket is ticket:
            saved.ticket = None
            self.transport.discard(saved.tier, ticket)

    # -- failures ---------------------------------------------------------------------------------

    def _note_failure(
        self, counter: str, saved: SavedStorage, error: OSError | SourceChangedError
    ) -> None:
        self.failed = True
        self._recorder.count(counter)
        self._recorder.mark("spill_failed", slot=saved.label, error=str(error))
        self._recorder.warn(
            counter,
            f"{saved.label} cannot be spilled, it goes to another tier or stays in memory: {error};"
            " further failures of this kind are only counted",
        )


class RoomMaker(Protocol):
    """Frees device memory for reads that backward waits for: ``Eviction``, which is above this module."""

    def make(self, nbytes: int, *, name: str, of_pass: Pass, saved: SavedStorage | None) -> bool:
        """Take one step towards ``nbytes`` of free budget; return False if it must be exceeded."""

    def stalled(self, start_ns: int, cause: StallCause, name: str) -> None:
        """Account for a wait that ends now."""


class Reads:
    """Begins reads. Thread-safe; called without the runtime's lock.

    They are not in a ``TransferWindow``: that completes transfers in the order in which they began, and
    counts bytes in flight. Here a read completes when its storage is asked for, and its memory counts
    until backward and the program have dropped it. So the window is a limit of ``restored_bytes``.
    """

    def __init__(
        self,
        *,
        active: ActiveOrders,
        transfers: Transfers,
        eviction: RoomMaker,
        recorder: Recorder,
    ) -> None:
        """Read nothing yet.

        Args:
            active: Order of need, read window and triggers.
            transfers: Moves the bytes.
            eviction: Finds room for demanded storages.
            recorder: Receives spans of waits.
        """
        self._active = active
        self._transfers = transfers
        self._eviction = eviction
        self._recorder = recorder

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
        try:
            if not self._eviction.make(
                needed, name=saved.label, of_pass=saved.of_pass, saved=saved
            ):
                transfers.fetch(saved, Priority.DEMAND, force=True)
        except BudgetError:
            if not transfers.fetch(saved, Priority.DEMAND):  # others may have freed memory since
                raise

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
            following = of_pass.next_spilled(again=again)
        while following is not None and not transfers.closed:
            key, triggers = following.record.key, orders.triggers
            if triggers and triggers.get(key.match_key, -1) > of_pass.place:
                return
            if not self._window_allows(following):
                of_pass.window_full = True
                return
            if not transfers.fetch(following, Priority.PREFETCH):
                return
            with transfers.table.lock:
                following = of_pass.next_spilled(again=again)

    def _window_allows(self, saved: SavedStorage) -> bool:
        window = self._active.orders.window_bytes
        if window is None:
            return True
        needed = self._transfers.mover.target_bytes(saved.ticket)
        return self._transfers.restored_bytes + needed <= window

    def _restore_error(self, saved: SavedStorage, error: BaseException) -> PenstockError:
        if self._transfers.closed:
            return session_closed(saved.label)
        return RestoreError(f"cannot restore {saved.label} for its backward: {error}")


def session_closed(label: str) -> ClosedError:
    """Return the error of a backward that needs moved bytes after its session was closed."""
    return ClosedError(
        f"cannot restore {label} for its backward: the session of this graph is closed, and what it had"
        " moved out of memory is gone; run forward again, and finish backward inside the `with` block,"
        " or before close()"
    )
