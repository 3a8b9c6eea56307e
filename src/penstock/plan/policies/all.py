"""``all``: offload everything above the floor. The least memory, and the most traffic."""

from __future__ import annotations

from penstock.plan.assembly import assemble
from penstock.plan.explanation import why_no_room
from penstock.plan.machine import Budgets, Machine
from penstock.plan.placement import place
from penstock.plan.plan import Plan
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.profile import Profile


def offload_all(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload every slot, earliest saved first if the tiers fill up."""
    case = PlanningProblem(profile, machine, budgets)
    return assemble("all", case, choose(case), lambda _: why_no_room(case))


def choose(case: PlanningProblem) -> Choice:
    """Return the choice that offloads everything, as far as there is room."""
    case = case.fitted()
    return case.offload(dict(enumerate(place(list(case.groups), case.budgets))))
