"""Slowdown of smaller device budgets, from the profile of a run without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from penstock.core.units import MIB, round_up
from penstock.observe.suggestion import SuggestedBudget, Suggestion
from penstock.plan.machine import Budgets, Machine
from penstock.plan.min_budget import min_budget
from penstock.plan.policies import Policy
from penstock.plan.profile import Profile
from penstock.plan.replay import replay

_HALVINGS: Final = 3
"""Number of halvings of the saved bytes whose budgets are replayed."""


def suggest(
    profile: Profile, machine: Machine, budgets: Budgets, policy: Policy, *, slack_bytes: int = 0
) -> Suggestion:
    """Replay some smaller device budgets.

    Args:
        profile: The step.
        machine: The machine's measured speeds.
        budgets: The tiers.
        policy: The policy that makes the plans.
        slack_bytes: Bytes of a budget that the runtime takes beyond those that plans count.

    Returns:
        Budgets in whole MiB that the policy's plans keep, down to the least. There are none if the least
        is as large as the saved bytes: nothing would be gained.
    """
    least = min_budget(profile, machine, replace(budgets, device_bytes=1), policy)
    if least is None:
        return Suggestion(budgets=(), least_bytes=None)
    saved_bytes, least_bytes = profile.peak_saved_bytes, round_up(least + slack_bytes, MIB)
    shares = (round_up(saved_bytes >> halving, MIB) for halving in range(1, _HALVINGS + 1))
    found = []
    for device_bytes in sorted({least_bytes, *shares}, reverse=True):
        if not least_bytes <= device_bytes < saved_bytes:
            continue
        limits = replace(budgets, device_bytes=device_bytes - slack_bytes)
        replayed = replay(profile, policy(profile, machine, limits), machine)
        if replayed.feasible:
            found.append(SuggestedBudget(device_bytes=device_bytes, slowdown=replayed.slowdown))
    return Suggestion(budgets=tuple(found), least_bytes=least_bytes)
