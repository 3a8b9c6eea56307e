"""Moves of one storage between device memory and tiers, and its states on the way."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from penstock.core.errors import (
    ClosedError,
    NoSpaceError,
    SourceChangedError,
    TransferError,
)
from penstock.core.units import format_bytes
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.active_orders import ActiveOrders
from penstock.runtime.movers import Mover, Transport
from penstock.runtime.storage import Encoding, Residency, SavedStorage, TensorRef
from penstock.runtime.table import StorageTable, is_edited, is_settled
from penstock.store.base import Tier

LATEST_SHARE: Final = 0.25
"""Of the latest write in the running mean of how long writes take."""


class Transfers:
    """Writes and reads saved storages, and keeps their states. Thread-safe.

    Attributes:
        table: Saved storages, with the runtime's lock.
        writing: Writes under way.
        writing_bytes: Of the storages that they free.
        write_ns_per_byte: How long the last writes took from their beginning to their end.
        reading: Reads under way.
        restored: Storages in the state RESTORED.
        transport: Writes, reads and discards: the mover, or the encoding stage in front of it.
        failed: Whether a tier has refused or lost a write.
        closed: Whether the session is closed: nothing moves any more.
    """

    def __init__(
        self,
        *,
        table: StorageTable,
        tiers: dict[str, Tier],
        mover: Mover,
        active: ActiveOrders,
        recorder: Recorder,
    ) -> None:
        """Move nothing yet. ``active`` has encodings for what has no room as it is."""
        self.table = table
        self._lock = table.lock
        self._changed = table.changed
        self.writing = 0
        self.writing_bytes = 0
        self.write_ns_per_byte = 0.0
        self.reading = 0
        self.restored: dict[SavedStorage, None] = {}
        self.failed = False
        self.closed = False
        self.tiers = tiers
        self.mover = mover
        self.transport: Transport = mover
        self._active = active
        self._recorder = recorder

    # -- out --------------------------------------------------------------------------------------

    def spill(self, saved: SavedStorage, first_tier: str, encoding: Encoding | None = None) -> None:
        """Begin to write a RESIDENT storage to ``first_tier``, or to another if that is full.

        Nothing happens while something may still write it.
        """
        storage = saved.storage
        if storage is not None and not self.mover.frees(storage):
            self._stays_for_good(saved)
            return
        del storage
        if encoding is None and self._active.shortage:
            encoding = self._active.fallback_encoding(saved.record)
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
        self._try(saved, self._order(first_tier))

    def _try(self, saved: SavedStorage, order: list[Tier]) -> None:
        """Write a WRITING storage to the first of these tiers that has room, or see what else is left."""
        full = self._begin(saved, order)
        if full is not None:
            self._try_others(saved, [], full=full)

    def _begin(self, saved: SavedStorage, order: list[Tier]) -> bool | None:
        """Begin to write; ``None``, or if nobody can, whether that is because the last tier is full."""
        storage, full = saved.storage, False
        if storage is None:  # its last handle has died meanwhile
            with self._lock:
                self._stays(saved)
            return None
        start_ns = self._recorder.clock.now_ns()
        for place, tier in enumerate(order, start=1):
            try:
                ticket = self.transport.write(storage, tier, saved.label, saved.encoding)
            except TransferError as error:  # full, most often; or the file cannot even be made
                full = isinstance(error, NoSpaceError)
                self._note_failure(f"spill.full.{tier.spec.name}", saved, error)
                error.__traceback__ = (
                    None  # its frames hold the handle, and a tier may hold the error
                )
                continue
            except BaseException:  # Ctrl-C, say: who waits for writes must not wait for this one
                with self._lock:
                    self._stays(saved, stuck=False)
                raise
            with self._lock:
                saved.ticket, saved.tier = ticket, tier
                saved.of_pass.spilled = True
            del storage  # or this frame would keep it alive when the write is done
            ticket.written.add_done_callback(partial(self._written, saved, start_ns, order[place:]))
            return None
        return full

    def _try_others(self, saved: SavedStorage, others: list[Tier], *, full: bool) -> None:
        """A write came to nothing: ask other tiers, then all again for less if they are ``full``."""
        shorter = None
        if full and not others and saved.encoding is None:
            shorter = self._active.encoding_when_refused(saved.record)
        with self._lock:
            if saved.state is not Residency.WRITING:
                self._stays(saved, stuck=False)  # it was needed meanwhile, or its last handle died
                return
            if not (others or shorter):
                saved.refused_at_bytes = self.held_bytes if full else -1
                self._stays(saved)
                return
            if shorter is not None:
                saved.encoding, others = shorter, self._order("")
        self._try(saved, others)

    def may_go(self, saved: SavedStorage) -> bool:
        """Return whether a RESIDENT storage can be spilled, as far as is known. Under the lock."""
        return not saved.stuck or self.held_bytes < saved.refused_at_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that tiers hold."""
        return sum(tier.held_bytes for tier in self.tiers.values())

    def fill(self) -> str:
        """How full the tiers are, for people."""
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
        """A write has ended; runs in a worker of the engine, or where it was cancelled.

        ``others`` are the tiers that were not asked: how long frames are shows late, so that one may
        turn out to be full only when some of them are written.
        """
        error = transfer.error
        taken = (self._recorder.clock.now_ns() - start_ns) / saved.nbytes
        full = isinstance(error, NoSpaceError)
        ticket = frame_bytes = None
        changed = False
        with self._lock:
            if error is None:
                self.write_ns_per_byte += (taken - self.write_ns_per_byte) * LATEST_SHARE
            if saved.state is Residency.DEAD:  # whoever let it die left charge and ticket to us
                ticket, saved.ticket = saved.ticket, None
                self.table.free(saved.nbytes)
                self._over(saved)
                full = False
            elif error is not None:
                ticket, saved.ticket = saved.ticket, None
                waits = saved.state is Residency.WRITING  # nobody has needed it meanwhile
                full = full and waits
                if not full:
                    # else a kernel of backward may have: oneDNN's LSTM writes to what it has saved
                    changed = (
                        waits and isinstance(error, SourceChangedError) and not is_edited(saved)
                    )
                    broken = isinstance(error, OSError) and not isinstance(error, NoSpaceError)
                    self._stays(saved, stuck=broken or changed)
            else:
                if saved.encoding is not None:
                    frame_bytes = getattr(saved.ticket, "frame_bytes", None)
                    saved.record.frame_bytes = frame_bytes
                if saved.state is Residency.WRITING:
                    saved.state = Residency.SPILLED
                    self.table.drop_source(saved)
                self._over(saved)  # else it was needed meanwhile: it stays, a later spill is free
        if ticket is not None:
            self.transport.discard(saved.tier, ticket)
        if isinstance(error, OSError):
            self._note_failure(f"spill.failed.{saved.tier.spec.name}", saved, error)
        elif changed:
            assert isinstance(error, SourceChangedError)
            self._note_failure("spill.source_changed", saved, error)
        if frame_bytes is not None:
            self._active.note_frames(saved.record, frame_bytes)
        if full:
            self._try_others(saved, others, full=True)

    def _over(self, saved: SavedStorage) -> None:
        saved.writing = False
        self.writing -= 1
        self.writing_bytes -= saved.nbytes
        self._changed.notify_all()

    def _stays(self, saved: SavedStorage, *, stuck: bool = True) -> None:
        """A write came to nothing. Under the lock."""
        if saved.state is Residency.DEAD:  # whoever let it die left the charge to us
            self.table.free(saved.nbytes)
        elif stuck:
            saved.stuck = self.failed = True
        if saved.state is Residency.WRITING:
            saved.state = Residency.RESIDENT
        self._over(saved)

    def _stays_for_good(self, saved: SavedStorage) -> None:
        """To spill it would free nothing: neither this one nor, in the next plan, its slot's."""
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
            priority: Whether somebody waits for it.
            force: Exceed the budget if need be.
        """
        with self._lock:
            if saved.state is not Residency.SPILLED:
                return True
            ticket = saved.ticket
        target = self.mover.allocate(ticket, force=force)  # may take long: a device is asked
        if target is None:
            return False
        with self._lock:
            ours = saved.state is Residency.SPILLED
            if ours:
                try:
                    transfer = self.transport.read(saved.tier, ticket, target, priority)
                except BaseException:
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
        """A read has ended; runs in a worker of the engine."""
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
        """Hold a RESTORED storage no longer: its users keep it alive. Under the lock."""
        del self.restored[saved]
        saved.state = Residency.SPILLED
        saved.storage = None

    # -- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until nothing is being written or read."""
        with self._lock:
            while self.writing or self.reading:
                self._changed.wait()

    def bury(self, saved: SavedStorage) -> Any | None:
        """No handle is left: give back everything. Under the lock; from finalizers, by ``defer``.

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
        """Give back a buried storage's ticket; a write under way does it when it ends."""
        if saved.writing:
            ticket.written.cancel()
        elif saved.ticket is ticket:
            saved.ticket = None
            self.transport.discard(saved.tier, ticket)

    # -- trouble ----------------------------------------------------------------------------------

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


def session_closed(label: str) -> ClosedError:
    """Return the error of a backward that needs moved bytes after its session was closed."""
    return ClosedError(
        f"cannot restore {label} for its backward: the session of this graph is closed, and what it had"
        " moved out of memory is gone; run forward again, and finish backward inside the `with` block,"
        " or before close()"
    )
