"""``vdnn-conv``: offload only the inputs X of convolutions (vDNN, MICRO 2016, section 3.4).

Convolutions compute longest, so they hide the copy best.
"""

from __future__ import annotations

from penstock.plan.assembly import assemble
from penstock.plan.explanation import why_kept
from penstock.plan.layers import Layer
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.policies.vdnn_all import fastest_or_lean, tier_notes
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.profile import Profile


def vdnn_conv(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload convolutions' X; fastest convolutions, or memory-optimal ones if those do not fit."""
    case = PlanningProblem(profile, machine, budgets)
    return assemble("vdnn-conv", case, choose(case), why_kept, notes=tier_notes(case))


def choose(case: PlanningProblem) -> Choice:
    """Return the policy's choice for a planning problem."""
    return fastest_or_lean(case, convolutions_maps(case.layers))


def convolutions_maps(layers: list[Layer]) -> list[int]:
    """Return the groups of the convolutions' X."""
    return [g for layer in layers if layer.convolution for g in layer.groups]
