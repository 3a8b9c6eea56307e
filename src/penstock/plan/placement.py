"""Which tier an offloaded slot goes to: the quick ones to host memory, the rest to flash.

[Note: a tier's room is counted before encoding]
    Codecs make transfers shorter, but a plan does not count on the room that they leave in a tier. What
    a tensor shrinks to was measured on a sample of one step, and sparsity changes as a network learns;
    and how long a frame is shows only when it has been encoded, after the tensor was promised to the
    tier. If a tier were full then, the tensor would stay on the device, and the device budget with it
    would be lost. So every slot that may be encoded counts as it is, and a frame's header more: then the
    plan holds even if from now on nothing compresses at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.plan.groups import Group
from penstock.plan.machine import Budgets


def fitting(ranked: Iterable[int], groups: Sequence[Group], budgets: Budgets) -> list[int]:
    """Those of the groups, by index and the first ones first, that the tiers have room for together."""
    room = budgets.host_bytes + budgets.flash_bytes
    found = []
    for g in ranked:
        if groups[g].nbytes <= room:
            found.append(g)
            room -= groups[g].nbytes
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


def first_true(count: int, holds: Callable[[int], bool]) -> int:
    """The k in 0..count that bisection ends at: the least for which ``holds``, if it is monotone.

    Where ``holds(count)`` is false the answer is ``count``. If one predicate holds wherever another
    does, its answer is not above the other's, monotone or not.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
