"""Who moves saved storages, under the plan: admission, write-behind, prefetch, demand, release.

[Note: the executor's lock]
    One lock guards every ``SavedStorage``, ``Pass`` and table here. Under it there is bookkeeping only.
    Transfers are waited for, cancelled and given callbacks outside it, because a transfer that settles
    runs its callbacks in the caller's thread and those take the lock.

[Note: room]
    Everything held counts against one budget: storages that are kept or await their write, restored
    ones, and touched but idle pages of the arena. When something new does not fit, room is made in
    this order: idle pages are given back; writes under way are waited for; prefetched copies are
    dropped, the one needed last first; kept storages are spilled, the one needed last first. Only when
    none of these is left is the budget too small, and the error says what would do. If a tier has
    failed, its bytes have nowhere to go: then, and only then, the budget is exceeded, with a warning.
"""

from __future__ import annotations

import os
import warnings
import weakref
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial

import torch

from penstock.core.budget import Budget
from penstock.core.errors import (
    BudgetError,
    ClosedError,
    NoSpaceError,
    PenstockError,
    PenstockWarning,
    RestoreError,
)
from penstock.core.locks import condition
from penstock.core.units import format_bytes
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder, Stage, StallCause
from penstock.plan.plan import Action, Decision
from penstock.runtime.movers import Mover
from penstock.runtime.passes import Pass
from penstock.runtime.planner import Planner
from penstock.runtime.residency import Origin, Residency, SavedStorage, SlotRecord
from penstock.tier.base import Tier

SAVED = "saved"
"""Owner, in the device budget, of storages that are kept or await their write."""
SMALL = "small"
"""Owner, in the device budget, of storages below the floor, which always stay."""


@dataclass(slots=True, eq=False)
class SmallStorage:
    """A saved storage below the floor: counted, never moved. The handles hold its tensors."""

    cdata: int
    nbytes: int
    source: weakref.ref[torch.UntypedStorage]
    of_pass: Pass
    handles: int = 0


class Executor:
    """Holds what autograd saved within a budget. Thread-safe.

    Attributes:
        budget: The device memory that everything here is charged to.
        planner: Says what to do with each slot, and learns from each pass.
    """

    def __init__(
        self,
        *,
        budget: Budget,
        tiers: dict[str, Tier],
        mover: Mover,
        planner: Planner,
        recorder: Recorder,
    ) -> None:
        """Hold nothing yet. The caller closes tiers and mover after ``close``."""
        self.budget = budget
        self.planner = planner
        self._tiers = tiers
        self._mover = mover
        self._recorder = recorder
        self._changed = condition()
        self._by_storage: dict[int, SavedStorage] = {}
        self._small: dict[int, SmallStorage] = {}
        self._writing = 0
        self._reading = 0
        self._write_failed = False
        self._warned: set[str] = set()
        self._stalled_ns = 0
        self._closed = False
        self._pid = os.getpid()
        self._passes = 0
        self._pass = self._new_pass()

    # -- saving -----------------------------------------------------------------------------------

    def find(
        self, storage: torch.UntypedStorage, base: torch.Tensor, version: int
    ) -> SavedStorage | None:
        """The entry of a storage that was saved before, at the same version of the same tensor.

        A storage's address may be used again after its death (TRAPS rules 5 and 27), so an entry
        counts only if its weak reference leads to this very storage.
        """
        saved = self._by_storage.get(storage._cdata)
        if (
            saved is not None
            and saved.version == version
            and saved.source() is storage
            and saved.base() is base
            and saved.state is not Residency.DEAD
        ):
            return saved
        return None

    def save(
        self,
        storage: torch.UntypedStorage,
        base: torch.Tensor,
        version: int,
        origin: Origin,
    ) -> SavedStorage:
        """Take charge of a storage that autograd saves; waits while the budget is full.

        The caller has one handle to it: see ``hold`` and ``release``.

        Raises:
            BudgetError: It can never fit.
        """
        nbytes = storage.nbytes()
        start_ns = self._recorder.clock.now_ns()
        with self._changed:
            saved = self._register(storage, base, version, origin)
        decision = self.planner.decide(saved.record.key)
        saved.record.reason = decision.reason
        try:
            self._admit(saved, nbytes, SAVED, saved.of_pass, saved)
        except BaseException:
            self._forget(saved)
            raise
        if decision.action is Action.OFFLOAD:
            self._spill(saved, decision)
        self._recorder.span(
            Stage.PACK, start_ns, self._recorder.clock.now_ns(), nbytes=nbytes, slot=str(saved)
        )
        return saved

    def _register(
        self,
        storage: torch.UntypedStorage,
        base: torch.Tensor,
        version: int,
        origin: Origin,
    ) -> SavedStorage:
        if self._closed:
            raise ClosedError("the session is closed: saved tensors can no longer be offloaded")
        current = self._current_pass()
        nbytes = storage.nbytes()
        key = current.new_key(origin.module, nbytes)
        record = SlotRecord(key, origin, self.compute_ns())
        cdata = storage._cdata
        table = self._by_storage
        saved = SavedStorage(
            cdata=cdata,
            nbytes=nbytes,
            version=version,
            source=weakref.ref(storage, lambda ref: _remove(table, cdata, ref)),
            base=weakref.ref(base),
            of_pass=current,
            index=len(current.records),
            record=record,
            storage=storage,
            handles=1,
            pending=1,
        )
        table[cdata] = saved
        current.add(saved)
        return saved

    def save_small(self, storage: torch.UntypedStorage) -> SmallStorage:
        """Count a storage below the floor; once, however many handles it gets."""
        cdata = storage._cdata
        small = self._small.get(cdata)
        if small is not None and small.source() is storage:
            with self._changed:
                if small.handles > 0:
                    small.handles += 1
                    return small
        nbytes = storage.nbytes()
        with self._changed:
            current = self._current_pass()
            current.small_count += 1
            current.small_bytes += nbytes
        small = SmallStorage(cdata, nbytes, weakref.ref(storage), current, handles=1)
        self._admit(f"a small tensor ({nbytes} bytes)", nbytes, SMALL, current, None)
        self._small[cdata] = small
        return small

    def release_small(self, small: SmallStorage) -> None:
        """A handle has died. Call it through ``locks.defer``."""
        if (
            os.getpid() != self._pid
        ):  # a forked child: its locks may be held by threads it has not got
            return
        with self._changed:
            small.handles -= 1
            if small.handles > 0:
                return
            if self._small.get(small.cdata) is small:
                del self._small[small.cdata]
        self.budget.give(small.nbytes, SMALL)

    def _admit(
        self, name: object, nbytes: int, owner: str, of_pass: Pass, saved: SavedStorage | None
    ) -> None:
        if self.budget.try_take(nbytes, owner):
            return
        start_ns = self._recorder.clock.now_ns()
        while not self.budget.try_take(nbytes, owner):
            if not self._make_room(name, nbytes, of_pass, saved):
                self.budget.force(nbytes, owner)
                break
        self._stalled(start_ns, StallCause.BUDGET, str(name))

    # -- spilling ---------------------------------------------------------------------------------

    def _spill(self, saved: SavedStorage, decision: Decision) -> None:
        """Begin to write a RESIDENT storage to the first tier, of the plan's or after, with room."""
        with self._changed:
            storage = saved.storage
            if saved.state is not Residency.RESIDENT or storage is None or self._closed:
                return
            saved.state = Residency.WRITING
            self._writing += 1
        ticket = None
        for tier in self._spill_order(decision.tier):
            try:
                ticket = self._mover.write(storage, tier, str(saved))
                break
            except NoSpaceError as error:
                self._note_failure(f"spill.full.{tier.spec.name}", saved, error)
        if ticket is None:
            with self._changed:
                self._unspilled(saved)
            return
        with self._changed:
            saved.ticket, saved.tier = ticket, tier
            saved.record.action, saved.record.tier = "offload", tier.spec.name
        del storage  # or this frame would keep it alive while callbacks look whether it died
        ticket.written.add_done_callback(partial(self._written, saved))

    def _spill_order(self, first: str) -> list[Tier]:
        names = [first, *(name for name in self._tiers if name != first)]
        return [self._tiers[name] for name in names if name in self._tiers]

    def _written(self, saved: SavedStorage, transfer: Transfer) -> None:
        """A write has ended; runs in a worker of the engine, or where it was cancelled."""
        ticket = None
        with self._changed:
            if saved.state is Residency.DEAD:
                self._writing -= 1
                self._changed.notify_all()
                return
            if transfer.error is not None:
                ticket, saved.ticket = saved.ticket, None
                self._unspilled(saved, stuck=isinstance(transfer.error, OSError))
            elif saved.state is Residency.WRITING:
                self._writing -= 1
                saved.state = Residency.SPILLED
                self._give_back(saved)
            else:  # needed meanwhile: it stays, and a later spill costs nothing
                self._writing -= 1
            self._changed.notify_all()
        if isinstance(transfer.error, OSError):
            self._note_failure(f"spill.failed.{saved.tier.spec.name}", saved, transfer.error)
        if ticket is not None:
            self._mover.discard(saved.tier, ticket)

    def _unspilled(self, saved: SavedStorage, *, stuck: bool = True) -> None:
        """A write came to nothing: the storage stays. Under the lock."""
        self._writing -= 1
        saved.stuck = stuck
        if saved.state is Residency.WRITING:
            saved.state = Residency.RESIDENT
        saved.record.action, saved.record.tier = "keep", ""
        if stuck:
            self._write_failed = True
            saved.record.reason = "kept: its write failed"
        self._changed.notify_all()

    def _give_back(self, saved: SavedStorage) -> None:
        """Drop the strong reference to a source, and its charge. Under the lock."""
        if saved.storage is not None:
            saved.storage = None
            self.budget.give(saved.nbytes, SAVED)

    # -- restoring --------------------------------------------------------------------------------

    def restore(self, saved: SavedStorage, *, first: bool) -> torch.UntypedStorage:
        """The bytes of a saved storage, in device memory; waits only if they are not there yet.

        Args:
            saved: What ``save`` or ``find`` returned.
            first: Whether the calling handle is unpacked for the first time.

        Raises:
            RestoreError: They cannot be read back.
            BudgetError: There can be no room for them.
        """
        start_ns = self._recorder.clock.now_ns()
        self._begin_backward(saved)
        storage = self._in_memory(saved)
        if storage is None:
            self._prefetch(saved, include_self=True)
            storage = self._demand(saved)
        self._prefetch(saved)
        with self._changed:
            if first:
                saved.pending -= 1
            if saved.pending <= 0 and saved.state is Residency.RESTORED:
                self._retire(saved)
        now_ns = self._recorder.clock.now_ns()
        self._recorder.span(Stage.UNPACK, start_ns, now_ns, nbytes=saved.nbytes, slot=str(saved))
        return storage

    def _in_memory(self, saved: SavedStorage) -> torch.UntypedStorage | None:
        """A live copy, if there is one; what is still being written is forwarded (TRAPS rule 17)."""
        cancel = None
        with self._changed:
            storage = saved.storage
            if saved.state is Residency.WRITING:
                saved.state = Residency.RESIDENT
                cancel = saved.ticket
                self._recorder.count("forwarded")
            elif saved.state in (Residency.SPILLED, Residency.READING):
                storage = saved.source()
                if storage is not None and not saved.record.held_elsewhere:
                    saved.record.held_elsewhere = True
                    self._recorder.count("held_elsewhere")
                if storage is None and saved.restored is not None:
                    storage = saved.restored()
        if cancel is not None:
            cancel.written.cancel()
        return storage

    def _demand(self, saved: SavedStorage) -> torch.UntypedStorage:
        """Bring bytes from a tier while the caller waits."""
        start_ns = self._recorder.clock.now_ns()
        cause = StallCause.LATE
        while True:
            with self._changed:
                if saved.state is Residency.RESTORED:
                    assert saved.storage is not None
                    storage = saved.storage
                    break
                transfer = saved.read if saved.state is Residency.READING else None
            if transfer is None:
                cause = StallCause.DEMAND
                if not self._read(saved, Priority.DEMAND):
                    needed = self._mover.target_bytes(saved.ticket)
                    if not self._make_room(saved, needed, saved.of_pass, saved):
                        self._read(saved, Priority.DEMAND, force=True)
                continue
            transfer.promote(Priority.DEMAND)
            try:
                transfer.wait()
            except (PenstockError, OSError, CancelledError) as error:
                raise RestoreError(f"cannot restore {saved} for its backward: {error}") from error
        if cause is StallCause.DEMAND:
            self._recorder.count("prefetch.missed")
        self._stalled(start_ns, cause, str(saved))
        return storage

    def _read(self, saved: SavedStorage, priority: Priority, *, force: bool = False) -> bool:
        """Begin to read a SPILLED storage; False if there is no room for it."""
        with self._changed:
            if saved.state is not Residency.SPILLED:
                return True
            if priority is not Priority.DEMAND and not self._window_allows(saved):
                return False
            target = self._mover.allocate(saved.ticket, force=force)
            if target is None:
                return False
            saved.state = Residency.READING
            saved.target = target
            self._reading += 1
            try:
                transfer = self._mover.read(saved.tier, saved.ticket, target, priority)
            except BaseException:
                saved.state, saved.target = Residency.SPILLED, None
                self._reading -= 1
                self._mover.drop(target)
                raise
            saved.read = transfer
        transfer.add_done_callback(partial(self._arrived, saved))
        return True

    def _window_allows(self, saved: SavedStorage) -> bool:
        window = self.planner.window_bytes
        return window is None or (
            self._mover.used_bytes() + self._mover.target_bytes(saved.ticket) <= window
        )

    def _arrived(self, saved: SavedStorage, transfer: Transfer) -> None:
        """A read has ended; runs in a worker of the engine."""
        with self._changed:
            self._reading -= 1
            target, saved.target, saved.read = saved.target, None, None
            if transfer.error is not None or saved.state is Residency.DEAD:
                self._mover.drop(target)
                if saved.state is Residency.READING:
                    saved.state = Residency.SPILLED
            else:
                saved.state = Residency.RESTORED
                saved.storage = self._mover.finish(target)
                saved.restored = weakref.ref(saved.storage)
            self._changed.notify_all()

    def _retire(self, saved: SavedStorage) -> None:
        """Every handle has been unpacked: whoever uses the memory keeps it alive. Under the lock."""
        saved.state = Residency.SPILLED
        saved.storage = None

    def _prefetch(self, saved: SavedStorage, *, include_self: bool = False) -> None:
        """Begin to read what comes next, as far as the window allows."""
        if include_self and not self._read(saved, Priority.DEMAND):
            return
        with self._changed:
            following = [
                candidate
                for candidate in saved.of_pass.needs_after(saved, self.planner.ranks)
                if candidate.state is Residency.SPILLED and candidate.pending > 0
            ]
        for candidate in following:
            if candidate.source() is None and not self._read(candidate, Priority.PREFETCH):
                return

    # -- room -------------------------------------------------------------------------------------

    def _make_room(
        self, name: object, nbytes: int, of_pass: Pass, saved: SavedStorage | None
    ) -> bool:
        """Take one step towards ``nbytes`` of free budget; see [Note: room].

        Returns:
            False if nothing is left to do and the budget must be exceeded because a tier failed.

        Raises:
            BudgetError: Nothing is left to do.
        """
        if self._mover.trim(nbytes) > 0:
            return True
        with self._changed:
            if self._writing:
                self._changed.wait()
                return True
            if self._drop_prefetched(of_pass, saved):
                return True
            if self._reading:
                self._changed.wait()
                return True
            victim = self._victim(of_pass, saved)
        if victim is not None:
            self._evict(victim)
            return True
        if not self._write_failed:
            self._refuse(name, nbytes)
        self._warn("budget", f"the {self.budget.name} budget is exceeded: a tier has failed")
        self._recorder.count("budget.overflow")
        return False

    def _drop_prefetched(self, of_pass: Pass, wanted_for: SavedStorage | None) -> bool:
        for saved in of_pass.needed_last():
            if saved.state is Residency.RESTORED and saved is not wanted_for:
                self._retire(saved)
                self._recorder.count("prefetch.dropped")
                return True
        return False

    def _victim(self, of_pass: Pass, wanted_for: SavedStorage | None) -> SavedStorage | None:
        if not self._tiers:
            return None
        for saved in of_pass.needed_last():
            if (
                saved.state is Residency.RESIDENT
                and saved.storage is not None
                and saved.pending > 0
                and not saved.stuck
                and saved is not wanted_for
            ):
                return saved
        return None

    def _evict(self, saved: SavedStorage) -> None:
        self._recorder.count("evicted")
        with self._changed:
            if saved.state is Residency.RESIDENT and saved.ticket is not None:
                saved.state = Residency.SPILLED
                self._give_back(saved)
                return
        saved.record.reason = "evicted: the budget was full"
        self._spill(saved, Decision(saved.record.key, Action.OFFLOAD, "", "evicted"))

    def _refuse(self, name: object, nbytes: int) -> None:
        used = self.budget.used_bytes
        least = used + nbytes
        raise BudgetError(
            f"the {self.budget.name} budget of {format_bytes(self.budget.limit_bytes)}"
            f" ({self.budget.limit_bytes} bytes) is too small for {name}: it needs {nbytes} bytes"
            f" beside {used} that cannot be moved away at this moment; give at least {least} bytes"
            f" ({format_bytes(least)})" + ("" if self._tiers else ", or name a flash directory"),
            slot=str(name),
            limit_bytes=self.budget.limit_bytes,
            least_bytes=least,
        )

    # -- handles ----------------------------------------------------------------------------------

    def hold(self, saved: SavedStorage) -> bool:
        """Another handle was made; False if the storage has died meanwhile."""
        with self._changed:
            if saved.state is Residency.DEAD:
                return False
            saved.handles += 1
            saved.pending += 1
            return True

    def release(self, saved: SavedStorage, unpacked: bool) -> None:
        """A handle has died. Call it through ``locks.defer``: it takes locks, it never waits."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            saved.handles -= 1
            if not unpacked:
                saved.pending -= 1
            if saved.handles > 0:
                if saved.pending <= 0 and saved.state is Residency.RESTORED:
                    self._retire(saved)
                return
        self._forget(saved)

    def _forget(self, saved: SavedStorage) -> None:
        with self._changed:
            ticket, saved.ticket = saved.ticket, None
            state, saved.state = saved.state, Residency.DEAD
            charged = saved.storage is not None and state in (Residency.RESIDENT, Residency.WRITING)
            saved.storage = None
            if charged:
                self.budget.give(saved.nbytes, SAVED)
            if self._by_storage.get(saved.cdata) is saved:
                del self._by_storage[saved.cdata]
            saved.of_pass.remove(saved)
            self._changed.notify_all()
        if ticket is not None:
            self._mover.discard(saved.tier, ticket)

    # -- passes -----------------------------------------------------------------------------------

    def compute_ns(self) -> int:
        """Time on the axis of profiles: the clock's, with every stall taken out."""
        return self._recorder.clock.now_ns() - self._stalled_ns

    def _new_pass(self) -> Pass:
        self._passes += 1
        return Pass(self._passes, self.compute_ns())

    def _current_pass(self) -> Pass:
        current = self._pass
        if current.end_ns is not None or current.abandoned:
            self._pass = current = self._new_pass()
        return current

    def _begin_backward(self, saved: SavedStorage) -> None:
        now_ns = self.compute_ns()
        if saved.record.needed_at_ns is None:
            saved.record.needed_at_ns = now_ns
        if saved.of_pass.backward_start_ns is None:
            saved.of_pass.backward_start_ns = now_ns

    def end_backward(self) -> None:
        """A backward is over: the pass that it belongs to ends, and the planner learns from it."""
        with self._changed:
            finished = self._pass
            if finished.end_ns is not None or not finished.records:
                return
            finished.end_ns = self.compute_ns()
        self.planner.learn(finished)

    # -- the rest ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop saving. Graphs that are still alive keep what they have in memory; the rest is lost."""
        with self._changed:
            self._closed = True

    def _stalled(self, start_ns: int, cause: StallCause, slot: str) -> None:
        end_ns = self._recorder.clock.now_ns()
        self._stalled_ns += end_ns - start_ns
        self._recorder.span(Stage.STALL, start_ns, end_ns, cause=cause, slot=slot)

    def _note_failure(self, counter: str, saved: SavedStorage, error: OSError) -> None:
        self._write_failed = True
        self._recorder.count(counter)
        self._recorder.mark("spill_failed", slot=str(saved), error=str(error))
        self._warn(
            counter,
            f"{saved} could not be spilled and stays in memory or goes to another"
            f" tier ({error}); further such failures are only counted",
        )

    def _warn(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, PenstockWarning, stacklevel=2)


def _remove(
    table: dict[int, SavedStorage], cdata: int, dead: weakref.ref[torch.UntypedStorage]
) -> None:
    """A source has died: its address may be reused, so the key goes now (TRAPS rule 27)."""
    saved = table.get(cdata)
    if saved is not None and saved.source is dead:
        del table[cdata]
