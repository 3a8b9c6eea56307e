"""Lower bounds on the step time of any plan: with unlimited memory, and within budgets.

They follow [Note: lower bound of a step] (plan/bound.py). Some of the bytes that do not fit are moved and
the others recomputed; the bound is over all such splits.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.plan.bound import NEVER_NS, PeakMoment, peak_moment
from penstock.plan.convolution import with_algorithms
from penstock.plan.machine import Budgets, Machine
from penstock.plan.problem import PlanningProblem
from penstock.plan.profile import Profile


def oracle_ns(profile: Profile, machine: Machine) -> int:
    """Return the step time with unlimited memory: the fastest convolutions and no waits."""
    fast = with_algorithms(profile, machine, ())
    begins = [one.start_ns for one in fast.passes] + [one.start_ns for one in fast.operators]
    ends = [one.end_ns for one in fast.passes] + [one.end_ns for one in fast.operators]
    return max(ends, default=0) - min(begins, default=0)


def min_step_ns(profile: Profile, machine: Machine, budgets: Budgets) -> int:
    """Return a step time that no plan within these budgets can beat in a replay.

    Args:
        profile: The step.
        machine: The machine that it runs on.
        budgets: The memory that a plan may use.
    """
    ideal_ns = oracle_ns(profile, machine)
    case = PlanningProblem(profile, machine, budgets)
    moment = peak_moment(case) if len(profile.passes) == 1 else None
    if moment is None:
        return ideal_ns
    slack_ns = 2 * len(profile.slots)  # a replay rounds times
    return max(ideal_ns, int(ideal_ns + _least_ns(case, moment) - slack_ns))


def _least_ns(case: PlanningProblem, moment: PeakMoment) -> float:
    """Return the least time of waits and recomputation, over all splits between the two."""
    recomputable = _recomputable(case, moment)

    def took_ns(again_bytes: int) -> float:
        return moment.took_ns(again_bytes, _cost_ns(recomputable, again_bytes), case)

    low, high = 0, min(moment.over_bytes, sum(nbytes for _, nbytes in recomputable))
    while high - low > 2:  # the time is convex in the recomputed bytes
        third = (high - low) // 3
        if took_ns(low + third) <= took_ns(high - third):
            high -= third
        else:
            low += third
    least = min(map(took_ns, range(low, high + 1)))
    return 0.0 if least == NEVER_NS else least


def _recomputable(case: PlanningProblem, moment: PeakMoment) -> list[tuple[float, int]]:
    """Return (least ns per byte, bytes) of each resident slot that can be recomputed, cheapest first."""
    slots = case.profile.slots
    least: dict[int, float] = {}
    for one in case.recomputing.segments(case.recomputing.modules):
        dropped = [i for _, i, _ in one.drops]
        each_ns = one.took_ns / sum(slots[i].key.nbytes for i in dropped)
        for i in moment.resident.intersection(dropped):
            least[i] = min(0.0 if i in moment.unneeded else each_ns, least.get(i, each_ns))
    return sorted((each_ns, slots[i].key.nbytes) for i, each_ns in least.items())


def _cost_ns(again: Iterable[tuple[float, int]], nbytes: int) -> float:
    total_ns = 0.0
    for each_ns, size in again:
        total_ns += each_ns * min(size, nbytes)
        nbytes -= size
        if nbytes <= 0:
            break
    return total_ns
