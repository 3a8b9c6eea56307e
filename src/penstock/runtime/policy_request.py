"""Question that a plan answers: a policy, a profile, a machine and budgets; and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

from penstock.observe.suggestion import Suggestion
from penstock.plan import policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.policies import Policy
from penstock.plan.profile import Profile


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """Question that a plan answers."""

    policy: str
    """Name of the policy."""
    profile: Profile
    machine: Machine
    """Bandwidths to plan for."""
    budgets: Budgets
    """Memory to plan for."""
    recompute: bool = False
    """True if modules may be recomputed."""
    unrepeatable: AbstractSet[str] = frozenset()
    """Paths of the modules that may not."""
    slack_bytes: int = 0
    """Part of the device budget to leave out, wherever a plan fits without it: what restored storages may
    take beside their own bytes."""
    peak_slack_bytes: int = 0
    """The same of a budget as large as the profile's peak."""
    scratch_bytes: int = 0
    """Scratch memory of codecs, which is left out of ``budgets`` already."""

    def plan(self) -> Plan:
        """Return the policy's plan, under the rules for what is recomputed.

        For a device without codecs if that is foretold to be quicker: there is much that is needed before
        it is on flash, which the choice of codecs does not see.
        """
        plan = self._ask(self.profile, self.machine, self.budgets, name=self.policy)
        if self.profile.device == "cpu" or not has_codecs(plan):
            return plan
        request = self.without_codecs()
        raw = request._ask(request.profile, self.machine, self.budgets, name=self.policy)
        return raw if self.step_ns(raw) < self.step_ns(plan) else plan

    def step_ns(self, plan: Plan) -> float:
        """Return the time of a step under a plan; without end if it exceeds a budget."""
        from penstock.plan.replay import replay  # noqa: PLC0415  (only once there is a plan)

        found = replay(self.profile, plan, self.machine)
        return found.step_ns if found.feasible else math.inf

    def without_codecs(self) -> PolicyRequest:
        """Return the request as if no codec had been tried."""
        return replace(self, profile=self.profile.without_codecs())

    def min_budget_bytes(self) -> int | None:
        """Return the smallest device budget that does for the whole profile; ``None``: none is known."""
        from penstock.plan.min_budget import min_budget  # noqa: PLC0415  (for advice only)

        # where there is a tier, what a plan keeps is moved away when there is no room for it
        ask = partial(self._ask, name="ranked" if self._has_tier else self.policy, slack_bytes=0)
        nothing = replace(self.budgets, device_bytes=1)
        found = min_budget(self.profile, self.machine, nothing, ask)
        return None if found is None else found + self.peak_slack_bytes + self.scratch_bytes

    def suggestion(self) -> Suggestion | None:
        """Return what other device budgets would cost; ``None`` without a tier to offload to."""
        from penstock.plan.suggestion import suggest  # noqa: PLC0415  (for advice only)

        if not self._has_tier:
            return None
        name = "ranked" if self.policy == "auto" else self.policy
        ask = partial(self._ask, name=name, slack_bytes=0)
        return suggest(
            self.profile, self.machine, self.budgets, ask, slack_bytes=self.peak_slack_bytes
        )

    @property
    def _has_tier(self) -> bool:
        return bool(self.budgets.host_bytes or self.budgets.flash_bytes)

    def _ask(
        self,
        profile: Profile,
        machine: Machine,
        budgets: Budgets,
        *,
        name: str,
        slack_bytes: int | None = None,
    ) -> Plan:
        """Return a policy's plan; it recomputes nothing that must not be, or may find no room.

        What is held can be moved away when the budget is full. What is recomputed cannot, nor can it be
        undone that it was dropped: so a plan that may exceed the budget recomputes nothing.
        """
        slack = self.slack_bytes if slack_bytes is None else slack_bytes
        policy = _leaving(policies.get(name), slack)
        notes: tuple[str, ...] = ()
        if self.recompute:
            plan = policy(profile, machine, budgets)
            if not plan.recomputed:
                return plan
            if plan.feasible and self.unrepeatable.isdisjoint(plan.recomputed):
                return plan
            notes = ("nothing is run again, for there would be no room for what that makes",)
        slots = tuple(
            replace(slot, producer=None, recipe=(), source=None) for slot in profile.slots
        )
        plan = policy(replace(profile, slots=slots), machine, budgets)
        return replace(plan, notes=(*plan.notes, *notes))


def has_codecs(plan: Plan) -> bool:
    """Return whether a plan encodes anything."""
    return any(decision.codec for decision in plan.decisions)


def _leaving(policy: Policy, slack_bytes: int) -> Policy:
    """Return the policy with part of the device budget left out, wherever a plan fits without it."""

    def asked(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
        less = replace(budgets, device_bytes=budgets.device_bytes - slack_bytes)
        plan = policy(profile, machine, less)
        return plan if plan.feasible else policy(profile, machine, budgets)

    return asked if slack_bytes else policy
