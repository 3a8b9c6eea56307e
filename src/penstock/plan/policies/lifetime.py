"""``lifetime``: offload slots that are large and idle for long, to host memory and flash together.

The idea of G10 (Zhang et al., MICRO 2023, its section on smart tensor migration): the benefit of moving a
tensor is the memory pressure that it relieves, its bytes times its idle time; both tiers are used at
once, so that neither link limits the other. Slots are offloaded in the order of bytes x idle time, until
the rest fits, each to the tier whose channel is done with it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.plan.assembly import policy_of
from penstock.plan.encoding import cost_s
from penstock.plan.placement import first_true, fitting
from penstock.plan.problem import Choice, PlanningProblem

_BISECTIONS: Final = 12
"""Bisection steps, starting from the time that flash takes for everything."""


def choose(case: PlanningProblem) -> Choice:
    """Return the policy's choice for a planning problem."""
    case = case.fitted()
    order = rank(case)
    count = first_true(len(order), lambda k: case.fits(case.offloaded(order[:k])))
    return spread(case, order[:count])


def rank(case: PlanningProblem) -> list[int]:
    """Return groups by bytes x idle time, largest first; those that were never needed last."""
    groups = case.groups
    order = sorted(
        case.movable, key=lambda g: (-groups[g].key.nbytes * (groups[g].idle_ns or 0), g)
    )
    return fitting(order, groups, case.budgets)


def spread(
    case: PlanningProblem, chosen: Sequence[int], recomputed: tuple[str, ...] = ()
) -> Choice:
    """Offload these groups over both tiers, in the order in which they are saved."""
    dropped = case.dropped(case.offload({}, recomputed))
    machine = case.machine
    room = {"host": case.budgets.host_bytes, "flash": case.budgets.flash_bytes}
    busy_s = dict.fromkeys(room, 0.0)
    tiers: dict[int, str] = {}
    for g in sorted(chosen):
        group = case.groups[g]
        ends = {
            tier: busy_s[tier] + cost_s(group.key.nbytes, machine, tier, None)
            for tier in room
            if group.nbytes <= room[tier] and case.may_go(g, tier) and g not in dropped
        }
        if ends:
            tier = min(ends, key=lambda one: (ends[one], one == "flash"))
            tiers[g] = tier
            room[tier] -= group.nbytes
            busy_s[tier] = ends[tier]
            if tier == "flash" and machine.flash_over_link:
                busy_s["host"] += cost_s(group.key.nbytes, machine, "host", None)
    return case.offload(tiers, recomputed)


def paced(case: PlanningProblem, chosen: Sequence[int], recomputed: tuple[str, ...] = ()) -> Choice:
    """Offload these groups over both tiers so that flash is always busy and host memory does not run out.

    A group goes to flash if its write ends within a limit, else to host memory. The smallest limit with
    which host memory has room for the others is found by bisection.
    """
    dropped = case.dropped(case.offload({}, recomputed))
    gone = [g for g in sorted(chosen) if g not in dropped]
    nbytes = sum(case.groups[g].key.nbytes for g in gone)
    low_s, high_s = 0.0, nbytes / case.machine.flash_write_bytes_per_s
    for _ in range(_BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if _paced(case, gone, middle_s)[1]:
            low_s = middle_s
        else:
            high_s = middle_s
    return case.offload(_paced(case, gone, high_s)[0], recomputed)


def _paced(
    case: PlanningProblem, gone: Sequence[int], limit_s: float
) -> tuple[dict[int, str], bool]:
    """Return the tier of each group, and True if host memory lacked room for one of them."""
    room = {"host": case.budgets.host_bytes, "flash": case.budgets.flash_bytes}
    tiers: dict[int, str] = {}
    free_s, full = 0.0, False
    for g in gone:
        group = case.groups[g]
        saved_s = case.profile.slots[group.indices[0]].saved_at_ns / 1e9
        end_s = max(free_s, saved_s) + case.machine.write_s(group.key.nbytes)
        tier = "flash" if end_s - saved_s <= limit_s and case.may_go(g, "flash") else "host"
        if group.nbytes > room[tier]:
            full = full or tier == "host"
            tier = "host" if tier == "flash" else "flash"
        if group.nbytes <= room[tier] and case.may_go(g, tier):
            tiers[g] = tier
            room[tier] -= group.nbytes
            free_s = end_s if tier == "flash" else free_s
    return tiers, full


lifetime = policy_of("lifetime", choose)
