"""``keep``: everything stays. The baseline, and a session's policy until it has a profile."""

from __future__ import annotations

from penstock.plan.assembly import assemble
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.problem import PlanningProblem
from penstock.plan.profile import Profile


def keep(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload nothing, whatever the budget."""
    case = PlanningProblem(profile, machine, budgets)
    case = case.fitted([""] * len(case.groups))
    return assemble("keep", case, case.offload({}), lambda _: "policy keep: everything stays")
