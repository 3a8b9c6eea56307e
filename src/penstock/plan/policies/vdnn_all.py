"""``vdnn-all``: offload the input feature map of every layer (vDNN, MICRO 2016, section 3.4)."""

from __future__ import annotations

from penstock.plan.assembly import policy_of
from penstock.plan.layers import Layer, prefetch_search
from penstock.plan.problem import Choice, PlanningProblem


def choose(case: PlanningProblem) -> Choice:
    """Return the policy's choice for a planning problem."""
    return fastest_or_lean(case, every_map(case.layers))


def every_map(layers: list[Layer]) -> list[int]:
    """Return the groups of every layer's X."""
    return [g for layer in layers for g in layer.groups]


def fastest_or_lean(case: PlanningProblem, wanted: list[int]) -> Choice:
    """Offload these maps, with performance-optimal convolutions (p), or memory-optimal ones (m)."""
    choice = offload_maps(case, wanted)
    if case.fits(choice):
        return choice
    return offload_maps(case.with_limits(case.leanest), wanted)


def offload_maps(case: PlanningProblem, wanted: list[int]) -> Choice:
    """Offload these maps, in the order of forward as far as the tier has room; prefetch by the search.

    vDNN's tier is host memory. If it has no budget, flash takes its place.
    """
    tier, room = _tier(case)
    tiers: dict[int, str] = {}
    for g in sorted(case.movable.intersection(wanted)):
        if case.groups[g].nbytes <= room and case.may_go(g, tier):
            tiers[g] = tier
            room -= case.groups[g].nbytes
    choice = case.offload(tiers)
    searched = prefetch_search(case.layers, tiers)
    return Choice(choice.tiers, lean=choice.lean, prefetch=searched, samples={})


def tier_notes(case: PlanningProblem) -> tuple[str, ...]:
    """Return a note if the tier is not the paper's."""
    if _tier(case)[0] == "flash":
        return ("no host budget: flash takes the place of vDNN's host memory",)
    return ()


def _tier(case: PlanningProblem) -> tuple[str, int]:
    if case.budgets.host_bytes or not case.budgets.flash_bytes:
        return "host", case.budgets.host_bytes
    return "flash", case.budgets.flash_bytes


vdnn_all = policy_of("vdnn-all", choose, tier_notes)
