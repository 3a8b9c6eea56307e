"""``vdnn-conv``: only what convolutions take as X is offloaded (vDNN, MICRO 2016, section 3.4).

Their compute is the longest, so it hides the copy best.
"""

from __future__ import annotations

from penstock.plan.assemble import assemble
from penstock.plan.case import Case, Choice
from penstock.plan.explain import why_kept
from penstock.plan.layers import Layer
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.policies.vdnn_all import fastest_or_lean, tier_notes
from penstock.plan.profile import Profile


def vdnn_conv(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload convolutions' X; fastest convolutions, or memory-optimal ones if those do not fit."""
    case = Case(profile, machine, budgets)
    return assemble("vdnn-conv", case, choose(case), why_kept, notes=tier_notes(case))


def choose(case: Case) -> Choice:
    """Its choice of a case."""
    return fastest_or_lean(case, convolutions_maps(case.layers))


def convolutions_maps(layers: list[Layer]) -> list[int]:
    """The X of the convolutions."""
    return [g for layer in layers if layer.convolution for g in layer.groups]
