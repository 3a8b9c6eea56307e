"""Modules that can be recomputed in backward: what that frees, and what it costs.

[Note: what a recomputed module drops]
    Running module M again recomputes a slot if M (or a module inside it) made it, saved it, and is the
    first to ask for it in backward. If a module outside M asks for it first, it is M's output, which the
    next module reads as its input: it is kept or offloaded like the checkpoints between the segments of
    Chen et al. (2016, section 3), or recomputed by a recipe, see [Note: recipes]. M needs its inputs to
    run: a module none of whose inputs is saved anyway is never recomputed, because holding its inputs
    would cost what dropping its slots frees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final

from penstock.plan.groups import SlotGroup, groups_of
from penstock.plan.operators import Operator
from penstock.plan.profile import Event, Profile
from penstock.plan.recipes import (
    ancestors,
    forward_calls,
    recipe_calls,
    recipe_members,
    recipe_name,
)
from penstock.plan.recompute_sets import RecomputableModule, RecomputeSets
from penstock.plan.residency import Segment

_NEVER: Final = 1 << 200


def inside(path: str, module: str) -> bool:
    """Return True if ``path`` is ``module`` or inside it. Everything is inside the root, ``""``."""
    return not module or path == module or path.startswith(module + ".")


class RecomputeChoices:
    """Modules and recipes of a profile that can be recomputed; none without operators.

    Attributes:
        groups: The profile's slots by decision.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.groups = groups_of(profile)
        self._known_segments: dict[str, tuple[Segment, ...]] = {}

    @staticmethod
    def of(profile: Profile) -> RecomputeChoices:
        """Return the choices of a profile; cached in ``Profile.derived``."""
        found: RecomputeChoices | None = profile.derived.get(RecomputeChoices)
        if found is None:
            found = profile.derived[RecomputeChoices] = RecomputeChoices(profile)
        return found

    @cached_property
    def consumers(self) -> tuple[Operator | None, ...]:
        """Operator of backward that first asks for each slot, if it is known."""
        by_pass: dict[int, list[Operator]] = {}
        for operator in self._profile.operators:
            if operator.backward:
                by_pass.setdefault(operator.pass_index, []).append(operator)
        ends = {}
        for index, operators in by_pass.items():
            operators.sort(key=lambda one: one.start_ns)
            ends[index] = [one.end_ns for one in operators]
        found: list[Operator | None] = []
        for slot in self._profile.slots:
            operators, place = by_pass.get(slot.pass_index, []), 0
            if slot.needed_at_ns is not None and operators:
                # an operator asks just before it begins: it is the first that has not ended then
                place = bisect_right(ends[slot.pass_index], slot.needed_at_ns)
            known = slot.needed_at_ns is not None and place < len(operators)
            found.append(operators[place] if known else None)
        return tuple(found)

    @cached_property
    def modules(self) -> dict[str, RecomputableModule]:
        """Modules that can be recomputed by path, without the root; and recipes by name."""
        if not self._profile.operators:
            return {}
        return {**self._whole_modules, **self._recipes}

    @cached_property
    def _made(self) -> dict[str, list[int]]:
        """Groups that each module makes when it runs again, without the root."""
        made: dict[str, list[int]] = {}
        for g, group in enumerate(self.groups):
            for module in self._makers(group):
                made.setdefault(module, []).append(g)
        return {
            path: groups
            for path, groups in made.items()
            if all(
                (path, self._profile.slots[i].pass_index) in self._calls for i in self._of(groups)
            )
        }

    @cached_property
    def _whole_modules(self) -> dict[str, RecomputableModule]:
        return {
            path: RecomputableModule(
                path,
                tuple(groups),
                self._bytes(groups),
                sum(self._forward_ns.get((path, one.index), 0) for one in self._profile.passes),
                tuple(dict.fromkeys(self._group_of[i] for i in self._inputs[path])),
            )
            for path, groups in self._made.items()
            if path in self._inputs and path not in self._profile.unrepeatable
        }

    @cached_property
    def _recipes(self) -> dict[str, RecomputableModule]:
        found: dict[str, RecomputableModule] = {}
        for g, group in enumerate(self.groups):
            slots = [self._profile.slots[i] for i in group.indices]
            members = slots[0].recipe
            if not members or group.held_elsewhere or any(one.recipe != members for one in slots):
                continue
            if not all(self._recipe_calls(i) for i in group.indices):
                continue
            name, number = recipe_name(members), 1
            while name in found:
                number += 1
                name = recipe_name(members, number)
            reads = dict.fromkeys(
                self._group_of[one.source] for one in slots if one.source is not None
            )
            if g in reads:
                continue
            took_ns = sum(self._recipe_ns(i) for i in group.indices)
            found[name] = RecomputableModule(name, (g,), self._bytes((g,)), took_ns, tuple(reads))
        return found

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {i: g for g, group in enumerate(self.groups) for i in group.indices}

    def _recipe_calls(self, i: int) -> list[tuple[int, int]]:
        slot = self._profile.slots[i]
        return recipe_calls(slot.recipe, slot.pass_index, slot.saved_at_ns, self._calls)

    def _recipe_ns(self, i: int) -> int:
        """Return the duration of the calls that made a slot."""
        return sum(end_ns - start_ns for start_ns, end_ns in self._recipe_calls(i))

    @cached_property
    def _inputs(self) -> dict[str, list[int]]:
        """Slots that each module reads and did not make."""
        found: dict[str, list[int]] = {}
        for i, slot in enumerate(self._profile.slots):
            consumer = self.consumers[i]
            readers = {
                *ancestors(slot.key.module),
                *(ancestors(consumer.module) if consumer else ()),
            }
            makers = () if slot.producer is None else ancestors(slot.producer)
            for module in readers.difference(makers):
                found.setdefault(module, []).append(i)
        return found

    @cached_property
    def _forward_ns(self) -> dict[tuple[str, int], int]:
        own: dict[tuple[str, int], int] = {}
        for operator in self._profile.operators:
            if not operator.backward:
                key = operator.module, operator.pass_index
                own[key] = own.get(key, 0) + operator.took_ns
        total: dict[tuple[str, int], int] = {}
        for (path, index), took_ns in own.items():
            for module in ancestors(path):
                total[module, index] = total.get((module, index), 0) + took_ns
        return total

    def _makers(self, group: SlotGroup) -> Iterable[str]:
        """Return the modules, without the root, that recompute every slot of a group; innermost first."""
        if group.held_elsewhere:
            return ()
        within: tuple[str, ...] = ancestors(group.key.module)
        for i in group.indices:
            slot, consumer = self._profile.slots[i], self.consumers[i]
            if slot.producer is None:
                return ()
            others = [slot.producer, *([consumer.module] if consumer else [])]
            for other in others:
                within = tuple(path for path in within if inside(other, path))
        return within[:-1]

    def _of(self, groups: Iterable[int]) -> list[int]:
        """Return the slots of these groups."""
        return [i for g in groups for i in self.groups[g].indices]

    def _bytes(self, groups: Iterable[int]) -> int:
        return sum(self._profile.slots[i].key.nbytes for i in self._of(groups))

    def segments(self, recomputed: Iterable[str]) -> tuple[Segment, ...]:
        """Return the units of recomputation: one per module and pass, one per slot of a recipe.

        A module that is not in ``modules`` has some as well if it makes anything, as a user's plan may
        ask for.
        """
        return tuple(segment for path in recomputed for segment in self._segments_of(path))

    def _segments_of(self, path: str) -> tuple[Segment, ...]:
        known = self._known_segments.get(path)
        if known is None:
            known = self._known_segments[path] = tuple(self._made_segments(path))
        return known

    def _made_segments(self, path: str) -> Iterator[Segment]:
        slots = self._profile.slots
        members = recipe_members(path)
        if members:
            for i in self._of(self._recipes[path].groups if path in self._recipes else ()):
                source = slots[i].source
                assert source is not None
                yield Segment(
                    slots=(i,) if slots[i].needed_at_ns is not None else (),
                    inputs=(source,),
                    drops=(self._drop(members[-1], i, frozenset((i,))),),
                    took_ns=self._recipe_ns(i),
                )
            return
        made: dict[int, list[int]] = {}
        for i in self._of(self._made.get(path, ())):
            made.setdefault(slots[i].pass_index, []).append(i)
        for index, mine in made.items():
            together = frozenset(mine)
            yield Segment(
                slots=tuple(i for i in mine if slots[i].needed_at_ns is not None),
                inputs=tuple(i for i in self._inputs.get(path, ()) if slots[i].pass_index == index),
                drops=tuple(self._drop(path, i, together) for i in mine),
                took_ns=self._forward_ns[path, index],
            )

    @cached_property
    def _calls(self) -> dict[tuple[str, int], list[tuple[int, int]]]:
        """Forward calls of each module, as ``forward_calls`` returns them."""
        return forward_calls(self._profile.operators)

    def _drop(self, path: str, i: int, mine: frozenset[int]) -> tuple[int, int, int]:
        """Return when slot ``i`` is dropped, as ``Segment.drops``: after the call that saved it.

        Slots that the call saves at its end are saved before any of its slots is dropped.
        """
        steps, slot = self._profile.steps, self._profile.slots[i]
        calls = self._calls[path, slot.pass_index]
        call = max(0, bisect_right(calls, (slot.saved_at_ns, _NEVER)) - 1)
        end_ns = max(slot.saved_at_ns, calls[call][1])
        at = place = bisect_left(steps, (end_ns,))
        while at < len(steps) and steps[at][0] == end_ns:
            at += 1
            if steps[at - 1][1] is Event.SAVE and steps[at - 1][2] in mine:
                place = at
        return place, i, end_ns

    def antichain(self, limit_bytes: float) -> list[RecomputableModule]:
        """Return the largest modules, none inside another, of at most ``limit_bytes`` each."""
        taken: dict[str, RecomputableModule] = {}
        for path, module in sorted(
            self._whole_modules.items(), key=lambda one: (one[0].count("."), one[0])
        ):
            if module.nbytes <= limit_bytes and not any(a in taken for a in ancestors(path)):
                taken[path] = module
        return list(taken.values())

    def recipes(self, beside: Iterable[RecomputableModule] = ()) -> list[RecomputableModule]:
        """Return recipes that are compatible with each other and with ``beside``, worth most first."""
        taken = RecomputeSets(beside)
        found = []
        for recipe in sorted(self._recipes.values(), key=lambda one: (-one.worth, one.path)):
            if not taken.conflicts_with(recipe):
                taken.add(recipe)
                found.append(recipe)
        return found

    @property
    def sizes(self) -> list[int]:
        """Bytes that each module recomputes, without recipes."""
        return [one.nbytes for one in self._whole_modules.values()]

    def conflict_set(self, recomputed: Iterable[str]) -> RecomputeSets:
        """Return a set of these modules and recipes that finds conflicts with others."""
        return RecomputeSets(self.modules[path] for path in recomputed)
