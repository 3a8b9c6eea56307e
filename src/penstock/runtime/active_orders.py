"""The orders in force, and what the running pass adds to them: the rules that depend on its state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from penstock.core.locks import Lock
from penstock.observe.recorder import Recorder
from penstock.plan.plan import Decision
from penstock.runtime.orders import ExactKey, Orders, PassRecord, SlotOutcome
from penstock.runtime.storage import INPUT, Encoding, Pass, SlotRecord
from penstock.store.account import Account


class ActiveOrders:
    """Applies orders to what one device saves. Thread-safe, without the runtime's lock.

    Hot paths read the attributes. Where threads race for a count of bytes it may be off by a few.

    Attributes:
        orders: The orders in force.
        kept: Those of their slots to keep without a record; none once the executor is closed.
        observing: Whether the operators of this pass are recorded.
        sampling: Whether codecs are measured on what is saved now.
        crowded: Whether sampling has to begin, for half of the default tier is taken.
        shortage: Whether tiers were found full in this pass; set in any thread.
    """

    def __init__(
        self,
        *,
        budget: Account,
        recorder: Recorder,
        open_codecs: Callable[[], int] = lambda: 0,
    ) -> None:
        """Keep everything, until there are orders.

        Args:
            budget: The device's; the default rule asks how much of it is free.
            recorder: Counts shortages.
            open_codecs: Takes the scratch memory of codecs; returns its bytes, 0 if there is no room.
        """
        self.orders = Orders()
        self.kept: AbstractSet[ExactKey] = frozenset()
        self.observing = self.sampling = self.crowded = self.shortage = False
        self._budget = budget
        self._recorder = recorder
        self._open_codecs = open_codecs
        self._can_encode = False
        self._scratch_bytes: int | None = None
        self._default_bytes = 0
        self._lock = Lock()

    def follow(self, orders: Orders) -> None:
        """Follow other orders from now on."""
        self.orders = orders
        self.kept = orders.kept
        self.observing = orders.observes
        self.sampling = orders.samples
        self._can_encode = orders.can_encode

    def end_pass(
        self, finished: Pass, *, limit_bytes: int | None = None, slow_codecs: bool = False
    ) -> PassRecord:
        """Return the record of a finished pass, and forget its state.

        Args:
            finished: The pass; ``end_ns`` is set.
            limit_bytes: New limit of the device budget, if it has one.
            slow_codecs: Whether codecs were far slower than measured.
        """
        record = replace(
            record_of(finished),
            sampled=self.sampling,
            shortage=self.shortage,
            slow_codecs=slow_codecs,
            scratch_bytes=self._scratch_bytes,
            limit_bytes=limit_bytes,
        )
        self.observing, self.sampling = self.orders.observes, self.orders.samples
        self.crowded = self.shortage = False
        self._scratch_bytes = None
        self._default_bytes = 0
        return record

    def end_empty_pass(self) -> None:
        """Stop observing, where there is no plan: nothing was saved that one could be made from."""
        if self.orders.plan is None:
            self.observing = False

    # -- decisions --------------------------------------------------------------------------------

    def decide(self, record: SlotRecord) -> Decision:
        """Decide on a slot that has just been saved. Raises PlanError if a user plan is for another."""
        orders = self.orders
        if orders.strict:
            orders.check(record.key)
        known = orders.decision_for(record.key)
        return self.decide_unplanned(record) if known is None else known

    def decide_input(self, record: SlotRecord) -> Decision:
        """Decide on the input of a recomputed module, now that it has its name."""
        if record.key.module.endswith(INPUT):
            return self.decide_unplanned(record)
        return self.decide(record)

    def decide_unplanned(self, record: SlotRecord) -> Decision:
        """Decide on a slot for which the plan has no decision, or none that can be carried out."""
        orders, key = self.orders, record.key
        decision = orders.default.decide(
            key,
            half_free=self._budget.free_bytes >= self._budget.limit_bytes // 2,
            offloaded_bytes=self._default_bytes,
            codecs=record.codecs if self._can_encode else (),
        )
        if decision.tier:
            self._default_bytes += key.nbytes
            self.crowded = (
                orders.samples_when_crowded
                and not self.sampling
                and self._scratch_bytes != 0
                and orders.default.crowds(self._default_bytes)
            )
        return decision

    def sample_now(self) -> None:
        """Sample the rest of a crowded pass. Called while nothing is on its way out."""
        with self._lock:
            self.crowded = False
            if not self._can_encode:
                self._scratch_bytes = self._open_codecs()
                self._can_encode = self._scratch_bytes > 0
            self.sampling = self._can_encode

    # -- shortage ---------------------------------------------------------------------------------

    def encoding_when_refused(self, record: SlotRecord) -> Encoding | None:
        """Return an encoding for a slot that no tier has room for as it is; None if there is none."""
        if self._can_encode and not self.shortage:
            self.shortage = True
            self._recorder.count("shortage")
        return self.fallback_encoding(record)

    def fallback_encoding(self, record: SlotRecord) -> Encoding | None:
        """Return an encoding for a slot that was to be offloaded as it is, in a ``shortage``."""
        if not self._can_encode:
            return None
        dtype = record.origin.dtype
        codec = self.orders.fallback_codec(record.key, dtype, record.codecs)
        return Encoding(codec, dtype) if codec else None


def record_of(finished: Pass) -> PassRecord:
    """Return the record of a pass that has ended, without what its orders add."""
    assert finished.end_ns is not None, f"pass {finished.index} has not ended"
    return PassRecord(
        index=finished.index,
        start_ns=finished.start_ns,
        backward_start_ns=finished.backward_start_ns,
        end_ns=finished.end_ns,
        took_ns=finished.took_ns,
        slots=_outcomes(finished.records),
        kept_bytes=finished.kept_bytes,
        promoted=finished.promoted,
        small_bytes=finished.small_bytes,
        small_count=finished.small_count,
        window_full=finished.window_full,
        observed=finished.observed,
        operators=finished.operators,
        unrepeatable=finished.unrepeatable,
    )


def _outcomes(records: Sequence[SlotRecord]) -> tuple[SlotOutcome, ...]:
    has_source = any(record.source is not None for record in records)
    places = {id(record): place for place, record in enumerate(records)} if has_source else {}
    return tuple(
        SlotOutcome(
            record.key,
            record.origin.kind,
            record.origin.dtype,
            record.saved_at_ns,
            record.needed_at_ns,
            record.waited_ns,
            record.small_bytes,
            record.held_elsewhere,
            record.sign_only_handles == record.handles,
            record.codecs,
            record.frame_bytes,
            record.producer,
            record.recipe,
            None if record.source is None else places.get(id(record.source)),
        )
        for record in records
    )
