"""Executor of a plan on saved storages: admission, write-behind, prefetch, demand and release."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from penstock.codec import registry
from penstock.core.errors import ClosedError, RestoreError
from penstock.core.process import fork_guard
from penstock.core.units import round_up
from penstock.observe.recorder import Recorder, Stage, StallCause
from penstock.plan.operators import Operator
from penstock.plan.plan import Action, Decision
from penstock.runtime.active_orders import ActiveOrders
from penstock.runtime.completion import Completion
from penstock.runtime.compute_time import ComputeTime
from penstock.runtime.eviction import Eviction
from penstock.runtime.inspection import DeviceState, held_slots
from penstock.runtime.movers import Mover, StreamOrder, Transport
from penstock.runtime.orders import Orders, PassRecord
from penstock.runtime.recompute import Recomputer
from penstock.runtime.sampling import POSITIVE, CodecSampler, Sampler
from penstock.runtime.storage import (
    MAX_RECORDS,
    Encoding,
    Origin,
    Pass,
    Residency,
    SavedStorage,
    SlotRecord,
    TensorRef,
    View,
    dtype_name,
)
from penstock.runtime.table import (
    SAVED,
    SMALL,
    SMALL_CREDIT_BYTES,
    StorageTable,
    attach,
    in_memory,
    is_enough,
    is_settled,
    keeps_signs,
)
from penstock.runtime.transfers import Reads, Transfers
from penstock.store.account import Account
from penstock.store.base import Tier

if TYPE_CHECKING:
    from penstock.runtime.allowance import Allowance

_KEPT: Final = Residency.KEPT
_SMALL: Final = Residency.SMALL


class Executor:
    """Holds saved storages within a budget. Thread-safe.

    Attributes:
        budget: The device memory that everything here is charged to.
        moves_nothing: True if the orders in force never move anything.
        active: The orders in force, applied to the running pass; see ``follow``.
        recomputer: Recomputes what is not held.
        stream_order: Order of uses of the device's memory.
        completion: Actions that wait until the running operator has returned.
        time: The axis of profiles.
        compute_ns: Returns the time on it.
        allowance: Finds the budget's limit; ``None`` if that is given.
    """

    def __init__(
        self,
        *,
        budget: Account,
        tiers: dict[str, Tier],
        mover: Mover,
        recorder: Recorder,
        time: ComputeTime | None = None,
        completion: Completion | None = None,
        allowance: Allowance | None = None,
        make_sampler: Callable[[], CodecSampler] = Sampler,
        open_codecs: Callable[[], int] = lambda: 0,
    ) -> None:
        """Hold nothing yet. The caller closes tiers and mover after ``close``.

        ``time`` and ``completion`` are those of the session, if it has several executors. ``allowance``
        finds the budget's limit, if that is not given. ``make_sampler`` is called when codecs are first
        to be measured on storages of the mover's device. ``open_codecs`` takes their scratch
        memory and returns its bytes, 0 if there is no room. Until ``follow`` everything is kept.
        """
        self.budget = budget
        self.moves_nothing = False
        self.active = ActiveOrders(budget=budget, recorder=recorder, open_codecs=open_codecs)
        self._recorder = recorder
        self.time = ComputeTime(recorder.clock) if time is None else time
        self.compute_ns = self.time.now_ns
        self.allowance = allowance
        if allowance is not None:
            self.time.watch.append(allowance.look)
        self.stream_order: StreamOrder = mover
        self._mover = mover
        self._table = StorageTable(budget)
        self._lock = self._table.lock
        self._transfers = Transfers(
            table=self._table,
            tiers=tiers,
            mover=mover,
            budget=budget,
            active=self.active,
            recorder=recorder,
        )
        self._use = mover.use if mover.runs_behind else None
        self._eviction = Eviction(
            budget=budget,
            transfers=self._transfers,
            recorder=recorder,
            time=self.time,
        )
        self._reads = Reads(
            active=self.active,
            transfers=self._transfers,
            eviction=self._eviction,
            recorder=recorder,
        )
        self.recomputer = Recomputer(
            active=self.active,
            transfers=self._transfers,
            eviction=self._eviction,
            budget=budget,
            recorder=recorder,
            current_pass=self._current_pass,
            spill=self._spill,
        )
        here = mover.here if mover.runs_behind else None
        self.completion = Completion(here) if completion is None else completion
        self._make_sampler = make_sampler
        self._sampler: CodecSampler | None = None
        self._guard = fork_guard()
        self._pass = self._new_pass(0)
        self._pass.end_ns = self._pass.start_ns  # the first one begins with the first save

    @property
    def orders(self) -> Orders:
        """The orders in force."""
        return self.active.orders

    # -- saving -----------------------------------------------------------------------------------

    def save(  # noqa: PLR0915, PLR0917  (hot: calls and keywords cost)
        self,
        storage: torch.UntypedStorage,
        nbytes: int,
        view: View | None = None,
        base: torch.Tensor | torch.UntypedStorage | None = None,
        version: int = 0,
        place: tuple[str, str] = ("", ""),
        dtype: torch.dtype = torch.uint8,
        complete: bool = True,
        sign_only: bool = False,
    ) -> SavedStorage:
        """Take charge of a storage that autograd saves; wait while the budget is full.

        Arguments are as in ``StorageHolder.save``. The body serves what the plan keeps; a call of a
        Python function costs as much as most of what it does, so what it needs of the table is written
        out.

        Raises:
            BudgetError: It can never fit.
            ClosedError: The session is over.
        """
        if view is None or base is None:
            return self._count(storage, nbytes)
        if (
            self._use is not None
        ):  # first: another thread may spill it as soon as it is in the table
            self._use(storage)
        cdata, path, table = storage._cdata, place[0], self._table
        charged, saved = False, None
        while True:
            with self._lock:
                known = table.entries.get(cdata)
                current = self._pass
                if (
                    known is not None
                    and known.state is _KEPT
                    and known.version == version
                    and known.source() is storage
                    and known.base() is base
                ):
                    known.handles += 1
                    known.views.append(weakref.ref(view))  # type: ignore[union-attr]
                    saved = known
                    break
                if current.end_ns is not None or (
                    (not current.live or current.saved_count > MAX_RECORDS) and current.abandoned
                ):
                    current = self._current_pass()
                ordinal = current.ordinals.get(path, 0)
                slot = (path, ordinal, nbytes)
                if slot not in self.active.kept or (known is not None and known.recorded):
                    break
                if charged or nbytes <= table.spare_bytes:
                    if not charged:
                        table.spare_bytes -= nbytes
                    charged = False
                    index = current.saved_count
                    saved = SavedStorage(_KEPT, cdata, nbytes, TensorRef(storage), current)
                    saved.version = version
                    saved.base = TensorRef(base)
                    saved.index = index
                    saved.slot = slot
                    saved.place = place
                    saved.dtype = dtype
                    saved.views = [weakref.ref(view)]
                    saved.complete = True
                    table.entries[cdata] = current.live[index] = saved
                    current.ordinals[path] = ordinal + 1
                    current.saved_count = index + 1
                    current.kept_bytes += nbytes
                    current.kept_count += 1
                    break
            charged = table.take(nbytes)
            if not charged:
                break
        if charged:  # another thread has saved it meanwhile
            with self._lock:
                table.free(nbytes)
        if saved is None:
            origin = Origin(*place, dtype_name(dtype))
            return (
                known  # else there is nothing to share
                and self._share(storage, view, base, version, origin, sign_only=sign_only)
            ) or self._admit(
                storage, view, base, version, origin, complete=complete, sign_only=sign_only
            )
        if not complete or base is storage:
            saved.complete = False
            self.completion.wait(partial(self._complete, saved, sign_only))
        return saved

    def _count(self, storage: torch.UntypedStorage, nbytes: int) -> SavedStorage:
        """Count a storage that stays; once, however many handles it gets.

        Without the lock; see [Note: the runtime's lock].
        """
        table, cdata = self._table, storage._cdata
        small = table.entries.get(cdata)
        if (
            small is not None
            and small.source() is storage
            and small.state is _SMALL
            and small.handles
        ):
            small.handles += 1
            return small
        current = self._pass
        if current.end_ns is not None or (current.saved_count and current.abandoned):
            with self._lock:
                current = self._current_pass()
        small = SavedStorage(_SMALL, cdata, nbytes, TensorRef(storage), current)
        table.entries[cdata] = small
        current.small_count += 1
        held = table.small_bytes = table.small_bytes + nbytes
        if held > current.small_bytes:  # noqa: PLR1730  (hot: a call costs)
            current.small_bytes = held
        if held > table.small_taken_bytes:
            self._charge_small(small, held - table.small_taken_bytes)
        return small

    def _charge_small(self, small: SavedStorage, missing: int) -> None:
        """Charge SMALL storages in advance: one by one would cost more than to save them."""
        table, nbytes = self._table, round_up(missing, SMALL_CREDIT_BYTES)
        if not self.budget.try_take(nbytes, SMALL):
            nbytes = missing
            name = f"{missing} bytes of tensors below the floor"
            try:
                self._eviction.take(nbytes, SMALL, name=name, of_pass=small.of_pass, saved=None)
            except BaseException:
                small.handles = 0
                table.end_small(small)
                raise
        table.small_taken_bytes += nbytes

    def _share(
        self,
        storage: torch.UntypedStorage,
        view: View,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
        origin: Origin,
        *,
        sign_only: bool,
    ) -> SavedStorage | None:
        """Return the entry of a storage that was saved before, with ``view`` as another handle to it.

        An entry counts only if what is kept of its bytes is enough, or may prove to be: until ``prove``
        says so the view keeps the storage, so that it is never without its bytes. Of a storage whose
        parts have counters of their own no version tells whether it has changed since its bytes were
        read: then it is saved anew.
        """
        with self._lock:
            saved = self._table.find(storage, base, version)
            if saved is None or not saved.recorded:
                return None
            if not is_enough(saved, origin.dtype, sign_only):
                return None
            if base is storage and (saved.writing or saved.ticket is not None):
                return None
            saved.record.handles += 1
            saved.handles += 1
            saved.pending += 1
            if not keeps_signs(saved):
                attach(saved, view)
        return saved

    def _admit(
        self,
        storage: torch.UntypedStorage,
        view: View,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
        origin: Origin,
        *,
        complete: bool,
        sign_only: bool,
    ) -> SavedStorage:
        """Hold a storage that can be moved, and do with it what the plan says."""
        table = self._table
        with self._lock:
            if self._transfers.closed:
                raise ClosedError("the session is closed: it holds no more saved tensors")
            saved = self._register(storage, base, version, origin)
            saved.views = [weakref.ref(view)]
            saved.complete = complete and base is not storage
            charged = table.take_spare(saved.nbytes)
        decision = self._decide(saved, storage, sign_only) if saved.complete else None
        if not charged and not table.take(saved.nbytes):
            self._wait_for_room(saved)
        if decision is not None:
            self._follow(saved, decision, sign_only)
        else:
            self.completion.wait(partial(self._complete, saved, sign_only), storage.device)
        return saved

    def _complete(self, saved: SavedStorage, sign_only: bool, last: bool) -> bool:
        """Carry out the plan for a storage, if possible: the operator that saved it has returned.

        Returns:
            Whether it is done. A storage with parts that are held elsewhere stays, and this is called
            again; after the ``last`` call it is left to eviction.
        """
        with self._lock:
            storage = saved.source()
            saved.complete = saved.base() is not storage
            if saved.state is not Residency.RESIDENT or storage is None or saved.slot is not None:
                return True  # kept by the plan, needed already, or dead
            if not is_settled(saved):
                return last
        self._follow(saved, self._decide(saved, storage, sign_only), sign_only)
        return True

    def holds(
        self,
        storage: torch.UntypedStorage,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
    ) -> bool:
        """Answer as ``StorageHolder.holds``."""
        if storage._cdata not in self._table.entries:
            return False
        with self._lock:
            return self._table.find(storage, base, version) is not None

    def _decide(
        self, saved: SavedStorage, storage: torch.UntypedStorage, sign_only: bool
    ) -> Decision:
        """Return what the plan says of a storage that has been saved; sample it, if that is wanted."""
        record = saved.record
        if self.active.sampling:
            start_ns = self._recorder.clock.now_ns()
            waiting = self.time.wait_begins()
            if self._sampler is None:
                self._sampler = self._make_sampler()
            record.codecs = self._sampler.sample(storage, record.origin.dtype, sign_only=sign_only)
            self.time.wait_ends(waiting)
            self._eviction.stalled(start_ns, StallCause.SAMPLING, saved.label)
        return self.active.orders.exact.get(record.key) or self.active.decide(record)

    def _follow(self, saved: SavedStorage, decision: Decision, sign_only: bool) -> None:
        """Do with a storage what the plan says."""
        if self.active.crowded:
            self._sample_from_now_on(saved)
        if decision.action is Action.RECOMPUTE and not self.recomputer.drop_saved(saved):
            decision = self.active.decide_unplanned(saved.record)
        if decision.action is Action.OFFLOAD:
            if decision.codec == POSITIVE and sign_only:
                saved.deferred = decision
            else:
                unproven = decision.codec == POSITIVE
                self._spill(saved, decision.tier, "" if unproven else decision.codec)

    def _sample_from_now_on(self, saved: SavedStorage) -> None:
        """Wait for writes, so that codecs have scratch memory; then sample the rest of the pass."""
        start_ns = self._recorder.clock.now_ns()
        waiting = self.time.wait_begins()
        with self._lock:
            while self._transfers.writing:
                self._table.changed.wait()
        self.time.wait_ends(waiting)
        self._eviction.stalled(start_ns, StallCause.BUDGET, saved.label)
        self.active.sample_now()

    def prove(self, saved: SavedStorage, view: View, *, sign_only: bool) -> bool:
        """Do as ``StorageHolder.prove``; a spill that was deferred until this is known begins."""
        with self._lock:
            if not saved.recorded:
                return True  # it is not encoded, so all of it is kept
            record = saved.record
            record.sign_only_handles += sign_only
            all_proven = record.sign_only_handles == record.handles
            deferred, saved.deferred = saved.deferred, None
            enough = sign_only or not keeps_signs(saved)
            if enough:
                attach(saved, view)
            if deferred is not None and all_proven:  # so that no other handle is found meanwhile
                saved.encoding = Encoding(POSITIVE, record.origin.dtype)
        if deferred is not None:
            self._spill(saved, deferred.tier, POSITIVE if all_proven else "")
        return enough

    def _spill(self, saved: SavedStorage, tier: str, codec: str) -> None:
        encoding = None
        dtype = saved.record.origin.dtype
        if codec and registry.get(codec).accepts(dtype):
            encoding = Encoding(codec, dtype)
        start_ns = self._recorder.clock.now_ns()
        self._transfers.spill(saved, tier, encoding)
        now_ns = self._recorder.clock.now_ns()
        self._recorder.span(Stage.PACK, start_ns, now_ns, nbytes=saved.nbytes, slot=saved.label)

    def _wait_for_room(self, saved: SavedStorage) -> None:
        try:
            self._eviction.take(
                saved.nbytes, SAVED, name=saved.label, of_pass=saved.of_pass, saved=saved
            )
        except BaseException:
            with self._lock:
                saved.storage, saved.state = None, Residency.DEAD
                saved.of_pass.remove(saved)
                self._table.forget(saved)
            raise

    def _register(
        self,
        storage: torch.UntypedStorage,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
        origin: Origin,
    ) -> SavedStorage:
        current = self._current_pass()
        nbytes = storage.nbytes()
        key = current.new_key(origin.module, nbytes)
        cdata = storage._cdata
        saved = SavedStorage(Residency.RESIDENT, cdata, nbytes, TensorRef(storage), current)
        self._table.entries[cdata] = saved
        saved.version = version
        saved.base = TensorRef(base)
        saved.index = current.saved_count
        saved.slot = None
        record = SlotRecord(key, origin, self.compute_ns(), self._table.small_bytes)
        saved.hold(storage, record)
        current.add(saved)
        return saved

    # -- restoring --------------------------------------------------------------------------------

    def restore(self, saved: SavedStorage, *, first: bool) -> torch.UntypedStorage:
        """Do as ``StorageHolder.restore``.

        Raises:
            RestoreError: They cannot be read back.
            BudgetError: There can be no room for them.
            ClosedError: The session is closed, and they were on a tier.
        """
        if self._guard.in_child:
            return self._in_child(saved)
        if not saved.recorded:
            storage = saved.source()
            self._need_kept(saved)
            if storage is not None and not saved.recorded:
                return storage
        with self._lock:
            storage = self._note_need(saved)
            forwarded = saved.state is Residency.WRITING
            ticket = saved.ticket
            if forwarded:  # TRAPS rule 17: it is still here, so it stays
                saved.state = Residency.RESIDENT
            if storage is not None and saved.recipe is None and not saved.of_pass.spilled:
                saved.pending -= first
                return storage
        if forwarded:
            self._recorder.count("forwarded")
            if ticket is not None:  # else it is just being asked for
                ticket.written.cancel()
        waiting = self.time.wait_begins() if self._use is not None and saved.recipe is None else ()
        if storage is None:
            source = self._reads if saved.recipe is None else self.recomputer
            storage = source.demand(saved)
        self._reads.ahead(saved, again=not first)
        with self._lock:
            saved.pending -= first
            if saved.pending <= 0 and saved.state is Residency.RESTORED:
                self._transfers.retire(saved)
        if self._use is not None:
            self._use(storage)
        if waiting:
            self.time.wait_ends(waiting)
        return storage

    def _in_child(self, saved: SavedStorage) -> torch.UntypedStorage:
        """Return what a forked child inherited; without the lock, whose holder does not exist here."""
        storage = in_memory(saved) if saved.recorded else saved.source()
        if storage is None:
            raise RestoreError(
                f"cannot restore {saved.label} in this process: it was spilled by process"
                f" {self._guard.pid}, from which this one was forked, and only that one can read it"
            )
        return storage

    def _note_need(self, saved: SavedStorage) -> torch.UntypedStorage | None:
        """Record the time of need; return a live copy of the bytes, if there is one."""
        record = saved.record
        if record.needed_at_ns is None:
            record.needed_at_ns = self.compute_ns()
            if saved.of_pass.backward_start_ns is None:
                saved.of_pass.begin_backward(record.needed_at_ns, self._recorder.clock.now_ns())
        storage = in_memory(saved)
        if storage is not None and saved.storage is None and saved.source() is storage:
            record.held_elsewhere = True  # spilling it has freed nothing (TRAPS rule 18)
        return storage

    def _need_kept(self, saved: SavedStorage) -> None:
        """Note the need of a KEPT storage, the first of its pass or in one that has spilled others."""
        of_pass = saved.of_pass
        if of_pass.backward_start_ns is None:
            of_pass.begin_backward(self.compute_ns(), self._recorder.clock.now_ns())
        if of_pass.spilled:
            self._reads.ahead(saved, again=False)

    # -- handles ----------------------------------------------------------------------------------

    def release(self, saved: SavedStorage, unpacked: bool) -> None:
        """Release a handle that has died, unpacked or not. Never waits.

        Call it through ``locks.defer``: there the finalizers of this thread wait in any case, so the bare
        lock is enough. A SMALL storage takes no lock, so its handle may call this directly.
        """
        if self._guard.in_child:  # the holders of locks do not exist in a forked child
            return
        table, ticket = self._table, None
        if saved.state is _SMALL:
            saved.handles -= 1
            if not saved.handles:
                table.end_small(saved)
            return
        with self._lock.bare:
            saved.handles -= 1
            state = saved.state
            if state is _KEPT:
                if not saved.handles:
                    if table.entries.get(saved.cdata) is saved:
                        del table.entries[saved.cdata]
                    of_pass = saved.of_pass
                    del of_pass.live[saved.index]
                    of_pass.kept_count -= 1
                    saved.state = Residency.DEAD
                    table.free(saved.nbytes)
                return
            if not unpacked:
                saved.pending -= 1
            if saved.handles > 0:
                if saved.pending <= 0 and state is Residency.RESTORED:
                    self._transfers.retire(saved)
                return
            table.forget(saved)
            ticket = self._transfers.free(saved)
        if ticket is not None:
            self._transfers.discard(saved, ticket)
        saved.recipe = None  # and its handle to the input of that

    # -- passes -----------------------------------------------------------------------------------

    def _current_pass(self) -> Pass:
        current = self._pass
        if current.end_ns is not None or current.abandoned:
            self._pass = current = self._new_pass(current.index + 1)
        return current

    def _new_pass(self, index: int) -> Pass:
        if self.time.timer is not None:
            self.time.timer.begin()
        self._mover.begin_pass()
        made = Pass(index, self.compute_ns(), self._recorder.clock.now_ns())
        self._table.passes.add(made)
        return made

    def follow(self, orders: Orders) -> None:
        """Follow other orders from now on. Between passes."""
        planned = orders.plan_number != self.orders.plan_number
        self.moves_nothing = orders.moves_nothing
        self.active.follow(orders)
        if planned:
            self._mover.trim(self.budget.limit_bytes)

    def observed(
        self, finish: Callable[[int], tuple[Operator, ...]], unrepeatable: Iterable[str]
    ) -> None:
        """Note that the pass that is about to end was observed.

        Args:
            finish: Returns the operators that ran since a moment in compute time, in ns.
            unrepeatable: Paths of modules that must not be recomputed.
        """
        with self._lock:
            current = self._pass
        if current.records:
            current.operators = finish(current.start_ns)
            current.unrepeatable = frozenset(unrepeatable)
            current.observed = True

    def end_backward(self, end_ns: int | None = None) -> PassRecord | None:
        """End the pass of the backward that has ended.

        Args:
            end_ns: End of that backward in compute time; now, if it is not given.

        Returns:
            The record of the pass; ``None`` if nothing was saved for that backward.
        """
        with self._lock:
            finished = self._pass
            empty = finished.end_ns is not None or not (finished.saved_count or finished.dropped)
            if not empty:
                finished.end_ns = self.compute_ns() if end_ns is None else end_ns
        if empty:
            self.active.end_empty_pass()
            return None
        if self.time.timer is not None and finished.observed:
            finished.retime(self.time.timer.times())
        self._tell(finished)
        limit_bytes = None
        if self.allowance is not None and finished.observed:
            limit_bytes = self._set_limit(self.allowance.settle())
        slow = self._sampler is not None and self._sampler.fell_short()
        return self.active.end_pass(finished, limit_bytes=limit_bytes, slow_codecs=slow)

    def give_way(self, nbytes: int) -> None:
        """Begin to free ``nbytes`` for other parts of Penstock. In any thread; does not wait."""
        if not self._guard.in_child:
            self._eviction.give_way(nbytes, self._pass)

    def end_step(self) -> int | None:
        """End a step; return the new limit of the device budget, if less memory is left than before."""
        limit_bytes = None if self.allowance is None else self.allowance.grown()
        return None if limit_bytes is None else self._set_limit(limit_bytes)

    def _set_limit(self, limit_bytes: int) -> int | None:
        """Limit the budget; return the limit, or ``None`` if it is as it was."""
        if limit_bytes == self.budget.limit_bytes:
            return None
        self.budget.limit_bytes = limit_bytes
        return limit_bytes

    def _tell(self, finished: Pass) -> None:
        """Record the spans of its forward and its backward, waits included."""
        span, end_ns = self._recorder.span, self._recorder.clock.now_ns()
        middle_ns = finished.backward_began_ns or end_ns
        finished.took_ns = end_ns - finished.began_ns
        span(Stage.FORWARD, finished.began_ns, middle_ns, slot=f"pass {finished.index}")
        span(Stage.BACKWARD, middle_ns, end_ns, slot=f"pass {finished.index}")

    def inspect(self, device: str) -> DeviceState:
        """Return what is held and moved at this moment, under the name of the device."""
        transfers, budget = self._transfers, self.budget
        with self._lock:
            slots = held_slots(list(self._table.passes))
            held = {owner: row.nbytes for owner, row in budget.holdings().items() if row.nbytes}
            return DeviceState(
                device=device,
                limit_bytes=budget.limit_bytes,
                used_bytes=budget.used_bytes,
                peak_bytes=budget.peak_bytes,
                holdings=MappingProxyType(held),
                slots=slots,
                small_count=sum(each.state is _SMALL for each in self._table.entries.values()),
                small_bytes=self._table.small_bytes,
                restored_bytes=transfers.restored_bytes,
                writes=transfers.writing,
                writing_bytes=transfers.writing_bytes,
                reads=transfers.reading,
                pass_index=self._pass.index,
                orders=self.orders,
            )

    def drain(self) -> None:
        """Wait for all that moves, where a device that runs behind has a part in it."""
        if self._mover.runs_behind:
            self._transfers.drain()
            self._transfers.transport.drain()

    def use_transport(self, transport: Transport) -> None:
        """Write and read through ``transport`` from now on. It reads the mover's tickets, too."""
        self._transfers.transport = transport

    def close(self) -> None:
        """Save nothing more. A live graph keeps those of its storages that are in memory."""
        if self._guard.in_child:
            return
        with self._lock:
            self._transfers.closed = True
        self.active.kept = frozenset()
