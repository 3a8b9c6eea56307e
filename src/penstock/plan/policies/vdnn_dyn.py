"""``vdnn-dyn``: the first of vDNN's configurations that fits (MICRO 2016, section 3.4).

The cheapest comes first: nothing offloaded, with the fastest convolutions; the X of convolutions, then of
every layer, with the fastest; the same two with each convolution stepped down to the fastest algorithm
whose workspace fits; the same two with no workspace at all. If even the last does not fit, the network
cannot be trained by vDNN, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.plan.assembly import policy_of
from penstock.plan.policies.vdnn_all import every_map, offload_maps, tier_notes
from penstock.plan.policies.vdnn_conv import convolutions_maps
from penstock.plan.problem import Choice, PlanningProblem


def choose(case: PlanningProblem) -> Choice:
    """Return the policy's choice for a planning problem."""
    choice = case.offload({})
    for choice in _configurations(case):
        if case.with_limits(choice.lean).fits(choice):
            break
    return choice


def _configurations(case: PlanningProblem) -> Iterator[Choice]:
    yield case.offload({})
    sets = (convolutions_maps(case.layers), every_map(case.layers))
    for wanted in sets:
        yield offload_maps(case, wanted)
    if case.leanest:
        lean = case.with_limits(case.leanest)
        without = [offload_maps(lean, wanted) for wanted in sets]
        for wanted, choice in zip(sets, without, strict=True):
            if lean.fits(choice):  # otherwise there is no room for any workspace
                yield offload_maps(case.fitted(choice.tiers), wanted)
        yield from without


vdnn_dyn = policy_of("vdnn-dyn", choose, tier_notes)
