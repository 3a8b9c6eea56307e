"""From passes to plans: what to do with each slot, and when what was known no longer holds.

The first pass has no plan. Under ``auto`` it keeps what it saves while half the budget is free and
spills the rest, so that a network that fits is never spilled; under ``all`` it spills everything above
the floor (:mod:`.guesses`). After each pass the planner compares what was saved with what it knows, and
makes a new plan when that has drifted: slots it has never seen, or slots whose offloading freed nothing
because the program itself still held them. A slot that is not in the plan is never an error, only a
guess. A plan whose reads come late is improved (:mod:`.feedback`).

[Note: observed passes]
    A pass that a plan is made from is *observed*: who made what is noted, and nothing is run again, for
    what is not saved cannot be planned. So it is with the first one. When a pass drifts under a plan that
    runs modules again, it does not tell enough: then the next ones are observed, until one tells.

Where transfers keep a tier busy for as long as the network, or the tiers have not room enough for bytes
as they are, and codecs are to be chosen, the next pass is sampled: what lossless codecs make of each
storage is measured, and the plan is made again with that. Else they would win nothing, and Numba, which
they need, takes memory, and time to compile. It is sampled once more when codecs no longer make of the
bytes what the plan was made for: sparsity changes during training. What goes raw tells nothing of that,
so one such slot is looked at every few passes (:mod:`.second_looks`).
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
from penstock.observe.counters import MOVED_EARLIER, PLANS, UNKNOWN, WINDOW_GROWN
from penstock.observe.foreseen import PREDICTION, Foreseen
from penstock.observe.recorder import Recorder, Stage
from penstock.plan import policies
from penstock.plan.groups import Group, groups_of
from penstock.plan.machine import Budgets, Machine
from penstock.plan.pipeline import channel_bound
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import Profile
from penstock.plan.slots import MatchKey, SlotKey
from penstock.runtime.feedback import improve
from penstock.runtime.foresight import foresee
from penstock.runtime.given import check_slot, check_tiers, note_on_budget
from penstock.runtime.guesses import Guesses
from penstock.runtime.passes import INPUT, Pass
from penstock.runtime.profiles import profile_of
from penstock.runtime.residency import SlotRecord
from penstock.runtime.second_looks import SecondLooks
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

MAX_IMPROVEMENTS: Final = 32
"""Times that a plan's reads are moved earlier."""


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
        crowded: Whether the rest of this pass should be sampled, for a tier is filling up.
        second_look: The one slot that is to be sampled in this pass, if any is.
        triggers: When, by match key, reading a slot back may begin, as a place in the order of need.
        unrepeatable: Paths of the modules that are known not to be fit for being run again.
        observing: Whether the pass that begins next is observed; see [Note: observed passes].
        sure: Slots that the plan keeps, as (module path, ordinal, bytes), of those that it has been asked
            for before. Empty while records of all slots are wanted.
        foreseen: What a replay says of the plan in force; ``None`` before there is one, or where no
            profile tells enough.
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
        recompute: bool = False,
        plan: Plan | None = None,
    ) -> None:
        """Know nothing yet, but for a ``plan`` that is given. Raises ConfigError: no such policy.

        ``codec`` is ``"auto"``, ``"none"``, or the name of the one to use wherever it can be.
        ``prepare_codecs`` is called, between passes, before a plan with codecs is adopted: it takes their
        scratch memory from the budget and says how much that is, 0 if there was no room.
        ``recompute`` is whether modules may be run again. A given plan stays in force as it is, and
        ``policy`` is then only a name; what differs from it in the first pass is a PlanError.
        """
        self.policy_name = policy
        self.floor_bytes = floor_bytes
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.ranks: dict[MatchKey, int] = {}
        self.replans = 0
        self.triggers: dict[MatchKey, int] = {}
        self.unrepeatable: set[str] = set()
        self._given = plan
        self._policy = policies.get(policy) if plan is None else None
        self.machine = machine
        self._budgets = budgets
        self._budget = budget
        self._recorder = recorder
        self._device = device
        self._lock = Lock()
        self._kinds: list[Pass] = []
        self._held: set[MatchKey] = set()
        self._next_replan = 0
        self.foreseen: Foreseen | None = None
        self.moves_nothing = self.wants_samples = self.crowded = False
        self.second_look: SlotKey | None = None
        self._second_looks = SecondLooks()
        self._guesses = Guesses(policy, budgets, budget)
        self._tight = False
        self._auto_codec = codec == "auto"
        self._forced_codec = "" if codec in ("auto", "none") else codec
        self._prepare_codecs = prepare_codecs
        self._sampled_passes = 0
        self._resample = False
        self._channel_bound = False
        self._has_scratch = False
        self._by_module: dict[tuple[str, int], Decision] = {}
        self._decided: dict[SlotKey, Decision | None] = {}
        self._recompute = recompute
        self._made_again: frozenset[tuple[str, int]] = frozenset()
        self._first_ranks: dict[str, int] = {}
        self._observed_passes = 0
        self._observe_again = False
        self._improvements = 0
        self._matched = False
        self.sure: AbstractSet[tuple[str, int, int]] = frozenset()
        self._kept_keys: set[tuple[str, int, int]] = set()
        self._full_passes = 0
        self.observing = plan is None
        if plan is not None:
            check_tiers(plan, budgets)
            self._adopt(plan)

    def begin(self) -> None:
        """Take what a codec that is to be used everywhere needs, before anything is saved.

        Raises:
            ConfigError: There is no such codec, or it may not be used everywhere.
            BudgetError: The budget has no room for its scratch memory.
        """
        if self._auto_codec and self._budget.limit_bytes < LEAST_CODEC_BUDGET_BYTES:
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
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the plan in force."""
        about = () if self._given is None else note_on_budget(self._given, self._budgets)
        return about if self.plan is None else (*about, *self.plan.notes)

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
            return self._guess(record)
        record.planned = True
        return known

    def _look_up(self, key: SlotKey) -> Decision | None:
        if key.module.endswith(INPUT):
            return Decision(key, Action.KEEP, "", "input of a module that is run again")
        if self.plan is None:
            return None
        if self._given is not None and not self._matched:
            check_slot(self._given, key)
        known = self.plan.lookup(key) or self._by_module.get((key.module, key.bucket))
        if known is None or known.action is Action.RECOMPUTE:
            return None
        return self._forced(known)

    def decide_input(self, record: SlotRecord) -> Decision:
        """What to do with the input of a module that is run again, now that it has its name."""
        if record.key.module.endswith(INPUT):
            return self._guess(record)
        return self.decide(record)

    def recomputes(self, module: str, ordinal: int) -> bool:
        """Whether the plan has a slot made again, of whatever size."""
        return (module, ordinal) in self._made_again

    def too_early(self, key: SlotKey, place: int) -> bool:
        """Whether reading a slot back must wait until backward has come further than ``place``."""
        return bool(self.triggers) and self.triggers.get(key.match_key, -1) > place

    def place_of(self, path: str) -> int | None:
        """Where, in the plan's order of need, backward first asks for what is made again at ``path``."""
        return self._first_ranks.get(path)

    def _forced(self, decision: Decision) -> Decision:
        if not self._forced_codec or decision.action is not Action.OFFLOAD:
            return decision
        return replace(decision, codec=self._forced_codec)

    def _guess(self, record: SlotRecord) -> Decision:
        guesses = self._guesses
        codecs = record.codecs if self._has_scratch and self._auto_codec else ()
        decision = guesses.decide(record.key, codecs)
        self.crowded = (
            guesses.crowded and self._auto_codec and self.plan is None and not self.wants_samples
        )
        return self._forced(decision)

    def sample_now(self) -> None:
        """Because ``crowded``: sample the rest of this pass. Called while nothing is on its way out."""
        with self._lock:
            self.crowded = False
            self.wants_samples = self._has_scratch or self._take_scratch() > 0
            if not self.wants_samples:
                self._do_without_codecs()

    def learn(self, finished: Pass) -> bool:
        """Take note of a finished pass; make a new plan if it differs from what is known.

        Returns:
            Whether there is a new plan.
        """
        with self._lock:
            if self._given is not None:
                self._learn_given(finished)
                self._want_records()
                return False
            reason = self._why_replan(finished)
            self._count_full(finished, missed=bool(reason))
            if finished.kept_bytes:
                reason = ""  # it has no records of all its slots: the next ones will
            if reason and finished.index >= self._next_replan:
                self._replan(finished, reason)
            else:
                reason = ""
                self._improve(finished)
            self._guesses.end_pass()
            self._want_samples(finished.index + 1)
            self._want_second_look()
            self._want_observation(finished.index + 1)
            self._want_records()
        return bool(reason)

    def _learn_given(self, finished: Pass) -> None:
        self._matched = True
        unknown = sum(not self._is_known(record) for record in finished.records)
        if unknown:
            self._recorder.count(UNKNOWN, unknown)
        if finished.index <= FULL_PASSES and not finished.kept_bytes:
            self._foresee_given(finished)
        self._improve(finished)

    def _foresee_given(self, finished: Pass) -> None:
        """Replay a given plan on the passes that it has met; each kind is told of once."""
        assert self.plan is not None
        if self._place_of_kind(finished) is None:
            self._remember(finished)
            self._foresee(self._profile())

    def _why_replan(self, finished: Pass) -> str:
        """Why a new plan is to be made of a finished pass; empty if not."""
        sampled = self._note_samples(finished)
        self._observed_passes += finished.observed
        drift = self._drifted(finished)
        if drift == "drift" and self.plan and self.plan.recomputed and not finished.observed:
            self._observe_again = True
            return ""
        if drift:
            return drift
        if sampled:
            return "sampled"
        return "observed" if finished.observed and self._tells_more(finished) else ""

    def _tells_more(self, finished: Pass) -> bool:
        """Whether a pass of its kind was only known unobserved."""
        place = self._place_of_kind(finished)
        return place is not None and not self._kinds[place].observed

    def _replan(self, finished: Pass, reason: str) -> None:
        if finished.observed or not (self.plan and self.plan.recomputed):
            self._remember(finished)
        start_ns = self._recorder.clock.now_ns()
        self.profile = self._profile()
        self._adopt(self._make_plan(self.profile))
        self._recorder.span(Stage.PLAN, start_ns, self._recorder.clock.now_ns())
        self._recorder.count(f"{PLANS}.{reason}")
        self.replans += 1
        self._improvements = self._observed_passes = 0
        self._observe_again = False
        if self.replans >= FREE_REPLANS:
            self._next_replan = finished.index + 2 ** (self.replans - FREE_REPLANS + 1)
        self._recorder.mark(
            "replan", plans=self.replans, slots=len(self.profile.slots), reason=reason
        )
        self._foresee(self.profile)

    def _profile(self) -> Profile:
        return profile_of(
            self._kinds, device=self._device, held=self._held, unrepeatable=self.unrepeatable
        )

    def _foresee(self, profile: Profile) -> None:
        """Replay the plan that is in force from now on; for the summary and the log."""
        assert self.plan is not None
        now_ns = self._recorder.clock.now_ns()
        self.foreseen = foresee(profile, self.plan, self.machine, since_ns=now_ns)
        if self.foreseen is not None:
            self._recorder.mark(PREDICTION, **self.foreseen.to_fields())

    def _want_observation(self, index: int) -> None:
        """Whether pass ``index`` is to be observed: only if a plan may be made of what that tells."""
        unseen = self._recompute and not all(known.observed for known in self._kinds)
        self.observing = (
            self.plan is None
            or self.wants_samples
            or (
                index >= self._next_replan
                and self._observed_passes < MAX_SAMPLED_PASSES
                and (self._observe_again or (unseen and self.plan.offloaded_bytes > 0))
            )
        )

    def _improve(self, finished: Pass) -> None:
        """Have reads begin earlier that came late, a limited number of times for each plan."""
        plan = self.plan
        if plan is None or self._improvements >= MAX_IMPROVEMENTS or finished.observed:
            return
        found = improve(plan, finished)
        if found is None:
            return
        self._improvements += 1
        kept_keys, full_passes = self._kept_keys, self._full_passes
        self._adopt(found.plan)
        self._kept_keys, self._full_passes = kept_keys, full_passes  # what stays is the same
        if found.moved:
            self._recorder.count(MOVED_EARLIER, found.moved)
        if found.window_grown_bytes:
            self._recorder.count(WINDOW_GROWN, found.window_grown_bytes)
        self._recorder.mark(
            "read_earlier", triggers=found.moved, window_bytes=found.plan.window_bytes
        )
        if self.foreseen is not None:
            self._foresee(self.profile or self._profile())

    def _make_plan(self, profile: Profile) -> Plan:
        plan = self._ask(profile)
        if self._has_scratch or not any(decision.codec for decision in plan.decisions):
            return plan
        if not self._take_scratch():
            self._do_without_codecs()
            profile = replace(profile, slots=tuple(replace(s, codecs=()) for s in profile.slots))
        return self._ask(profile)

    def _ask(self, profile: Profile) -> Plan:
        """The policy's plan; it runs nothing again that must not be, or that there may be no room for.

        What is held can be moved away when the budget is full. What is made again cannot, nor can it be
        undone that it was dropped: so a plan that may exceed the budget runs nothing again.
        """
        assert self._policy is not None, "a plan that was given is not made anew"
        notes: tuple[str, ...] = ()
        if self._recompute:
            plan = self._policy(profile, self.machine, self._budgets)
            if not plan.recomputed:
                return plan
            if plan.feasible and self.unrepeatable.isdisjoint(plan.recomputed):
                return plan
            notes = ("nothing is run again, for there would be no room for what that makes",)
        nobody = tuple(replace(slot, producer=None) for slot in profile.slots)
        plan = self._policy(replace(profile, slots=nobody), self.machine, self._budgets)
        return replace(plan, notes=(*plan.notes, *notes))

    def _want_samples(self, index: int) -> None:
        """Whether pass ``index`` is to be sampled: only if a plan may be made of what that tells."""
        plan = self.plan
        self.wants_samples = (
            self._auto_codec
            and plan is not None
            and plan.offloaded_bytes > 0
            and index >= self._next_replan
            and self._sampled_passes < MAX_SAMPLED_PASSES
            and (self._channel_bound or self._tight)
            and (self._resample or not all(_was_sampled(known) for known in self._kinds))
        )

    def _want_second_look(self) -> None:
        """Which slot the next pass is to sample: none, where no plan would be made of what that tells."""
        look = (
            self._auto_codec
            and not (self.wants_samples or self._resample)
            and self._sampled_passes < MAX_SAMPLED_PASSES
            and (self._channel_bound or self._tight)
        )
        self.second_look = self._second_looks.next() if look else None

    def _count_full(self, finished: Pass, *, missed: bool) -> None:
        """Have the next passes recorded in full, if that of this one was missed."""
        if not finished.kept_bytes:
            self._full_passes = max(0, self._full_passes - 1)
        elif missed or finished.promoted:
            self._full_passes = FULL_PASSES

    def _want_records(self) -> None:
        """Whether records of all slots are wanted; inputs of what is run again are named by theirs."""
        plan = self.plan
        wanted = (
            plan is None
            or plan.recomputed
            or self.observing
            or self.wants_samples
            or self._full_passes
        )
        self.sure = frozenset() if wanted else self._kept_keys

    def _note_samples(self, finished: Pass) -> bool:
        """Whether the pass was sampled for the plan; and whether the next one is to be."""
        sampled = self.wants_samples and any(record.codecs for record in finished.records)
        if self.wants_samples:
            self._sampled_passes += 1
        if sampled:
            self._resample = False
        elif self._ratios_drifted(finished) or self._second_looks.found(finished.records):
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

    def _drifted(self, finished: Pass) -> str:
        """Whether, and how, a pass differs from what the plan was made from."""
        unknown, total = 0, finished.kept_bytes
        newly_held = False
        for record in finished.records:
            total += record.key.nbytes
            if not self._is_known(record):
                unknown += record.key.nbytes
            if record.held_elsewhere and record.key.match_key not in self._held:
                newly_held = True
                if not finished.kept_bytes:  # else no plan is made of this pass, but of a later one
                    self._held.add(record.key.match_key)
        if self.plan is None:
            return "first" if finished.records else ""
        if newly_held:
            return "held"
        return "drift" if unknown > DRIFT * total else ""

    def _is_as_planned(self, finished: Pass) -> bool:
        return all(self._is_known(record) for record in finished.records)

    def _is_known(self, record: SlotRecord) -> bool:
        key = record.key
        return record.planned or (key.module, key.ordinal) in self._made_again

    def _place_of_kind(self, finished: Pass) -> int | None:
        """Which of the known passes is most like this one, if any is."""
        mine = {record.key.match_key for record in finished.records}
        for place, known in enumerate(self._kinds):
            theirs = {record.key.match_key for record in known.records}
            if 2 * len(mine & theirs) >= len(mine | theirs):
                return place
        return None

    def _remember(self, finished: Pass) -> None:
        """Replace the known pass that is most like this one, or add it as another kind."""
        place = self._place_of_kind(finished)
        if place is None:
            self._kinds = [*self._kinds, finished][-MAX_KINDS:]
            return
        if self._kinds[place].observed and not finished.observed and self._is_as_planned(finished):
            return  # what is new, if anything, is who is held elsewhere
        known = {record.key.match_key: record for record in self._kinds[place].records}
        for record in finished.records:
            if not record.codecs and record.key.match_key in known:
                record.codecs = known[record.key.match_key].codecs
        self._kinds[place] = finished

    def _adopt(self, plan: Plan) -> None:
        self._by_module = {
            (decision.key.module, decision.key.bucket): decision
            for decision in reversed(plan.decisions)
            if decision.action is not Action.RECOMPUTE
        }
        self.ranks = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
        self._channel_bound = self.profile is not None and channel_bound(
            self.profile, self.machine, _placed(self.profile, plan)
        )
        self.triggers = {
            decision.key.match_key: decision.prefetch_at
            for decision in plan.decisions
            if decision.prefetch_at is not None
        }
        self._made_again = frozenset(
            (decision.key.module, decision.key.ordinal)
            for decision in plan.decisions
            if decision.action is Action.RECOMPUTE
        )
        self._first_ranks = _first_ranks(plan)
        self._tight = self.profile is not None and _is_tight(self.profile, plan, self._budgets)
        if self.profile is not None:
            self._second_looks.begin(self.profile, plan)
        self.plan = plan
        self._decided, self._kept_keys, self._full_passes = {}, set(), 0
        budgets = self._budgets
        self.moves_nothing = not (plan.offloaded_bytes or plan.recomputed) and (
            budgets.device_bytes >= UNLIMITED or not (budgets.flash_bytes or budgets.host_bytes)
        )


def _placed(profile: Profile, plan: Plan) -> list[tuple[Group, str]]:
    """What the plan offloads, and to which tier."""
    decisions = ((group, plan.lookup(group.key)) for group in groups_of(profile))
    return [(group, decision.tier) for group, decision in decisions if decision and decision.tier]


def _is_tight(profile: Profile, plan: Plan, budgets: Budgets) -> bool:
    """Whether the tiers have too little room for bytes as they are, and more of it would do good."""
    lacking = profile.saved_bytes > budgets.host_bytes + budgets.flash_bytes
    counted_on = any(decision.codec for decision in plan.decisions)
    return lacking and (plan.policy == "all" or not plan.feasible or counted_on)


def _was_sampled(known: Pass) -> bool:
    """Whether codecs were measured on all but a few of its bytes."""
    missing = sum(record.key.nbytes for record in known.records if not record.codecs)
    return missing <= DRIFT * sum(record.key.nbytes for record in known.records)


def _first_ranks(plan: Plan) -> dict[str, int]:
    """By module that is run again: when backward first asks for anything in it."""
    found: dict[str, int] = {}
    for rank, key in enumerate(plan.need_order if plan.recomputed else ()):
        path = key.module
        while path and path not in plan.recomputed:
            path = path.rpartition(".")[0]
        if path:
            found.setdefault(path, rank)
    return found
