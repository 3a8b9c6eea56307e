"""Passes that plans are made from: which are known, the profile of them, and which to look at closer.

[Note: observed passes]
    A pass that a plan is made from is *observed*: its operators are recorded, and nothing is recomputed,
    for what is not saved cannot be planned. So it is with the first one. When a pass drifts under a plan
    that recomputes modules, it does not tell enough: then the next ones are observed, until one tells.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from penstock.plan.profile import CodecSample, PassProfile, Profile, SlotProfile
from penstock.plan.slots import MatchKey
from penstock.runtime.orders import Orders, PassRecord, SlotOutcome
from penstock.runtime.sampling import POSITIVE

DRIFT: Final = 0.05
"""Share of a pass's bytes that may be unknown to the plan before a new one is made."""
MAX_KINDS: Final = 8
"""Kinds of passes remembered: an iteration of a GAN has two; more are dynamic shapes."""
FULL_PASSES: Final = 2 * MAX_KINDS
"""Passes of which all slots are recorded, at most, after one that did not look as planned."""
MAX_OBSERVED_PASSES: Final = 32
"""Passes observed in vain before observing stops: those that are waited for may never come back."""


class KnownPasses:
    """One pass of each kind, the last of it that told the most. Used under the planner's lock.

    Attributes:
        kinds: Their records.
    """

    def __init__(self, device: str) -> None:
        """Start without any; they will run on ``device``."""
        self.kinds: list[PassRecord] = []
        self._device = device
        self._held: set[MatchKey] = set()

    def profile(self, unrepeatable: Collection[str]) -> Profile:
        """Return the profile of a step that has one pass of each kind.

        Args:
            unrepeatable: Paths of the modules that must not be recomputed.
        """
        return profile_of(
            self.kinds, device=self._device, held=self._held, unrepeatable=unrepeatable
        )

    def difference(self, record: PassRecord, orders: Orders) -> str:
        """Return how a pass differs from what the plan was made from; empty: not enough to matter.

        Slots that something else keeps alive are noted for the next profile.
        """
        unknown, total = 0, record.kept_bytes
        newly_held = False
        for slot in record.slots:
            total += slot.key.nbytes
            if not orders.knows(slot.key):
                unknown += slot.key.nbytes
            if slot.held_elsewhere and slot.key.match_key not in self._held:
                newly_held = True
                if not record.kept_bytes:  # else no plan is made of this pass, but of a later one
                    self._held.add(slot.key.match_key)
        if orders.plan is None:
            return "first" if record.slots else ""
        if newly_held:
            return "held"
        return "drift" if unknown > DRIFT * total else ""

    def like(self, record: PassRecord) -> PassRecord | None:
        """Return the known pass that is most like this one, if any is."""
        place = self._place_of(record)
        return None if place is None else self.kinds[place]

    def remember(self, record: PassRecord, orders: Orders) -> None:
        """Replace the known pass that is most like this one, or add it as another kind."""
        place = self._place_of(record)
        if place is None:
            self.kinds = [*self.kinds, record][-MAX_KINDS:]
            return
        as_planned = all(orders.knows(slot.key) for slot in record.slots)
        if self.kinds[place].observed and not record.observed and as_planned:
            return  # only that something is held elsewhere can be new
        codecs = {slot.key.match_key: slot.codecs for slot in self.kinds[place].slots}
        slots = tuple(
            slot if slot.codecs else slot._replace(codecs=codecs.get(slot.key.match_key, ()))
            for slot in record.slots
        )
        self.kinds[place] = replace(record, slots=slots)

    def _place_of(self, record: PassRecord) -> int | None:
        mine = {slot.key.match_key for slot in record.slots}
        for place, known in enumerate(self.kinds):
            theirs = {slot.key.match_key for slot in known.slots}
            if 2 * len(mine & theirs) >= len(mine | theirs):
                return place
        return None


class ProfilingSchedule:
    """Passes that are to be observed, or at least recorded slot by slot. Used under the planner's lock.

    Attributes:
        full_passes: Number of coming passes of which all slots are recorded.
        observe_again: Whether a pass did not tell enough, so that its likes are to be observed.
    """

    def __init__(self, *, recompute: bool) -> None:
        """Start with nothing to look at; ``recompute`` is whether modules may be recomputed."""
        self.full_passes = 0
        self.observe_again = False
        self._recompute = recompute
        self._observed_passes = 0

    def planned(self) -> None:
        """Note that a plan has been made of what was observed."""
        self._observed_passes = 0
        self.observe_again = False

    def note_observed(self, record: PassRecord) -> None:
        """Count a pass if it was observed."""
        self._observed_passes += record.observed

    def note_recorded(self, record: PassRecord, *, as_planned: bool) -> None:
        """Have the next passes recorded in full, if one with unrecorded slots was not ``as_planned``."""
        if not record.kept_bytes:
            self.full_passes = max(0, self.full_passes - 1)
        elif record.promoted or not as_planned:
            self.full_passes = FULL_PASSES

    def wants_observed(self, orders: Orders, kinds: Sequence[PassRecord]) -> bool:
        """Return whether a better plan may be made if the next pass is observed; ``kinds`` are known."""
        if self._observed_passes >= MAX_OBSERVED_PASSES or orders.plan is None:
            return False
        unseen = self._recompute and not all(known.observed for known in kinds)
        return self.observe_again or (unseen and orders.plan.offloaded_bytes > 0)


def was_sampled(record: PassRecord) -> bool:
    """Return whether codecs were measured on all but a few bytes of a pass."""
    missing = sum(slot.key.nbytes for slot in record.slots if not slot.codecs)
    return missing <= DRIFT * sum(slot.key.nbytes for slot in record.slots)


def profile_of(
    records: Sequence[PassRecord],
    *,
    device: str,
    held: AbstractSet[MatchKey] = frozenset(),
    unrepeatable: Collection[str] = (),
) -> Profile:
    """Return the profile of a step that has these passes.

    Args:
        records: Records of one pass of each kind.
        device: Device that they ran on.
        held: Slots that something else was found to keep alive, in any pass.
        unrepeatable: Paths of the modules that must not be recomputed.
    """
    passes = sorted(records, key=lambda one: one.index)
    slots: list[SlotProfile] = []
    for one in passes:
        slots += _slots(one, held, len(slots))
    return Profile(
        device=device,
        slots=tuple(slots),
        passes=tuple(_pass(one) for one in passes),
        small_bytes=max((one.small_bytes for one in passes), default=0),
        small_count=sum(one.small_count for one in passes),
        operators=tuple(
            replace(each, pass_index=one.index) for one in passes for each in one.operators
        ),
        unrepeatable=tuple(sorted(unrepeatable)),
    )


def _pass(one: PassRecord) -> PassProfile:
    # another thread's stall, once over, takes this one's time back to before it
    backward_ns = max(one.backward_start_ns or one.end_ns, one.start_ns)
    return PassProfile(one.index, one.start_ns, backward_ns, max(one.end_ns, backward_ns))


def _slots(one: PassRecord, held: AbstractSet[MatchKey], first_place: int) -> list[SlotProfile]:
    """Return the slots of a pass; the first of them is number ``first_place`` of the profile.

    What is small and saved after the last of them is there when backward begins. How much of it is left
    when each of them is needed is not known; most of it, if it was saved last, is freed first. So it
    counts beside the first one that is needed, and beside no other.
    """
    slots = [_slot(one, slot, held, first_place) for slot in one.slots]
    needed = [
        (slot.needed_at_ns, -i) for i, slot in enumerate(slots) if slot.needed_at_ns is not None
    ]
    if needed:
        first = -min(needed)[1]
        at_need = max(one.small_bytes, slots[first].small_bytes or 0)
        slots[first] = replace(slots[first], small_bytes_at_need=at_need)
    return slots


def _slot(
    one: PassRecord, slot: SlotOutcome, held: AbstractSet[MatchKey], first_place: int
) -> SlotProfile:
    needed_ns = slot.needed_at_ns
    return SlotProfile(
        key=slot.key,
        pass_index=one.index,
        saved_at_ns=slot.saved_at_ns,
        needed_at_ns=needed_ns and max(needed_ns, slot.saved_at_ns),
        kind=slot.kind,
        held_elsewhere=slot.held_elsewhere or slot.key.match_key in held,
        dtype=slot.dtype,
        small_bytes=slot.small_bytes,
        codecs=_usable(slot),
        producer=slot.producer,
        recipe=() if slot.source is None else slot.recipe,
        source=None if slot.source is None else first_place + slot.source,
    )


def _usable(slot: SlotOutcome) -> tuple[CodecSample, ...]:
    """Return a slot's samples, without the codec of signs where they are not proven to be enough."""
    if slot.signs_suffice:
        return slot.codecs
    return tuple(sample for sample in slot.codecs if sample.codec != POSITIVE)
