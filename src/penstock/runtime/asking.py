"""Asking a policy for a plan that runs nothing again that must not be."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.policies import Policy
from penstock.plan.profile import Profile


def ask(
    policy: Policy,
    profile: Profile,
    machine: Machine,
    budgets: Budgets,
    *,
    recompute: bool,
    unrepeatable: AbstractSet[str],
) -> Plan:
    """The policy's plan; it runs nothing again that must not be, or that there may be no room for.

    What is held can be moved away when the budget is full. What is made again cannot, nor can it be
    undone that it was dropped: so a plan that may exceed the budget runs nothing again.

    Args:
        policy: Who is asked.
        profile: What the network does.
        machine: The bandwidths to plan for.
        budgets: What there is.
        recompute: Whether anything may be run again.
        unrepeatable: Paths of the modules that may not.
    """
    notes: tuple[str, ...] = ()
    if recompute:
        plan = policy(profile, machine, budgets)
        if not plan.recomputed:
            return plan
        if plan.feasible and unrepeatable.isdisjoint(plan.recomputed):
            return plan
        notes = ("nothing is run again, for there would be no room for what that makes",)
    nobody = tuple(replace(slot, producer=None, recipe=(), source=None) for slot in profile.slots)
    plan = policy(replace(profile, slots=nobody), machine, budgets)
    return replace(plan, notes=(*plan.notes, *notes))


def leaving(policy: Policy, slack_bytes: int) -> Policy:
    """The policy with so many bytes of the device budget left out, wherever a plan fits without them.

    Args:
        policy: Who is asked.
        slack_bytes: What restored storages may take beside their own bytes (``page_slack_bytes``).
    """

    def asked(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
        less = replace(budgets, device_bytes=budgets.device_bytes - slack_bytes)
        plan = policy(profile, machine, less)
        return plan if plan.feasible else policy(profile, machine, budgets)

    return asked if slack_bytes else policy


def without_codecs(profile: Profile) -> Profile:
    """The profile, as if no codec had been tried."""
    return replace(profile, slots=tuple(replace(slot, codecs=()) for slot in profile.slots))
