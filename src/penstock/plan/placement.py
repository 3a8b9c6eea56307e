"""Which tier an offloaded slot goes to: the quick ones to host memory, the rest to flash."""

from __future__ import annotations

from penstock.plan.groups import Group
from penstock.plan.machine import Budgets


def fitting(ranked: list[Group], budgets: Budgets) -> list[Group]:
    """Those groups, the first ones first, that the tiers have room for together."""
    room = budgets.host_bytes + budgets.flash_bytes
    found = []
    for group in ranked:
        if group.nbytes <= room:
            found.append(group)
            room -= group.nbytes
    return found


def place(chosen: list[Group], budgets: Budgets) -> list[str]:
    """The tier of each group: ``"host"``, ``"flash"``, or ``""`` where neither has room.

    Those that are needed soonest go to the host tier, which is quicker, until it is full. Of the
    rest, the first in ``chosen`` have precedence.
    """
    tiers = [""] * len(chosen)
    room = budgets.host_bytes
    for i in sorted(range(len(chosen)), key=lambda i: (_idle(chosen[i]), i)):
        if chosen[i].nbytes <= room:
            tiers[i], room = "host", room - chosen[i].nbytes
    room = budgets.flash_bytes
    for i, group in enumerate(chosen):
        if not tiers[i] and group.nbytes <= room:
            tiers[i], room = "flash", room - group.nbytes
    return tiers


def _idle(group: Group) -> float:
    return float("inf") if group.idle_ns is None else group.idle_ns
