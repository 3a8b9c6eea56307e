"""``vdnn-conv``: offload only the inputs X of convolutions (vDNN, MICRO 2016, section 3.4).

Convolutions compute longest, so they hide the copy best.
"""

from __future__ import annotations

from penstock.plan.assembly import policy_of
from penstock.plan.layers import Layer
from penstock.plan.policies.vdnn_all import fastest_or_lean, tier_notes
from penstock.plan.problem import Choice, PlanningProblem


def choose(case: PlanningProblem) -> Choice:
    """Return the policy's choice for a planning problem."""
    return fastest_or_lean(case, convolutions_maps(case.layers))


def convolutions_maps(layers: list[Layer]) -> list[int]:
    """Return the groups of the convolutions' X."""
    return [g for layer in layers if layer.convolution for g in layer.groups]


vdnn_conv = policy_of("vdnn-conv", choose, tier_notes)
