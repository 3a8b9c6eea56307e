"""Smallest device budget that a policy can keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from penstock.plan.convolution import with_algorithms
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay import replay
from penstock.plan.replay.moves import moves_of
from penstock.plan.replay.recompute import recomputed_segments
from penstock.plan.residency import residency

_ROUNDS: Final = 8
"""Largest number of attempts. Given more memory a policy may choose differently and need slightly more
again, but rarely twice."""


def min_budget(
    profile: Profile,
    machine: Machine,
    budgets: Budgets,
    policy: Callable[[Profile, Machine, Budgets], Plan],
) -> int | None:
    """Find the smallest device budget that ``policy`` is known to keep, not below the given one.

    A policy that cannot keep a budget returns its closest plan. The budget is raised to the bytes that
    this plan needs, until the plan fits.

    Args:
        profile: The step.
        machine: The machine that it runs on.
        budgets: The tiers, and the device budget to begin with.
        policy: One of :mod:`penstock.plan.policies`.

    Returns:
        A budget that the policy's plan keeps; None if none was found, as when a tier is too small.
    """
    for _ in range(_ROUNDS):
        plan = policy(profile, machine, budgets)
        if plan.feasible and replay(profile, plan, machine).feasible:
            return budgets.device_bytes
        needed = hard_bytes(profile, plan, machine)
        if needed <= budgets.device_bytes:  # a tier is too small, not the device
            return None
        budgets = replace(budgets, device_bytes=needed)
    return None


def hard_bytes(profile: Profile, plan: Plan, machine: Machine) -> int:
    """Return the smallest device budget that a plan's decisions can run in, however long the waits."""
    profile = with_algorithms(profile, machine, plan.workspace_limits)
    action = moves_of(profile, plan, machine).action
    segments = recomputed_segments(profile, plan, action)
    return residency(profile, action, segments).hard_bytes
