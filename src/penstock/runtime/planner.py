"""From passes to plans: what to do with each slot, and when what was known no longer holds.

The first pass has no plan. Under ``auto`` it keeps what it saves while half the budget is free and
spills the rest, so that a network that fits is never spilled; under ``all`` it spills everything above
the floor. After each pass the planner compares what was saved with what it knows, and makes a new
plan when that has drifted: slots it has never seen, or slots whose offloading freed nothing because
the program itself still held them. A slot that is not in the plan is never an error, only a guess.

Where transfers keep a tier busy for as long as the network, and codecs are to be chosen, the next pass is
sampled: what lossless codecs make of each storage is measured, and the plan is made again with that. Else
they would win nothing, and Numba, which they need, takes memory, and time to compile. It is
sampled once more when codecs no longer make of the bytes what the plan was made for: sparsity changes
during training.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.core.budget import Budget
from penstock.core.config import UNLIMITED
from penstock.core.errors import BudgetError, ConfigError
from penstock.core.locks import Lock
from penstock.core.units import format_bytes
from penstock.observe.recorder import Recorder, Stage
from penstock.plan import policies
from penstock.plan.groups import Group, groups_of
from penstock.plan.machine import Budgets, Machine
from penstock.plan.pipeline import channel_bound
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import CodecSample, PassProfile, Profile, SlotProfile
from penstock.plan.slots import MatchKey, SlotKey
from penstock.runtime.passes import Pass
from penstock.runtime.residency import SlotRecord
from penstock.runtime.sampling import POSITIVE
from penstock.runtime.stores import LEAST_CODEC_BUDGET_BYTES

DRIFT: Final = 0.05
"""Share of a pass's bytes that may be unknown to the plan before it is made anew."""
MAX_KINDS: Final = 8
"""Kinds of passes remembered: an iteration of a GAN has two; more are dynamic shapes."""
FULL_PASSES: Final = 2 * MAX_KINDS
"""Passes of which all slots are recorded, at most, after one that did not look as planned."""
RATIO_DRIFT: Final = 0.15
"""Share of the encoded source bytes by which what they took may differ from what was foreseen."""
MAX_SAMPLED_PASSES: Final = 32
"""So that passes that never come back are not waited for."""
FREE_REPLANS: Final = 5
"""Plans made at once; after these, ever longer waits, so that drift for ever stays cheap."""


class Planner:
    """Decides per slot, under the plan where there is one. Thread-safe.

    Attributes:
        plan: The plan in force, or ``None`` before the first pass is over.
        profile: What it was made from.
        floor_bytes: Storages smaller than this always stay.
        machine: The bandwidths that plans are made for.
        ranks: The plan's order of need by match key, for prefetching.
        replans: Plans made so far.
        wants_samples: Whether what is saved now is to be sampled.
        sure: Slots that the plan keeps, as (module path, ordinal, bytes), of those that it has been asked
            for before. Empty while records of all slots are wanted.
        moves_nothing: Whether nothing will ever be moved: there is a plan, it keeps everything, and
            there is no budget, or no tier, that it could be departed from for.
    """

    def __init__(
        self,
        *,
        policy: str,
        machine: Machine,
        budgets: Budgets,
        budget: Budget,
        floor_bytes: int,
        recorder: Recorder,
        device: str,
        codec: str = "none",
        prepare_codecs: Callable[[], int] = lambda: 0,
    ) -> None:
        """Know nothing yet. Raises ConfigError if there is no such policy.

        ``codec`` is ``"auto"``, ``"none"``, or the name of the one to use wherever it can be.
        ``prepare_codecs`` is called, between passes, before a plan with codecs is adopted: it takes their
        scratch memory from the budget and says how much that is, 0 if there was no room.
        """
        self.policy_name = policy
        self.floor_bytes = floor_bytes
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.ranks: dict[MatchKey, int] = {}
        self.replans = 0
        self._policy = policies.get(policy)
        self.machine = machine
        self._budgets = budgets
        self._budget = budget
        self._recorder = recorder
        self._device = device
        self._lock = Lock()
        self._kinds: list[Pass] = []
        self._held: set[MatchKey] = set()
        self._next_replan = 0
        self.moves_nothing = False
        self.wants_samples = False
        self._auto_codec = codec == "auto"
        self._forced_codec = "" if codec in ("auto", "none") else codec
        self._prepare_codecs = prepare_codecs
        self._sampled_passes = 0
        self._resample = False
        self._channel_bound = False
        self._has_scratch = False
        self._by_module: dict[tuple[str, int], Decision] = {}
        self._decided: dict[SlotKey, Decision | None] = {}
        self.sure: AbstractSet[tuple[str, int, int]] = frozenset()
        self._kept_keys: set[tuple[str, int, int]] = set()
        self._full_passes = 0

    def begin(self) -> None:
        """Take what a codec that is to be used everywhere needs, before anything is saved.

        Raises:
            ConfigError: There is no such codec, or it may not be used everywhere.
            BudgetError: The budget has no room for its scratch memory.
        """
        if self._auto_codec and self._budgets.device_bytes < LEAST_CODEC_BUDGET_BYTES:
            self._do_without_codecs()  # or passes would be sampled for nothing
        name = self._forced_codec
        if not name:
            return
        if registry.get(name).fidelity is Fidelity.POSITIVE:
            raise ConfigError(
                f"codec {name!r} keeps only signs: it is chosen by itself, where that is proven to be"
                " enough; give codec='auto'"
            )
        scratch_bytes = self._take_scratch()
        if not scratch_bytes:
            raise BudgetError(
                f"the device budget of {self._budget.limit_bytes} bytes has no room for what codec"
                f" {name!r} works in; give at least {format_bytes(LEAST_CODEC_BUDGET_BYTES)}, or"
                " codec='none'",
                slot=f"codec {name}",
                limit_bytes=self._budget.limit_bytes,
                least_bytes=LEAST_CODEC_BUDGET_BYTES,
            )

    def _take_scratch(self) -> int:
        """Have codecs opened; what that takes is no longer the plan's to use."""
        scratch_bytes = self._prepare_codecs()
        self._has_scratch = scratch_bytes > 0
        device_bytes = self._budgets.device_bytes
        if device_bytes < UNLIMITED:
            self._budgets = replace(self._budgets, device_bytes=device_bytes - scratch_bytes)
        return scratch_bytes

    def _do_without_codecs(self) -> None:
        self._auto_codec = False
        self._recorder.mark("no_codecs", reason="no room for their scratch memory")

    @property
    def window_bytes(self) -> int | None:
        """What prefetching may hold; ``None`` (as much as the budget) while there is no plan."""
        return None if self.plan is None else self.plan.window_bytes

    def decide(self, record: SlotRecord) -> Decision:
        """What to do with a slot that has just been saved; notes in ``record`` if the plan knows it."""
        key = record.key
        decided = self._decided  # belongs to one plan: a new plan brings a new one
        try:
            known = decided[key]
        except KeyError:
            known = decided[key] = self._look_up(key)
            if known is not None and known.action is Action.KEEP:
                self._kept_keys.add((key.module, key.ordinal, key.nbytes))
        if known is None:
            return self._forced(self._guess(key))
        record.planned = True
        return known

    def _look_up(self, key: SlotKey) -> Decision | None:
        if self.plan is None:
            return None
        known = self.plan.lookup(key) or self._by_module.get((key.module, key.bucket))
        return known and self._forced(known)

    def _forced(self, decision: Decision) -> Decision:
        if not self._forced_codec or decision.action is not Action.OFFLOAD:
            return decision
        return replace(decision, codec=self._forced_codec)

    def _guess(self, key: SlotKey) -> Decision:
        tier = "flash" if self._budgets.flash_bytes else "host"
        if self.policy_name == "keep" or not (
            self._budgets.flash_bytes or self._budgets.host_bytes
        ):
            return Decision(key, Action.KEEP, "", "not in the plan")
        if self.policy_name == "all" or self._budget.free_bytes < self._budget.limit_bytes // 2:
            return Decision(key, Action.OFFLOAD, tier, "not in the plan")
        return Decision(key, Action.KEEP, "", "not in the plan, and half the budget is free")

    def learn(self, finished: Pass) -> bool:
        """Take note of a finished pass; make a new plan if it differs from what is known.

        Returns:
            Whether there is a new plan.
        """
        with self._lock:
            sampled = self._note_samples(finished)
            due = self._drifted(finished) or sampled
            complete = self._want_records(finished, due=due)
            if not (due and complete) or finished.index < self._next_replan:
                self._want_samples(finished.index + 1)
                return False
            self._remember(finished)
            start_ns = self._recorder.clock.now_ns()
            self.profile = self._make_profile()
            self._adopt(self._make_plan(self.profile))
            self._recorder.span(Stage.PLAN, start_ns, self._recorder.clock.now_ns())
            self.replans += 1
            if self.replans >= FREE_REPLANS:
                self._next_replan = finished.index + 2 ** (self.replans - FREE_REPLANS + 1)
            self._want_samples(finished.index + 1)
        self._recorder.mark("replan", plans=self.replans, slots=len(self.profile.slots))
        return True

    def _make_plan(self, profile: Profile) -> Plan:
        plan = self._policy(profile, self.machine, self._budgets)
        if self._has_scratch or not any(decision.codec for decision in plan.decisions):
            return plan
        if not self._take_scratch():
            self._do_without_codecs()
            profile = replace(profile, slots=tuple(replace(s, codecs=()) for s in profile.slots))
        return self._policy(profile, self.machine, self._budgets)

    def _want_samples(self, index: int) -> None:
        """Whether pass ``index`` is to be sampled: only if a plan may be made of what that tells."""
        plan = self.plan
        self.wants_samples = (
            self._auto_codec
            and plan is not None
            and plan.offloaded_bytes > 0
            and index >= self._next_replan
            and self._sampled_passes < MAX_SAMPLED_PASSES
            and self._channel_bound
            and (self._resample or not all(_was_sampled(known) for known in self._kinds))
        )
        wants_records = plan is None or self.wants_samples or self._full_passes
        self.sure = frozenset() if wants_records else self._kept_keys

    def _want_records(self, finished: Pass, *, due: bool) -> bool:
        """Whether a pass has records of all its slots; if they are missed, later ones will."""
        complete = not finished.kept_bytes
        if complete:
            self._full_passes = max(0, self._full_passes - 1)
        elif due or finished.promoted:
            self._full_passes = FULL_PASSES
        return complete

    def _note_samples(self, finished: Pass) -> bool:
        """Whether the pass was sampled for the plan; and whether the next one is to be."""
        sampled = self.wants_samples and any(record.codecs for record in finished.records)
        if self.wants_samples:
            self._sampled_passes += 1
        if sampled:
            self._resample = False
        elif self._ratios_drifted(finished):
            self._resample = True
        return sampled

    def _ratios_drifted(self, finished: Pass) -> bool:
        source = foreseen = found = 0.0
        for record in finished.records:
            decision = None if record.frame_bytes is None else self._decided.get(record.key)
            if decision is not None and record.frame_bytes is not None:
                source += record.key.nbytes
                foreseen += decision.ratio * record.key.nbytes
                found += record.frame_bytes
        return abs(found - foreseen) > RATIO_DRIFT * source

    def _drifted(self, finished: Pass) -> bool:
        unknown, total = 0, finished.kept_bytes
        newly_held = False
        for record in finished.records:
            total += record.key.nbytes
            if not record.planned:
                unknown += record.key.nbytes
            if record.held_elsewhere and record.key.match_key not in self._held:
                self._held.add(record.key.match_key)
                newly_held = True
        return newly_held or unknown > DRIFT * total

    def _remember(self, finished: Pass) -> None:
        """Replace the known pass that is most like this one, or add it as another kind."""
        mine = {record.key.match_key for record in finished.records}
        for place, known in enumerate(self._kinds):
            theirs = {record.key.match_key: record for record in known.records}
            if 2 * len(mine & theirs.keys()) >= len(mine | theirs.keys()):
                for record in finished.records:
                    if not record.codecs and record.key.match_key in theirs:
                        record.codecs = theirs[record.key.match_key].codecs
                self._kinds[place] = finished
                return
        self._kinds = [*self._kinds, finished][-MAX_KINDS:]

    def _make_profile(self) -> Profile:
        slots: list[SlotProfile] = []
        passes: list[PassProfile] = []
        for known in sorted(self._kinds, key=lambda one: one.index):
            # another thread's stall, once over, takes this one's time back to before it
            backward_ns = max(known.backward_start_ns or known.end_ns or 0, known.start_ns)
            end_ns = max(known.end_ns or 0, backward_ns)
            passes.append(PassProfile(known.index, known.start_ns, backward_ns, end_ns))
            for record in known.records:
                key = record.key
                held = record.held_elsewhere or key.match_key in self._held
                needed_ns = record.needed_at_ns
                slots.append(
                    SlotProfile(
                        key=key,
                        pass_index=known.index,
                        saved_at_ns=record.saved_at_ns,
                        needed_at_ns=needed_ns and max(needed_ns, record.saved_at_ns),
                        kind=record.origin.kind,
                        held_elsewhere=held,
                        dtype=record.origin.dtype,
                        small_bytes=record.small_bytes,
                        codecs=_usable(record),
                    )
                )
        return Profile(
            device=self._device,
            slots=tuple(slots),
            passes=tuple(passes),
            small_bytes=max((known.small_bytes for known in self._kinds), default=0),
            small_count=sum(known.small_count for known in self._kinds),
        )

    def _adopt(self, plan: Plan) -> None:
        self._by_module = {
            (decision.key.module, decision.key.bucket): decision
            for decision in reversed(plan.decisions)
        }
        self.ranks = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
        self._channel_bound = self.profile is not None and channel_bound(
            self.profile, self.machine, _placed(self.profile, plan)
        )
        self.plan = plan
        self._decided, self._kept_keys, self._full_passes = {}, set(), 0
        budgets = self._budgets
        self.moves_nothing = not plan.offloaded_bytes and (
            budgets.device_bytes >= UNLIMITED or not (budgets.flash_bytes or budgets.host_bytes)
        )


def _placed(profile: Profile, plan: Plan) -> list[tuple[Group, str]]:
    """What the plan offloads, and to which tier."""
    decisions = ((group, plan.lookup(group.key)) for group in groups_of(profile))
    return [(group, decision.tier) for group, decision in decisions if decision and decision.tier]


def _was_sampled(known: Pass) -> bool:
    """Whether codecs were measured on all but a few of its bytes."""
    missing = sum(record.key.nbytes for record in known.records if not record.codecs)
    return missing <= DRIFT * sum(record.key.nbytes for record in known.records)


def _usable(record: SlotRecord) -> tuple[CodecSample, ...]:
    """Its samples, without the codec of signs where they are not proven to be enough."""
    if record.sign_only_handles == record.handles:
        return record.codecs
    return tuple(sample for sample in record.codecs if sample.codec != POSITIVE)
