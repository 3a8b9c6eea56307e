"""The two values in which planner and executor meet: orders for passes, and the record of a pass.

A plan is compiled once into :class:`Orders`. While a pass runs, whoever moves storages only looks things
up there. When the pass is over, all that it has shown goes to the planner as a :class:`PassRecord`. Both
are frozen, so that neither side can ask, or change, the other.

[Note: slots without a plan]
    The first pass has no plan, and nobody knows what it will save. Under ``all``, or once half of the
    device budget is used, its slots are offloaded, as they are: codecs cost a core. But bytes as they are
    may be more than tier and device can hold where encoded ones are not. So from when slots for half of
    the tier were offloaded, the pass is sampled, and what is offloaded is encoded by the codec that was
    just measured to make it shortest. The first plan then can count on codecs as well.

[Note: shortage]
    Where bytes as they are have no room, a plan counts on what codecs left of samples, and encodes no
    more than it must (:mod:`penstock.plan.placement`). Should tiers be full all the same, there is
    *shortage* until the pass is over: what they have refused is encoded by what made it shortest, and so
    is whatever else would go to a tier as it is. The next pass then is sampled, and planned for what was
    found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from penstock.codec import registry
from penstock.core.config import UNLIMITED
from penstock.core.errors import PlanError
from penstock.core.units import format_bytes
from penstock.observe.suggestion import Suggestion
from penstock.plan.machine import Budgets
from penstock.plan.operators import Operator
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.slots import MatchKey, SlotKey
from penstock.runtime.policy_request import PolicyRequest
from penstock.runtime.sampling import POSITIVE
from penstock.runtime.storage import INPUT

SHORTER: Final = 0.9
"""Largest ratio at which a codec is worth its time for a slot that no plan encodes."""

ExactKey = tuple[str, int, int]
"""(module path, ordinal, bytes) of a slot."""


# -- up -------------------------------------------------------------------------------------------


class SlotOutcome(NamedTuple):
    """Facts that one pass found out about one slot. Times are compute time, in ns."""

    key: SlotKey
    kind: str
    """Name of the type of the module that saved it."""
    dtype: str
    """Element type of the saved tensor, as ``"float32"``."""
    saved_at_ns: int
    needed_at_ns: int | None = None
    """Time at which backward first asked for it; ``None`` if it never did."""
    waited_ns: int = 0
    """Time for which backward waited until it was read."""
    small_bytes: int = 0
    """Bytes below the floor that were alive when it was saved."""
    held_elsewhere: bool = False
    """True if something else kept it in memory, so that offloading it freed nothing."""
    signs_suffice: bool = False
    """True if backward is proven to ask only which of its elements are above zero."""
    codecs: tuple[CodecSample, ...] = ()
    """Results of codecs on a sample of it, if one was taken."""
    frame_bytes: int | None = None
    """Bytes that it took in a tier, if it was encoded."""
    producer: str | None = None
    """As in ``SlotProfile``; known of observed passes."""
    recipe: tuple[str, ...] = ()
    """As in ``SlotProfile``; known of observed passes."""
    source: int | None = None
    """Index, among the slots of the pass, of the recipe's input."""


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Everything that the planner is told about one finished pass. Times are compute time, in ns."""

    index: int
    """Number of the pass in its session, from 1."""
    start_ns: int
    backward_start_ns: int | None
    """Time at which the first of its storages was needed; ``None`` if none was."""
    end_ns: int
    slots: tuple[SlotOutcome, ...] = ()
    """Slots in the order of saving, without those that were kept unrecorded."""
    kept_bytes: int = 0
    """Bytes of the slots that were kept unrecorded, by ``Orders.kept``."""
    promoted: bool = False
    """True if kept slots had to be made ready for offloading, because room was needed."""
    small_bytes: int = 0
    """Most bytes below the floor that were alive at once."""
    small_count: int = 0
    """Number of storages saved below the floor."""
    window_full: bool = False
    """True if a read had to wait because the read window was full."""
    observed: bool = False
    """True if its operators were recorded, so that recomputation can be planned."""
    operators: tuple[Operator, ...] = ()
    """Operators that ran in it, if it was observed."""
    unrepeatable: frozenset[str] = frozenset()
    """Paths of modules that were found unfit for recomputation."""
    sampled: bool = False
    """True if codecs were to be measured on its slots, or on the rest of them."""
    shortage: bool = False
    """True if tiers were full; see [Note: shortage]."""
    slow_codecs: bool = False
    """True if codecs were far slower than measured."""
    scratch_bytes: int | None = None
    """Scratch memory that was taken for codecs during the pass; 0 if there was no room for it; ``None``
    if none was asked for."""
    limit_bytes: int | None = None
    """New limit of the device budget; ``None`` if it is as it was."""
    took_ns: int = 0
    """Time that it took by the recorder's clock, with all waits."""


# -- down -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DefaultRule:
    """Treatment of slots that no plan knows; see [Note: slots without a plan]."""

    tier: str = ""
    """Tier that they go to; ``""``: they are kept."""
    capacity_bytes: int = 0
    """Capacity of that tier."""
    always: bool = False
    """True if they are offloaded even while half of the device budget is free."""
    forced_codec: str = ""
    """Codec for everything that is offloaded; ``""``: as measured."""

    @classmethod
    def of(cls, policy: str, budgets: Budgets, forced_codec: str = "") -> DefaultRule:
        """Return the rule under a policy."""
        tier = "flash" if budgets.flash_bytes else "host"
        capacity_bytes = budgets.flash_bytes or budgets.host_bytes
        if policy == "keep" or not capacity_bytes:
            return cls()
        return cls(tier, capacity_bytes, policy == "all", forced_codec)

    def crowds(self, offloaded_bytes: int) -> bool:
        """Return whether slots of so many bytes take more than half of the tier."""
        return 2 * offloaded_bytes > self.capacity_bytes

    def decide(
        self,
        key: SlotKey,
        *,
        half_free: bool,
        offloaded_bytes: int,
        codecs: Sequence[CodecSample] = (),
    ) -> Decision:
        """Decide on a slot.

        Args:
            key: The slot.
            half_free: Whether half of the device budget is free.
            offloaded_bytes: Bytes that were offloaded by this rule in this pass before.
            codecs: Results of codecs on a sample of it, if they may be used. That of ``positive`` does
                not count: it is not proven yet that signs are enough.
        """
        if not self.tier:
            return Decision(key, Action.KEEP, "", "not in the plan")
        if half_free and not self.always:
            return Decision(key, Action.KEEP, "", "not in the plan, and half the budget is free")
        if self.forced_codec:
            return Decision(key, Action.OFFLOAD, self.tier, "not in the plan", self.forced_codec)
        found = shortest(codecs)
        if found is None or not self.crowds(offloaded_bytes + key.nbytes):
            return Decision(key, Action.OFFLOAD, self.tier, "not in the plan")
        why = "not in the plan, and half of the tier is given away"
        return Decision(key, Action.OFFLOAD, self.tier, why, found.codec, found.ratio)


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """Everything that the executor is told for the passes to come. Without arguments: keep everything.

    Compile a plan with :meth:`of`; the planner sets the other fields with ``dataclasses.replace``.
    """

    plan: Plan | None = None
    """The plan; ``None`` before the first pass is over."""
    plan_number: int = 0
    """Number of plans made so far. It stays where only the reads of a plan are moved."""
    exact: Mapping[SlotKey, Decision] = field(default_factory=dict)
    """Decision by slot, without those whose modules are recomputed: these are not saved."""
    decisions: Mapping[MatchKey, Decision] = field(default_factory=dict)
    """The same by match key, for slots of about the size that the plan knows."""
    similar: Mapping[tuple[str, int], Decision] = field(default_factory=dict)
    """Decision by (module path, size bucket), for ordinals that the plan does not have."""
    recomputed: AbstractSet[tuple[str, int]] = frozenset()
    """Slots of recomputed modules, of whatever size, as (module path, ordinal)."""
    ranks: Mapping[MatchKey, int] = field(default_factory=dict)
    """Place in the order of need, by match key."""
    triggers: Mapping[MatchKey, int] = field(default_factory=dict)
    """Place in the order of need that backward must have come to before a slot is read, by match key."""
    first_ranks: Mapping[str, int] = field(default_factory=dict)
    """Place at which backward first asks for anything of a recomputed module, by its path."""
    window_bytes: int | None = None
    """Bytes that restored storages may hold together; ``None``: no limit but the budget."""
    kept: frozenset[ExactKey] = frozenset()
    """Slots to keep without a record. Empty while records of all slots are wanted."""
    moves_nothing: bool = False
    """True if nothing will ever be moved: the plan keeps everything, and there is no budget, or no tier,
    that it could be departed from for."""
    default: DefaultRule = DefaultRule()
    """Treatment of slots that the plan does not know."""
    strict: bool = False
    """True if a slot that the plan does not know is a PlanError: a user plan, in its first pass."""
    observes: bool = False
    """True if the operators of the next pass are to be recorded."""
    samples: bool = False
    """True if codecs are to be measured on the slots of the next pass."""
    samples_when_crowded: bool = False
    """True if sampling begins in a pass when half of the default tier is taken."""
    can_encode: bool = False
    """True if codecs may be chosen as measured, and have their scratch memory."""
    shortest: Mapping[MatchKey, CodecSample] = field(default_factory=dict)
    """Codec that made a slot shortest when it was last sampled, by match key."""
    request: PolicyRequest | None = None
    """Question that the plan answers; ``None`` without a plan, and for a user plan."""
    notes: tuple[str, ...] = ()
    """Notes on the plan for the user."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        *,
        budgets: Budgets,
        profile: Profile | None = None,
        forced_codec: str = "",
    ) -> Orders:
        """Compile a plan.

        Args:
            plan: The plan to follow.
            budgets: What there is, whatever the plan was made for.
            profile: The profile that it was made from; ``None`` for a user plan, which then has no
                fallback codecs.
            forced_codec: Codec for everything that is offloaded; ``""``: as planned.
        """
        saved = [_forced(d, forced_codec) for d in plan.decisions if _is_saved(d)]
        found = () if profile is None else profile.slots
        samples = ((slot.key.match_key, shortest(slot.codecs)) for slot in found)
        bounded = budgets.device_bytes < UNLIMITED and (budgets.flash_bytes or budgets.host_bytes)
        return cls(
            plan=plan,
            exact={d.key: d for d in saved if not d.key.module.endswith(INPUT)},
            decisions={d.key.match_key: d for d in saved},
            similar={
                (d.key.module, d.key.bucket): d
                for d in reversed(saved)
                if d.action is not Action.RECOMPUTE
            },
            recomputed=frozenset(
                (d.key.module, d.key.ordinal) for d in plan.decisions if not _is_saved(d)
            ),
            ranks={key.match_key: rank for rank, key in enumerate(plan.need_order)},
            triggers={
                d.key.match_key: d.prefetch_at for d in plan.decisions if d.prefetch_at is not None
            },
            first_ranks=_first_ranks(plan),
            window_bytes=plan.window_bytes,
            moves_nothing=not (plan.offloaded_bytes or plan.recomputed or bounded),
            shortest={match: sample for match, sample in samples if sample is not None},
            notes=plan.notes,
        )

    def decision_for(self, key: SlotKey) -> Decision | None:
        """Return the decision for a saved slot, or for one like it in the same module; None: unknown."""
        found = self.exact.get(key)
        if found is not None:
            return found
        if key.module.endswith(INPUT):
            return Decision(key, Action.KEEP, "", "input of a recomputed module")
        match = key.match_key
        known = self.decisions.get(match)
        if known is not None or self.plan is None:
            return known
        if self.plan.lookup_match(match) is not None:
            return None  # to be recomputed, but its module was not
        return self.similar.get((key.module, match[2]))

    def knows(self, key: SlotKey) -> bool:
        """Return whether the plan says what becomes of a slot."""
        return (key.module, key.ordinal) in self.recomputed or self.decision_for(key) is not None

    def check(self, key: SlotKey) -> None:
        """Raise PlanError if the plan does not know a slot that is being saved, of just this size."""
        assert self.plan is not None, "only plans are checked"
        known = self.plan.lookup(key)
        if (known is not None and known.key.nbytes == key.nbytes) or key.module.endswith(INPUT):
            return
        named = (d.key for d in self.plan.decisions)
        other = next((k for k in named if (k.module, k.ordinal) == (key.module, key.ordinal)), None)
        name = self.plan.policy
        if other is not None:
            raise PlanError(
                f"plan {name!r} is for another batch or model: {key.module or '<root>'} saves"
                f" {key.nbytes} bytes ({format_bytes(key.nbytes)}) as its slot {key.ordinal}, the plan"
                f" says {other.nbytes} ({format_bytes(other.nbytes)}); plan anew for this batch"
            )
        raise PlanError(
            f"plan {name!r} is for another model: slot {key} of {key.nbytes} bytes is saved, and the plan"
            " does not know it; plan anew"
        )

    def fallback_codec(self, key: SlotKey, dtype: str, codecs: Sequence[CodecSample] = ()) -> str:
        """Return the codec for a slot in a shortage; ``""`` if none makes it shorter.

        Args:
            key: The slot.
            dtype: Element type of the slot.
            codecs: Results of codecs on a sample that was taken in this pass.
        """
        found = shortest(codecs) or self.shortest.get(key.match_key)
        if found is None or not registry.get(found.codec).accepts(dtype):
            return ""
        return found.codec

    def min_budget_bytes(self) -> int | None:
        """Return the smallest device budget that does for a whole step as profiled, if one is known.

        Takes a replay or more.
        """
        return None if self.request is None else self.request.min_budget_bytes()

    def suggestion(self) -> Suggestion | None:
        """Return what other device budgets would cost; ``None`` without a profile or a tier."""
        return None if self.request is None else self.request.suggestion()


def shortest(codecs: Sequence[CodecSample]) -> CodecSample | None:
    """Return the lossless codec that leaves the fewest bytes; None: none makes them few enough."""
    return min(
        (sample for sample in codecs if sample.codec != POSITIVE and sample.ratio <= SHORTER),
        key=lambda sample: (sample.ratio, sample.codec),
        default=None,
    )


def _is_saved(decision: Decision) -> bool:
    """Return whether a slot is saved at all: not if its module is recomputed."""
    return decision.action is not Action.RECOMPUTE or bool(decision.recipe)


def _forced(decision: Decision, codec: str) -> Decision:
    if not codec or decision.action is not Action.OFFLOAD:
        return decision
    return replace(decision, codec=codec)


def _first_ranks(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for rank, key in enumerate(plan.need_order if plan.recomputed else ()):
        path = key.module
        while path and path not in plan.recomputed:
            path = path.rpartition(".")[0]
        if path:
            found.setdefault(path, rank)
    return found
