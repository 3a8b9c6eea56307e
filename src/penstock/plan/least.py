"""The least device memory that a policy can do with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from penstock.plan.check import peak_bytes
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay import replay

_ROUNDS: Final = 8
"""With more memory a policy may choose otherwise, and need a little more again; hardly ever twice."""


def least_budget(
    profile: Profile,
    machine: Machine,
    budgets: Budgets,
    policy: Callable[[Profile, Machine, Budgets], Plan],
) -> int | None:
    """The least device bytes that are known to do for ``policy``, none below the budget's.

    A policy that cannot keep a budget goes as far as it can: what that would have needed, after all, is
    given to it, until it does.

    Args:
        profile: What the step saves.
        machine: What it runs on.
        budgets: The tiers; and the device bytes to begin with.
        policy: One of :mod:`penstock.plan.policies`.

    Returns:
        A budget that the policy's plan keeps; None if none was found, as where a tier is too small.
    """
    for _ in range(_ROUNDS):
        plan = policy(profile, machine, budgets)
        if plan.feasible and replay(profile, plan, machine).feasible:
            return budgets.device_bytes
        needed = peak_bytes(profile, plan, machine)
        if needed <= budgets.device_bytes:  # it is not the device's memory that is too small
            return None
        budgets = replace(budgets, device_bytes=needed)
    return None
