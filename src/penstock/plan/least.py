"""The least device memory that a policy can do with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from penstock.plan.check import peak_bytes
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile

_ROUNDS: Final = 8
"""With more memory a policy may choose otherwise, and need a little more again; hardly ever twice."""


def least_budget(
    profile: Profile,
    machine: Machine,
    budgets: Budgets,
    policy: Callable[[Profile, Machine, Budgets], Plan],
) -> int | None:
    """The least device bytes that are known to do for ``policy``.

    A policy that cannot keep a budget goes as far as it can: what that would have needed, after all, is
    given to it, until it does.

    Args:
        profile: What the step saves.
        machine: What it runs on.
        budgets: The tiers; the device's is not looked at.
        policy: One of :mod:`penstock.plan.policies`.

    Returns:
        A budget that the policy's plan keeps; None if none was found.
    """
    device_bytes = 0
    for _ in range(_ROUNDS):
        plan = policy(profile, machine, replace(budgets, device_bytes=device_bytes))
        if plan.feasible:
            return device_bytes
        device_bytes = max(device_bytes + 1, peak_bytes(profile, plan, machine))
    return None
