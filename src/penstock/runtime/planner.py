"""From records of passes to orders for the next ones.

The first pass has no plan. Under ``auto`` it keeps what it saves while half the budget is free and
offloads the rest, so that a network that fits is never offloaded; under ``all`` it offloads everything
above the floor ([Note: slots without a plan]). After each pass the planner compares what was saved with
what it knows, and makes a new plan when that has drifted: slots it has never seen, or slots whose
offloading freed nothing because the program itself still held them. A slot that is not in the plan is
never an error, only a guess. A plan whose reads come late is improved (:mod:`.prefetch_tuning`).

Some passes are looked at more closely, for better plans: they are observed, so that recomputation may be
planned (:mod:`.profiling`), or sampled, so that codecs may be (:mod:`.codec_choice`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from penstock.core.config import UNLIMITED
from penstock.core.errors import PlanError
from penstock.core.locks import Lock
from penstock.observe.counters import MOVED_EARLIER, PLANS, UNKNOWN, WINDOW_GROWN
from penstock.observe.forecast import PREDICTION, Forecast
from penstock.observe.recorder import Recorder, Stage
from penstock.plan import policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Action, Plan
from penstock.plan.profile import Profile
from penstock.runtime.codec_choice import CodecChoice, codecs_pay
from penstock.runtime.loader_demand import Loaders
from penstock.runtime.orders import DefaultRule, ExactKey, Orders, PassRecord
from penstock.runtime.policy_request import PolicyRequest, has_codecs
from penstock.runtime.prefetch_tuning import improve
from penstock.runtime.profiling import FULL_PASSES, KnownPasses, ProfilingSchedule
from penstock.runtime.user_plan import check_tiers, note_on_budget

DEMAND: Final = "demand"
"""Reason for a new plan: data loaders read more of flash, or less, than the one before left them."""
MEMORY: Final = "memory"
"""Reason for a new plan: the device budget has another limit than before."""
MAX_KEPT_KEYS: Final = 65_536
"""Slots that are kept unrecorded; then they are found anew. Sizes may change with each step."""
FREE_REPLANS: Final = 5
"""Plans made at once; after these, ever longer waits, so that drift for ever stays cheap."""
MAX_IMPROVEMENTS: Final = 32
"""Times that one plan's reads are moved earlier."""


def _no_slack(device_bytes: int) -> int:
    return 0


def _nothing() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Everything that a planner is to plan for, as it is when the session is opened."""

    policy: str
    """Name of the policy. With a user plan it decides only on slots that the plan does not know."""
    machine: Machine
    """Bandwidths of the machine, before data loaders."""
    budgets: Budgets
    """Limit of the device budget, and capacity of the tiers."""
    device: str = "cpu"
    """Name of the device."""
    codec: str = "none"
    """``"auto"``, ``"none"``, or the name of the one to use wherever it can be."""
    recompute: bool = False
    """True if modules may be recomputed."""
    user_plan: Plan | None = None
    """Plan to follow as it is. What differs from it in the first pass is a PlanError."""
    slack_bytes: Callable[[int], int] = _no_slack
    """Part of a device budget that plans leave out, if they can; see ``page_slack_bytes``."""
    lent_bytes: Callable[[], int] = _nothing
    """Part of the host tier that others than saved tensors have, as weights that rest there."""
    only_observed: bool = False
    """True if the first plan is not made of a pass that was not observed."""


class Planner:
    """Learns from records of passes, and gives orders. Thread-safe; it moves nothing itself.

    Attributes:
        orders: The orders for the next pass.
        profile: The profile that the plan was made from; ``None`` for a user plan.
        foreseen: Result of a replay of the plan in force; ``None`` before there is one, or where no
            profile tells enough.
        machine: Bandwidths that the plan was made for: the machine's, less what data loaders need.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        *,
        recorder: Recorder,
        loaders: Loaders | None = None,
        open_codecs: Callable[[], int] = lambda: 0,
    ) -> None:
        """Know nothing yet, but for a user plan.

        Takes the scratch memory that is known to be needed: of a codec that is to be used everywhere, or
        for the codecs of a user plan.

        Args:
            settings: What to plan for.
            recorder: Receives counts and marks.
            loaders: Data loaders whose reads plans leave room for.
            open_codecs: Takes the scratch memory of codecs from the device budget; returns its bytes, 0
                if there is no room. Called here and in ``learn``, before a plan with codecs.

        Raises:
            ConfigError: There is no such policy or codec, or the codec may not be used everywhere.
            BudgetError: The budget has no room for the codec's scratch memory.
            PlanError: The user plan needs a tier that does not exist.
        """
        self.profile: Profile | None = None
        self.foreseen: Forecast | None = None
        self.machine = settings.machine
        self._settings = settings
        self._user_plan = plan = settings.user_plan
        self._recorder = recorder
        self._loaders = Loaders() if loaders is None else loaders
        self._lock = Lock()
        self._limit_bytes = settings.budgets.device_bytes
        self._unrepeatable: frozenset[str] = frozenset()
        self._known = KnownPasses(settings.device)
        self._codecs = CodecChoice(settings.codec, open_codecs, recorder)
        self._schedule = ProfilingSchedule(recompute=settings.recompute)
        self._kept: frozenset[ExactKey] = frozenset()
        self._next_replan = self._index = self._improvements = 0
        if plan is None:
            policies.get(settings.policy)
        else:
            check_tiers(plan, settings.budgets)
        encoded = plan is not None and any(decision.codec for decision in plan.decisions)
        self._codecs.begin(self._limit_bytes, planned=encoded)
        self.orders = Orders(
            default=DefaultRule.of(settings.policy, settings.budgets, self._codecs.forced),
            observes=plan is None,
        )
        if plan is not None:
            self.orders = replace(
                self._compile(plan),
                strict=True,
                notes=(*note_on_budget(plan, self._budgets), *plan.notes),
            )
        self._renew(None)

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or ``None`` before the first pass is over."""
        return self.orders.plan

    @property
    def replans(self) -> int:
        """Number of plans made so far."""
        return self.orders.plan_number

    def learn(self, record: PassRecord) -> Orders | None:
        """Take note of a finished pass, which ran under ``orders``.

        Returns:
            The orders for the next pass; ``None`` if they stay as they are.
        """
        with self._lock:
            before, self._index = self.orders, record.index
            self._unrepeatable |= record.unrepeatable
            if record.scratch_bytes is not None:
                self._codecs.note_opened(record.scratch_bytes)
            limited = record.limit_bytes is not None and self._set_limit(record.limit_bytes)
            self._kept |= _kept_keys(record, self.orders)
            if self._user_plan is not None:
                self._learn_under_user_plan(record)
            else:
                self._learn(record, limited=limited)
            return self._renew(before)

    def limit(self, device_bytes: int) -> Orders | None:
        """Plan for another limit of the device budget, from what is known.

        Returns:
            The orders from now on; ``None`` if they stay as they are.
        """
        with self._lock:
            if not self._set_limit(device_bytes) or self._user_plan or self.plan is None:
                return None
            before = self.orders
            self._plan(MEMORY)
            return self._renew(before)

    # -- under a policy ---------------------------------------------------------------------------

    def _learn(self, record: PassRecord, *, limited: bool) -> None:
        reason = self._why_replan(record)
        self._schedule.note_recorded(record, as_planned=not reason)
        if record.kept_bytes:
            reason = ""  # it has no records of all its slots: the next ones will
        if not reason and self._demand_changed():
            reason = DEMAND
        if reason and record.index >= self._next_replan:
            self._replan(record, reason)
        elif limited and self.plan is not None:
            self._plan(MEMORY)
        else:
            self._improve(record)

    def _why_replan(self, record: PassRecord) -> str:
        """Return the reason for a new plan, made of a finished pass; empty if there is none."""
        if self.plan is None and self._settings.only_observed and not record.observed:
            return ""
        sampled = self._codecs.learn(record, self.orders)
        self._schedule.note_observed(record)
        difference = self._known.difference(record, self.orders)
        if difference == "drift" and not self._tells_all(record):
            self._schedule.observe_again = True
            return ""
        if difference:
            return difference
        if sampled:
            return "sampled"
        if self._codecs.lose(record):
            return "slow codecs"
        like = self._known.like(record) if record.observed else None
        return "observed" if like is not None and not like.observed else ""

    def _demand_changed(self) -> bool:
        """Return whether the plan in force leaves data loaders too little of flash, or too much."""
        if self.plan is None or self.orders.moves_nothing:
            return False
        return self._loaders.changed(self._settings.machine)

    def _tells_all(self, record: PassRecord) -> bool:
        """Return whether a plan could be made of a pass: nothing was dropped, or it was observed."""
        return record.observed or not (self.plan and self.plan.recomputed)

    def _replan(self, record: PassRecord, reason: str) -> None:
        if reason != DEMAND and self._tells_all(record):
            self._known.remember(record, self.orders)
        self._plan(reason)
        if self.replans >= FREE_REPLANS:
            self._next_replan = record.index + 2 ** (self.replans - FREE_REPLANS + 1)

    def _plan(self, reason: str) -> None:
        """Make a plan of the passes that are known, and follow it. What it keeps is not known yet."""
        start_ns = self._recorder.clock.now_ns()
        self.machine = self._loaders.left_of(self._settings.machine)
        self.profile = profile = self._known.profile(self._unrepeatable)
        request = self._request(profile)
        plan = request.plan()
        if not self._codecs.scratch_bytes and has_codecs(plan):
            self._codecs.open()
            request = self._request(profile)
            plan = (request if self._codecs.scratch_bytes else request.without_codecs()).plan()
        if not (self._codecs.chosen or self._codecs.forced) and has_codecs(plan):
            request = request.without_codecs()
            plan = request.plan()
        self._codecs.expect(self._without_codecs_ns(request, plan))
        self._codecs.pays = codecs_pay(plan, profile, self.machine, self._budgets)
        self.orders = replace(
            self._compile(plan), plan_number=self.orders.plan_number + 1, request=request
        )
        self._kept = frozenset()
        self._schedule.full_passes = 0
        self._schedule.planned()
        self._improvements = 0
        self._recorder.span(Stage.PLAN, start_ns, self._recorder.clock.now_ns())
        self._recorder.count(f"{PLANS}.{reason}")
        self._recorder.mark(
            "replan",
            plans=self.replans,
            slots=len(profile.slots),
            reason=reason,
            device=self._settings.device,
        )
        self._foresee(profile)
        self._log_plan(profile)

    def _without_codecs_ns(self, request: PolicyRequest, plan: Plan) -> int:
        """Return the time of a pass without the codecs of a device's plan; 0 if it has none."""
        if self._settings.device == "cpu" or len(request.profile.passes) != 1:
            return 0
        if not has_codecs(plan):
            return 0
        step_ns = request.step_ns(request.without_codecs().plan())
        return 0 if step_ns == math.inf else int(step_ns)

    def _request(self, profile: Profile) -> PolicyRequest:
        settings = self._settings
        return PolicyRequest(
            policy=settings.policy,
            profile=profile,
            machine=self.machine,
            budgets=self._budgets,
            recompute=settings.recompute,
            unrepeatable=self._unrepeatable,
            slack_bytes=settings.slack_bytes(self._limit_bytes),
            peak_slack_bytes=settings.slack_bytes(profile.peak_saved_bytes),
            scratch_bytes=self._limit_bytes - self._budgets.device_bytes,
        )

    # -- under a user plan ------------------------------------------------------------------------

    def _learn_under_user_plan(self, record: PassRecord) -> None:
        unknown = sum(not self.orders.knows(slot.key) for slot in record.slots)
        if unknown:
            self._recorder.count(UNKNOWN, unknown)
        if self.orders.strict:
            self.orders = replace(self.orders, strict=False)
        if record.index <= FULL_PASSES and not record.kept_bytes and not self._known.like(record):
            self._known.remember(record, self.orders)  # each kind is replayed once
            self.machine = self._loaders.left_of(self._settings.machine)
            profile = self._known.profile(self._unrepeatable)
            self._foresee(profile)
            self._log_plan(profile)
        self._improve(record)

    # -- under either -----------------------------------------------------------------------------

    def _improve(self, record: PassRecord) -> None:
        """Have reads begin earlier that came late, a limited number of times for each plan."""
        plan = self.plan
        if plan is None or record.observed or self._improvements >= MAX_IMPROVEMENTS:
            return
        found = improve(plan, record)
        if found is None:
            return
        self._improvements += 1
        if found.moved:
            self._recorder.count(MOVED_EARLIER, found.moved)
        if found.window_grown_bytes:
            self._recorder.count(WINDOW_GROWN, found.window_grown_bytes)
        self._recorder.mark(
            "read_earlier", triggers=found.moved, window_bytes=found.plan.window_bytes
        )
        before = self.orders
        self.orders = replace(
            self._compile(found.plan),
            plan_number=before.plan_number,
            request=before.request,
            notes=before.notes,
        )
        if self.foreseen is not None:
            self._foresee(self.profile or self._known.profile(self._unrepeatable))

    def _compile(self, plan: Plan) -> Orders:
        """Return orders that follow a plan, without what is asked of coming passes."""
        orders = Orders.of(
            plan,
            budgets=self._budgets,
            profile=self.profile,
            forced_codec=self._codecs.forced,
        )
        return replace(orders, default=self.orders.default)

    def _renew(self, before: Orders | None) -> Orders | None:
        """Ask of the next pass what would make a better plan; return the orders if they differ."""
        orders, kinds = self.orders, self._known.kinds
        may_plan = self._user_plan is None and self._index + 1 >= self._next_replan
        samples = may_plan and self._codecs.wants_samples(orders, kinds)
        observes = self._user_plan is None and (
            orders.plan is None
            or samples
            or (may_plan and self._schedule.wants_observed(orders, kinds))
        )
        if len(self._kept) > MAX_KEPT_KEYS:
            self._kept = frozenset()
        # what a plan keeps is recorded all the same where the records are needed; they name the inputs
        # of recomputed modules
        recorded = (
            orders.plan is None
            or orders.plan.recomputed
            or observes
            or samples
            or self._schedule.full_passes
        )
        renewed = replace(
            orders,
            observes=observes,
            samples=samples,
            kept=frozenset() if recorded else self._kept,
            can_encode=self._codecs.can_encode,
            samples_when_crowded=self._codecs.chosen and orders.plan is None,
        )
        if _asks(renewed) != _asks(orders):
            self.orders = renewed
        return None if self.orders is before else self.orders

    @property
    def _budgets(self) -> Budgets:
        """The memory to plan for: without the scratch memory of codecs, which a plan cannot use."""
        device_bytes = self._limit_bytes
        if device_bytes < UNLIMITED:
            device_bytes = max(1, device_bytes - self._codecs.scratch_bytes)
        host_bytes = self._settings.budgets.host_bytes
        host_bytes = host_bytes and max(0, host_bytes - self._settings.lent_bytes())
        return replace(self._settings.budgets, device_bytes=device_bytes, host_bytes=host_bytes)

    def _set_limit(self, device_bytes: int) -> bool:
        """Set the limit of the device budget; return whether it was another."""
        before, self._limit_bytes = self._limit_bytes, device_bytes
        return device_bytes != before

    def _foresee(self, profile: Profile) -> None:
        """Replay the plan that is in force from now on; for the summary and the log."""
        assert self.plan is not None
        now_ns = self._recorder.clock.now_ns()
        self.foreseen = _forecast(profile, self.plan, self.machine, since_ns=now_ns)
        if self.foreseen is not None:
            self._recorder.mark(PREDICTION, **self.foreseen.to_fields())

    def _log_plan(self, profile: Profile) -> None:
        """Write to the event log, if there is one, what the plan does with each slot."""
        log, plan = self._recorder.log, self.plan
        if log is not None and plan is not None:
            from penstock.observe.records import PLAN  # noqa: PLC0415  (few runs have a log)
            from penstock.runtime.plan_record import plan_fields  # noqa: PLC0415

            fields = {"device": self._settings.device, **plan_fields(plan, profile)}
            log.write(PLAN, {"t_ns": self._recorder.clock.now_ns(), **fields})


def _asks(orders: Orders) -> tuple[object, ...]:
    """Return what orders ask for beside following their plan."""
    return (
        orders.observes,
        orders.samples,
        orders.samples_when_crowded,
        orders.can_encode,
        orders.kept,
    )


def _kept_keys(record: PassRecord, orders: Orders) -> frozenset[ExactKey]:
    """Return the slots of a pass that were kept because the plan says so."""
    decided = ((slot.key, orders.decision_for(slot.key)) for slot in record.slots)
    return frozenset(
        (key.module, key.ordinal, key.nbytes)
        for key, decision in decided
        if decision is not None and decision.action is Action.KEEP
    )


def _forecast(profile: Profile, plan: Plan, machine: Machine, *, since_ns: int) -> Forecast | None:
    """Return the cost of a plan on this machine, before it has run: a replay, in plain numbers.

    Gaps between the profile's passes do not count: an optimizer may step there.

    Args:
        profile: The passes that the plan is for.
        plan: The plan, as it is followed.
        machine: Measured speeds.
        since_ns: Time at which it comes into force, by the recorder's clock.

    Returns:
        ``None`` if the profile has no pass, or does not tell enough.
    """
    from penstock.plan.replay import replay  # noqa: PLC0415  (only once there is a plan)

    if not profile.passes:
        return None
    try:
        found = replay(profile, plan, machine)
    except PlanError:  # a user plan recomputes modules, and its passes are not observed
        return None
    return Forecast(
        since_ns=since_ns,
        machine=machine.name,
        passes=len(profile.passes),
        compute_ns=sum(one.end_ns - one.start_ns for one in profile.passes) + found.lean_ns,
        recompute_ns=found.recompute_ns,
        interference_ns=found.interference_ns,
        budget_ns=found.budget_ns,
        demand_ns=found.demand_ns,
        late_ns=found.late_ns,
        device_peak_bytes=found.peak_bytes,
        host_peak_bytes=found.host.peak_bytes,
        flash_peak_bytes=found.flash.peak_bytes,
        host_written_bytes=found.host.written_bytes,
        host_read_bytes=found.host.read_bytes,
        flash_written_bytes=found.flash.written_bytes,
        flash_read_bytes=found.flash.read_bytes,
        saved_bytes=profile.peak_saved_bytes,
    )
