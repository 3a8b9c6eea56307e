"""From passes to plans: what to do with each slot, and when what was known no longer holds.

The first pass has no plan. Under ``auto`` it keeps what it saves while half the budget is free and
spills the rest, so that a network that fits is never spilled; under ``all`` it spills everything above
the floor. After each pass the planner compares what was saved with what it knows, and makes a new
plan when that has drifted: slots it has never seen, or slots whose offloading freed nothing because
the program itself still held them. A slot that is not in the plan is never an error, only a guess.
"""

from __future__ import annotations

from typing import Final

from penstock.core.budget import Budget
from penstock.core.config import UNLIMITED
from penstock.core.locks import Lock
from penstock.observe.recorder import Recorder, Stage
from penstock.plan import policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import PassProfile, Profile, SlotProfile
from penstock.plan.slots import MatchKey, SlotKey
from penstock.runtime.passes import Pass
from penstock.runtime.residency import SlotRecord

DRIFT: Final = 0.05
"""Share of a pass's bytes that may be unknown to the plan before it is made anew."""
MAX_KINDS: Final = 8
"""Kinds of passes remembered: an iteration of a GAN has two; more are dynamic shapes."""
FREE_REPLANS: Final = 4
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
    ) -> None:
        """Know nothing yet. Raises ConfigError if there is no such policy."""
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
        self._by_module: dict[tuple[str, int], Decision] = {}
        self._decided: dict[SlotKey, Decision | None] = {}

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
        if known is None:
            return self._guess(key)
        record.planned = True
        return known

    def _look_up(self, key: SlotKey) -> Decision | None:
        if self.plan is None:
            return None
        return self.plan.lookup(key) or self._by_module.get((key.module, key.bucket))

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
            if not self._drifted(finished) or finished.index < self._next_replan:
                return False
            self._remember(finished)
            start_ns = self._recorder.clock.now_ns()
            self.profile = self._make_profile()
            self._adopt(self._policy(self.profile, self.machine, self._budgets))
            self._recorder.span(Stage.PLAN, start_ns, self._recorder.clock.now_ns())
            self.replans += 1
            if self.replans >= FREE_REPLANS:
                self._next_replan = finished.index + 2 ** (self.replans - FREE_REPLANS + 1)
        self._recorder.mark("replan", plans=self.replans, slots=len(self.profile.slots))
        return True

    def _drifted(self, finished: Pass) -> bool:
        unknown = total = 0
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
            theirs = {record.key.match_key for record in known.records}
            if 2 * len(mine & theirs) >= len(mine | theirs):
                self._kinds[place] = finished
                return
        self._kinds = [*self._kinds, finished][-MAX_KINDS:]

    def _make_profile(self) -> Profile:
        slots: list[SlotProfile] = []
        passes: list[PassProfile] = []
        for known in sorted(self._kinds, key=lambda one: one.index):
            end_ns = known.end_ns or known.start_ns
            passes.append(
                PassProfile(known.index, known.start_ns, known.backward_start_ns or end_ns, end_ns)
            )
            for record in known.records:
                key = record.key
                held = record.held_elsewhere or key.match_key in self._held
                slots.append(
                    SlotProfile(
                        key=key,
                        pass_index=known.index,
                        saved_at_ns=record.saved_at_ns,
                        needed_at_ns=record.needed_at_ns,
                        kind=record.origin.kind,
                        held_elsewhere=held,
                        dtype=record.origin.dtype,
                        small_bytes=record.small_bytes,
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
        self.plan = plan
        self._decided = {}
        budgets = self._budgets
        self.moves_nothing = not plan.offloaded_bytes and (
            budgets.device_bytes >= UNLIMITED or not (budgets.flash_bytes or budgets.host_bytes)
        )
