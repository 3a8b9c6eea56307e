"""From passes to plans: what to do with each slot, and when what was known no longer holds.

The first pass has no plan. Under ``auto`` it keeps what it saves while half the budget is free and
spills the rest, so that a network that fits is never spilled; under ``all`` it spills everything above
the floor (:mod:`.guesses`). After each pass the planner compares what was saved with what it knows
(:mod:`.known_passes`), and makes a new plan when that has drifted: slots it has never seen, or slots
whose offloading freed nothing because the program itself still held them. A slot that is not in the plan
is never an error, only a guess. A plan whose reads come late is improved (:mod:`.feedback`).

Some passes are looked at more closely, for better plans: they are observed, so that it may be planned
what to run again (:mod:`.attention`), or sampled, so that codecs may be (:mod:`.codec_use`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Final

from penstock.core.config import UNLIMITED
from penstock.core.locks import Lock
from penstock.observe.counters import PLANS, UNKNOWN
from penstock.observe.forecast import PREDICTION, Forecast
from penstock.observe.recorder import Recorder, Stage
from penstock.observe.suggestion import Suggestion
from penstock.plan import policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.min_budget import min_budget
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.policies import Policy
from penstock.plan.profile import Profile
from penstock.plan.slots import MatchKey, SlotKey
from penstock.plan.suggestion import suggest
from penstock.runtime.asking import ask, leaving, without_codecs
from penstock.runtime.attention import FULL_PASSES, Attention
from penstock.runtime.codec_use import CodecUse
from penstock.runtime.feedback import Feedback
from penstock.runtime.foresight import foresee
from penstock.runtime.given import check_slot, check_tiers, note_on_budget
from penstock.runtime.guesses import Guesses
from penstock.runtime.in_force import InForce
from penstock.runtime.known_passes import KnownPasses, is_known
from penstock.runtime.loaders import Loaders
from penstock.runtime.storage import INPUT, Encoding, Pass, SlotRecord
from penstock.store.account import Account

DEMAND: Final = "demand"
"""Why there is a new plan: data loaders read more of flash, or less, than the one before left them."""
MEMORY: Final = "memory"
"""Another reason: less of the device's memory is left to saved tensors than before."""
MOST_DECIDED: Final = 65_536
"""Slots whose decisions are remembered; then all are forgotten. Sizes may change with each step."""
FREE_REPLANS: Final = 5
"""Plans made at once; after these, ever longer waits, so that drift for ever stays cheap."""


class Planner:
    """Decides per slot, under the plan where there is one. Thread-safe.

    What is asked for with every tensor is a plain attribute, set between passes.

    Attributes:
        plan: The plan in force, or ``None`` before the first pass is over.
        profile: What it was made from.
        floor_bytes: Storages smaller than this always stay.
        machine: The bandwidths that plans are made for: the machine's, less what data loaders need.
        ranks: The plan's order of need by match key, for prefetching.
        replans: Plans made so far.
        wants_samples: Whether what is saved now is to be sampled.
        crowded: Whether the rest of this pass should be sampled, for a tier is filling up.
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
        budget: Account,
        floor_bytes: int,
        recorder: Recorder,
        device: str,
        codec: str = "none",
        prepare_codecs: Callable[[], int] = lambda: 0,
        recompute: bool = False,
        plan: Plan | None = None,
        slack_bytes: Callable[[int], int] = lambda device_bytes: 0,
        loaders: Loaders | None = None,
        only_observed: bool = False,
    ) -> None:
        """Know nothing yet, but for a ``plan`` that is given. Raises ConfigError: no such policy.

        ``codec`` is ``"auto"``, ``"none"``, or the name of the one to use wherever it can be.
        ``prepare_codecs`` is called, between passes, before a plan with codecs is adopted: it takes their
        scratch memory from the budget and says how much that is, 0 if there was no room.
        ``recompute`` is whether modules may be run again. A given plan stays in force as it is, and
        ``policy`` is then only a name; what differs from it in the first pass is a PlanError. Plans of a
        policy leave ``slack_bytes`` of the device budget out, if they can, and of flash what ``loaders``
        need. With ``only_observed`` the first plan is not made of a pass that was not observed.
        """
        self.floor_bytes = floor_bytes
        self.machine = self._whole = machine
        self._loaders = Loaders() if loaders is None else loaders
        self.plan: Plan | None = None
        self.profile: Profile | None = None
        self.foreseen: Forecast | None = None
        self.ranks: dict[MatchKey, int] = {}
        self.triggers: dict[MatchKey, int] = {}
        self.replans = 0
        self.unrepeatable: set[str] = set()
        self.sure: AbstractSet[tuple[str, int, int]] = frozenset()
        self.moves_nothing = self.wants_samples = self.crowded = False
        self.observing = plan is None
        self._given = plan
        self._met_given = False
        self._policy_name = policy
        self._slack_bytes = slack_bytes
        slack = slack_bytes(budget.limit_bytes)
        self._policy = leaving(policies.get(policy), slack) if plan is None else None
        self._recompute = recompute
        self._only_observed = only_observed
        self._budgets = budgets
        self._budget = budget
        self._recorder = recorder
        self._lock = Lock()
        self._in_force = InForce()
        self._decided: dict[SlotKey, Decision | None] = {}
        self._kept_keys: set[tuple[str, int, int]] = set()
        self._device = device
        self._known = KnownPasses(device)
        self._guesses = Guesses(policy, budgets, budget)
        self._codecs = CodecUse(codec, prepare_codecs, recorder)
        self._attention = Attention(recompute=recompute)
        self._feedback = Feedback(recorder)
        self._next_replan = self._latest = 0
        if plan is not None:
            check_tiers(plan, budgets)
            self._adopt(plan)

    def begin(self) -> None:
        """Take what codecs need that are known beforehand, before anything is saved.

        That is one that is to be used everywhere, or those of a plan that is given.

        Raises:
            ConfigError: There is no such codec, or it may not be used everywhere.
            BudgetError: The budget has no room for its scratch memory.
        """
        given = self._given.decisions if self._given is not None else ()
        planned = any(decision.codec for decision in given)
        self._set_aside(self._codecs.begin(self._budget, planned=planned))

    def _set_aside(self, scratch_bytes: int) -> None:
        """Reserve the codecs' scratch memory, which a plan cannot use."""
        device_bytes = self._budgets.device_bytes
        if device_bytes < UNLIMITED:
            self._budgets = replace(self._budgets, device_bytes=device_bytes - scratch_bytes)

    def limit(self, device_bytes: int) -> bool:
        """From now on so much of the device's memory is the budget; return whether it was another."""
        with self._lock:
            before = self._budget.limit_bytes
            reserved = before - self._budgets.device_bytes  # of codecs
            self._budget.limit_bytes = device_bytes
            if self._policy is not None:
                slack = self._slack_bytes(device_bytes)
                self._policy = leaving(policies.get(self._policy_name), slack)
            self._budgets = replace(self._budgets, device_bytes=max(1, device_bytes - reserved))
            return device_bytes != before

    def plan_again(self, reason: str) -> bool:
        """Make a new plan from what is known; return whether there is one. Between passes."""
        with self._lock:
            if self.plan is None or self._given is not None:
                return False
            self._plan(reason)
            self._want_closer_look(self._latest + 1)
            self._want_records()
            return True

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on the plan in force."""
        about = () if self._given is None else note_on_budget(self._given, self._budgets)
        return about if self.plan is None else (*about, *self.plan.notes)

    def least_bytes(self) -> int | None:
        """Return the least device budget that does for a whole step as profiled.

        Returns:
            Bytes; ``None`` if no step was profiled, as under a given plan, or none is known to do.
        """
        if self.profile is None or self._given is not None:
            return None
        # where there is a tier, what a plan keeps is moved away when there is no room for it
        policy = self._asking("ranked" if self._has_tier else self._policy_name)
        nothing = replace(self._budgets, device_bytes=1)
        least = min_budget(self.profile, self.machine, nothing, policy)
        reserved = self._budget.limit_bytes - self._budgets.device_bytes  # of codecs
        slack = self._slack_bytes(self.profile.peak_saved_bytes)
        return None if least is None else least + slack + reserved

    def suggest(self) -> Suggestion | None:
        """Return what device budgets would cost; ``None`` without a profile or a tier to spill to."""
        if self.profile is None or self._given is not None or not self._has_tier:
            return None
        policy = self._asking("ranked" if self._policy_name == "auto" else self._policy_name)
        slack = self._slack_bytes(self.profile.peak_saved_bytes)
        return suggest(self.profile, self.machine, self._budgets, policy, slack_bytes=slack)

    @property
    def _has_tier(self) -> bool:
        return bool(self._budgets.host_bytes or self._budgets.flash_bytes)

    def _asking(self, name: str) -> Policy:
        """Return the policy of that name, under the rules for what is recomputed."""
        return partial(
            ask,
            policies.get(name),
            recompute=self._recompute,
            unrepeatable=self.unrepeatable,
        )

    @property
    def window_bytes(self) -> int | None:
        """Bytes that prefetching may hold; ``None`` (as much as the budget) while there is no plan."""
        return None if self.plan is None else self.plan.window_bytes

    # -- while a pass runs ------------------------------------------------------------------------

    def decide(self, record: SlotRecord) -> Decision:
        """Decide on a slot that has just been saved; note in ``record`` whether the plan knows it."""
        key = record.key
        decided = self._decided  # belongs to one plan: a new plan brings a new one
        try:
            known = decided[key]
        except KeyError:
            known = decided[key] = self._look_up(key)
            if known is not None and known.action is Action.KEEP:
                self._kept_keys.add((key.module, key.ordinal, key.nbytes))
        if known is None:
            return self.guess(record)
        record.planned = True
        return known

    def _look_up(self, key: SlotKey) -> Decision | None:
        if key.module.endswith(INPUT):
            return Decision(key, Action.KEEP, "", "input of a module that is run again")
        if self._given is not None and not self._met_given:
            check_slot(self._given, key)
        known = self._in_force.decision_for(key)
        return None if known is None else self._codecs.apply(known)

    def decide_input(self, record: SlotRecord) -> Decision:
        """Decide on the input of a recomputed module, now that it has its name."""
        if record.key.module.endswith(INPUT):
            return self.guess(record)
        return self.decide(record)

    def recomputes(self, module: str, ordinal: int) -> bool:
        """Return whether the plan has a slot made again, of whatever size."""
        return (module, ordinal) in self._in_force.made_again

    def too_early(self, key: SlotKey, place: int) -> bool:
        """Return whether reading a slot back must wait until backward has come further than ``place``."""
        return bool(self.triggers) and self.triggers.get(key.match_key, -1) > place

    def place_of(self, path: str) -> int | None:
        """Where, in the plan's order of need, backward first asks for what is made again at ``path``."""
        return self._in_force.first_ranks.get(path)

    def guess(self, record: SlotRecord) -> Decision:
        """Decide on a slot for which the plan has no decision, or none that can be carried out."""
        guesses, use = self._guesses, self._codecs
        codecs = record.codecs if use.has_scratch and use.chosen else ()
        decision = guesses.decide(record.key, codecs)
        self.crowded = (
            guesses.crowded and use.chosen and self.plan is None and not self.wants_samples
        )
        return use.apply(decision)

    def sample_now(self) -> None:
        """Because ``crowded``: sample the rest of this pass. Called while nothing is on its way out."""
        with self._lock:
            self.crowded = False
            if not self._codecs.has_scratch:
                self._set_aside(self._codecs.open())
            self.wants_samples = self._codecs.has_scratch

    def note_frames(self, record: SlotRecord, frame_bytes: int) -> None:
        """A slot has been written as frames; in any thread, without the runtime's lock."""
        decision = self._decided.get(record.key)
        if decision is not None and self._codecs.shortage.shown_by(decision, frame_bytes):
            self._fall_short()

    def squeeze(self, record: SlotRecord, *, refused: bool) -> Encoding | None:
        """How to encode what nobody has planned to encode, for want of room; see [Note: shortage].

        Args:
            record: What is to be spilled.
            refused: Whether no tier has room for it as it is.
        """
        use = self._codecs
        if not (use.chosen and use.has_scratch):
            return None
        if refused:
            self._fall_short()
        if not use.shortage.active:
            return None
        dtype = record.origin.dtype
        sample = use.shortage.way_out(record.key, dtype, record.codecs)
        return None if sample is None else Encoding(sample.codec, dtype)

    def _fall_short(self) -> None:
        if not self._codecs.shortage.active:
            self._codecs.shortage.active = True
            self._recorder.count("shortage")

    # -- between passes ---------------------------------------------------------------------------

    def learn(self, finished: Pass) -> bool:
        """Take note of a finished pass; make a new plan if it differs from what is known.

        Returns:
            Whether there is a new plan.
        """
        with self._lock:
            self._latest = finished.index
            if self._given is not None:
                self._learn_given(finished)
                self._codecs.shortage.active = False
                self._want_records()
                return False
            reason = self._why_replan(finished)
            self._attention.record(finished, missed=bool(reason))
            if finished.kept_bytes:
                reason = ""  # it has no records of all its slots: the next ones will
            if not reason and self._crowded_out():
                reason = DEMAND
            if reason and finished.index >= self._next_replan:
                self._replan(finished, reason)
            else:
                reason = ""
                self._improve(finished)
            self._guesses.end_pass()
            self._codecs.shortage.active = False
            self._want_closer_look(finished.index + 1)
            self._want_records()
        return bool(reason)

    def _learn_given(self, finished: Pass) -> None:
        self._met_given = True
        unknown = sum(not is_known(record, self._in_force) for record in finished.records)
        if unknown:
            self._recorder.count(UNKNOWN, unknown)
        if finished.index <= FULL_PASSES and not finished.kept_bytes:
            self._foresee_given(finished)
        self._improve(finished)

    def _foresee_given(self, finished: Pass) -> None:
        """Replay a given plan on the passes that it has met; each kind is told of once."""
        if self._known.like(finished) is None:
            self._known.remember(finished, self._in_force)
            self.machine = self._loaders.left_of(self._whole)
            self._foresee(self._known.profile(self.unrepeatable))

    def _why_replan(self, finished: Pass) -> str:
        """Why a new plan is to be made of a finished pass; empty if not."""
        if self.plan is None and self._only_observed and not finished.observed:
            return ""
        sampled = self._codecs.note(finished, self._decided, asked=self.wants_samples)
        self._attention.note(finished)
        difference = self._known.difference(finished, self._in_force)
        if difference == "drift" and not self._tells_all(finished):
            self._attention.observe_again = True
            return ""
        if difference:
            return difference
        if sampled:
            return "sampled"
        like = self._known.like(finished) if finished.observed else None
        return "observed" if like is not None and not like.observed else ""

    def _crowded_out(self) -> bool:
        """Return whether the plan in force leaves data loaders too little of flash, or too much."""
        return self.plan is not None and not self.moves_nothing and self._loaders.moved(self._whole)

    def _tells_all(self, finished: Pass) -> bool:
        """Return whether a plan could be made of a pass: nothing was dropped, or it was observed."""
        return finished.observed or not (self.plan and self.plan.recomputed)

    def _replan(self, finished: Pass, reason: str) -> None:
        if reason != DEMAND and self._tells_all(finished):
            self._known.remember(finished, self._in_force)
        self._plan(reason)
        if self.replans >= FREE_REPLANS:
            self._next_replan = finished.index + 2 ** (self.replans - FREE_REPLANS + 1)

    def _plan(self, reason: str) -> None:
        """Make a plan of the passes that are known."""
        self.machine = self._loaders.left_of(self._whole)
        start_ns = self._recorder.clock.now_ns()
        self.profile = self._known.profile(self.unrepeatable)
        self._adopt(self._make_plan(self.profile))
        self._recorder.span(Stage.PLAN, start_ns, self._recorder.clock.now_ns())
        self._recorder.count(f"{PLANS}.{reason}")
        self.replans += 1
        self._feedback.planned()
        self._attention.planned()
        self._recorder.mark(
            "replan",
            plans=self.replans,
            slots=len(self.profile.slots),
            reason=reason,
            device=self._device,
        )
        self._foresee(self.profile)

    def _make_plan(self, profile: Profile) -> Plan:
        plan = self._ask(profile)
        if self._codecs.has_scratch or not any(decision.codec for decision in plan.decisions):
            return plan
        self._set_aside(self._codecs.open())
        return self._ask(profile if self._codecs.has_scratch else without_codecs(profile))

    def _ask(self, profile: Profile) -> Plan:
        assert self._policy is not None, "a plan that was given is not made anew"
        return ask(
            self._policy,
            profile,
            self.machine,
            self._budgets,
            recompute=self._recompute,
            unrepeatable=self.unrepeatable,
        )

    def _improve(self, finished: Pass) -> None:
        """Have reads begin earlier that came late."""
        better = None if self.plan is None else self._feedback.improve(self.plan, finished)
        if better is None:
            return
        self._follow(better, self._kept_keys)
        if self.foreseen is not None:
            self._foresee(self.profile or self._known.profile(self.unrepeatable))

    def _foresee(self, profile: Profile) -> None:
        """Replay the plan that is in force from now on; for the summary and the log."""
        assert self.plan is not None
        now_ns = self._recorder.clock.now_ns()
        self.foreseen = foresee(profile, self.plan, self.machine, since_ns=now_ns)
        if self.foreseen is not None:
            self._recorder.mark(PREDICTION, **self.foreseen.to_fields())

    def _want_closer_look(self, index: int) -> None:
        """Choose whether pass ``index`` is sampled or observed: only if a plan may be made of it."""
        codecs, plan, kinds = self._codecs, self.plan, self._known.kinds
        may_plan = index >= self._next_replan
        self.wants_samples = may_plan and codecs.want_samples(self._in_force, kinds)
        self.observing = (
            plan is None
            or self.wants_samples
            or (may_plan and self._attention.would_tell(plan, kinds))
        )

    def _want_records(self) -> None:
        """Choose whether all slots are recorded; inputs of recomputed modules are named by records."""
        if len(self._decided) > MOST_DECIDED:
            self._decided, self._kept_keys = {}, set()
        plan = self.plan
        wanted = (
            plan is None
            or plan.recomputed
            or self.observing
            or self.wants_samples
            or self._attention.full_passes
        )
        self.sure = frozenset() if wanted else self._kept_keys

    def _adopt(self, plan: Plan) -> None:
        """Follow another plan: what it keeps is not known yet."""
        self._follow(plan, set())
        self._attention.full_passes = 0

    def _follow(self, plan: Plan, kept_keys: set[tuple[str, int, int]]) -> None:
        """Follow a plan, of which ``kept_keys`` are known to be kept."""
        in_force = self._in_force = InForce.of(
            plan, profile=self.profile, machine=self.machine, budgets=self._budgets
        )
        self.ranks = in_force.ranks
        self.triggers = in_force.triggers
        self.moves_nothing = in_force.moves_nothing
        if self.profile is not None:
            self._codecs.follow(plan, self.profile)
        self.plan = plan
        self._decided, self._kept_keys = {}, kept_keys
