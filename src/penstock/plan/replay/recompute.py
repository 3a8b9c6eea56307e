"""Recomputation in a replay: the modules that a plan recomputes, their inputs, outputs and times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.core.errors import PlanError
from penstock.plan.operators import Operator
from penstock.plan.plan import Plan
from penstock.plan.profile import Event, Profile, SlotProfile
from penstock.plan.recipes import forward_calls, recipe_calls, recipe_members
from penstock.plan.replay.moves import OFFLOADED, RECOMPUTED

DROP: Final = 3
"""Event beyond those of profiles: the end of a recomputed module's forward."""
_NEVER: Final = 1 << 200


@dataclass(slots=True, eq=False)
class Recomputation:
    """Recomputation of one module in one pass, all of its calls together; or of one recipe."""

    took_ns: int = 0
    """Total time of its forward operators."""
    calls: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of each uninterrupted run of them."""
    slots: list[int] = field(default_factory=list)
    """Slots that it recomputes."""
    inputs: list[int] = field(default_factory=list)
    """Offloaded slots that it reads and did not make."""

    def drop_ns(self, saved_ns: int) -> int:
        """Return when a slot saved at ``saved_ns`` is dropped: at the end of the call."""
        place = bisect_right(self.calls, (saved_ns, _NEVER))
        return max(saved_ns, self.calls[max(0, place - 1)][1])


def reruns_of(profile: Profile, plan: Plan, action: Sequence[int]) -> dict[int, Recomputation]:
    """Return the recomputation that makes each recomputed slot, by slot.

    Args:
        profile: The profile, whose operators give the time of a forward.
        plan: The plan with its ``recomputed`` modules.
        action: Action for each slot.

    Raises:
        PlanError: The plan recomputes a slot that no module of ``recomputed`` has both made and saved,
            or a module without operators in the profile.
    """
    if RECOMPUTED not in action:
        return {}
    modules = frozenset(plan.recomputed)
    reruns: dict[tuple[str, int], Recomputation] = {}
    backward = _backward(profile.operators)
    before: dict[int, str | None] = {}
    for operator in sorted(profile.operators, key=lambda one: one.start_ns):
        if operator.backward:
            continue
        index, module = operator.pass_index, owner_of(operator.module, modules)
        if module is not None:
            rerun = reruns.setdefault((module, index), Recomputation())
            rerun.took_ns += operator.took_ns
            begin_ns = operator.start_ns
            if before.get(index) == module:
                begin_ns = rerun.calls.pop()[0]
            rerun.calls.append((begin_ns, operator.end_ns))
        before[index] = module
    found = _recipes(profile, plan, action)
    for i, slot in enumerate(profile.slots):
        if i in found:
            continue
        if action[i] == RECOMPUTED:
            found[i] = _maker(slot, modules, reruns)
            found[i].slots.append(i)
        elif action[i] == OFFLOADED:
            for module in _readers(slot, modules, backward.get(slot.pass_index)):
                if (module, slot.pass_index) in reruns:
                    reruns[module, slot.pass_index].inputs.append(i)
    return found


def _recipes(profile: Profile, plan: Plan, action: Sequence[int]) -> dict[int, Recomputation]:
    """Return the recipe of each slot that is recomputed by one; see [Note: recipes]."""
    found: dict[int, Recomputation] = {}
    calls: dict[tuple[str, int], list[tuple[int, int]]] | None = None
    for i, slot in enumerate(profile.slots):
        decision = plan.lookup_match(profile.match_keys[i]) if action[i] == RECOMPUTED else None
        if decision is None or not decision.recipe:
            continue
        if calls is None:
            calls = forward_calls(profile.operators)
        members = recipe_members(decision.recipe)
        mine = recipe_calls(members, slot.pass_index, slot.saved_at_ns, calls)
        if slot.recipe != members or slot.source is None or not mine:
            raise PlanError(
                f"plan: slot {slot.key} is to be recomputed by {decision.recipe!r}, but in the profile"
                f" {f'it is made by {slot.recipe}' if slot.recipe else 'it has no known recipe'}"
            )
        inputs = [slot.source] if action[slot.source] == OFFLOADED else []
        took_ns = sum(end_ns - start_ns for start_ns, end_ns in mine)
        found[i] = Recomputation(took_ns, [mine[-1]], [i], inputs)
    return found


def with_drops(
    profile: Profile, reruns: dict[int, Recomputation]
) -> Sequence[tuple[int, int, int]]:
    """Add events ``DROP`` to the profile's steps where recomputed slots are dropped.

    A drop precedes other events of its time, except the module's own saves.
    """
    steps = profile.steps
    if not reruns:
        return steps
    places = []
    for i, rerun in reruns.items():
        drop_ns = rerun.drop_ns(profile.slots[i].saved_at_ns)
        at = place = bisect_left(steps, (drop_ns,))
        while at < len(steps) and steps[at][0] == drop_ns:
            at += 1
            if reruns.get(steps[at - 1][2]) is rerun and steps[at - 1][1] is Event.SAVE:
                place = at
        places.append((place, drop_ns, i))
    found: list[tuple[int, int, int]] = []
    taken = 0
    for place, drop_ns, i in sorted(places):
        found += steps[taken:place]
        found.append((drop_ns, DROP, i))
        taken = place
    return [*found, *steps[taken:]]


_Timed = tuple[list[int], list[Operator]]


def _backward(operators: Sequence[Operator]) -> dict[int, _Timed]:
    """Return the backward operators of each pass, in order, with their ends."""
    found: dict[int, list[Operator]] = {}
    for operator in operators:
        if operator.backward:
            found.setdefault(operator.pass_index, []).append(operator)
    for one in found.values():
        one.sort(key=lambda operator: operator.start_ns)
    return {index: ([one.end_ns for one in each], each) for index, each in found.items()}


def owner_of(path: str | None, modules: Collection[str]) -> str | None:
    """Return the innermost of ``modules`` that is or contains ``path``; None if there is none."""
    if path is None:
        return None
    while path not in modules:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def _maker(
    slot: SlotProfile, modules: Collection[str], reruns: dict[tuple[str, int], Recomputation]
) -> Recomputation:
    module = owner_of(slot.key.module, modules)
    if module is None or owner_of(slot.producer, modules) != module:
        raise PlanError(
            f"plan: slot {slot.key} is to be recomputed, but no module of 'recomputed' has both made"
            f" and saved it (it was made by {slot.producer!r})"
        )
    rerun = reruns.get((module, slot.pass_index))
    if rerun is None:
        raise PlanError(
            f"plan: module {module!r} is to be recomputed, but the profile has no operators of its"
            f" forward in pass {slot.pass_index}, so its time is not known"
        )
    return rerun


def _readers(slot: SlotProfile, modules: Collection[str], backward: _Timed | None) -> set[str]:
    """Return the modules that save a slot, or first ask for it, without having made it."""
    readers = {owner_of(slot.key.module, modules)}
    if backward is not None and slot.needed_at_ns is not None:
        ends, operators = backward
        place = bisect_right(ends, slot.needed_at_ns)  # an operator asks just before it begins
        if place < len(operators):
            readers.add(owner_of(operators[place].module, modules))
    return {one for one in readers if one is not None} - {owner_of(slot.producer, modules)}
