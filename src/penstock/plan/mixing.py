"""Recompute some and offload what must still go: which mixtures promise most, and what they come to.

What is recomputed decides most. So sets of modules are put in the order of the step that they allow at
best (:mod:`penstock.plan.bound`), which takes a hundredth of what making and replaying a choice takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Final

from penstock.plan.bound import Moment, fullest
from penstock.plan.case import Case, Choice
from penstock.plan.policies import lifetime, ranked
from penstock.plan.policies.recompute import by_worth, together

_PARTS: Final = 8
"""Into how many parts a ranking of modules is cut, to recompute some of them."""

Set = tuple[str, ...]
"""Paths of modules, none inside another, in alphabetical order."""


class Mixing:
    """What can be mixed in one case."""

    def __init__(self, case: Case) -> None:
        self._case = case.fitted()

    @cached_property
    def _orders(self) -> tuple[list[int], ...]:
        return ranked.rank(self._case), lifetime.rank(self._case)

    @cached_property
    def _moment(self) -> Moment | None:
        return fullest(self._case)

    @cached_property
    def _alive_bytes(self) -> dict[str, int]:
        """By module, what dropping it takes from the fullest moment."""
        there = self._moment.there if self._moment else frozenset()
        groups, slots = self._case.groups, self._case.profile.slots
        return {
            path: sum(
                slots[i].key.nbytes for g in one.groups for i in groups[g].indices if i in there
            )
            for path, one in self._case.recomputing.modules.items()
        }

    def least_ns(self, recomputed: Set) -> float:
        """How much longer than computing alone a step takes at least, if these are recomputed."""
        modules = self._case.recomputing.modules
        return self._least_ns(
            sum(self._alive_bytes[path] for path in recomputed),
            sum(modules[path].forward_ns for path in recomputed),
        )

    def _least_ns(self, dropped_bytes: int, again_ns: int) -> float:
        if self._moment is None:
            return again_ns
        return self._moment.took_ns(dropped_bytes, again_ns, self._case)

    def sets(self) -> list[Set]:
        """Of modules of one size those first that free most for their time; the most promising first."""
        found: dict[Set, float] = {(): self.least_ns(())}
        for modules in together(self._case):
            order = by_worth(modules)
            counts = {len(order) * part // _PARTS for part in range(1, _PARTS + 1)}
            dropped = accumulate(self._alive_bytes[path] for path in order)
            again = accumulate(self._case.recomputing.modules[path].forward_ns for path in order)
            least = [self._least_ns(*each) for each in zip(dropped, again, strict=True)]
            if least:
                counts.add(1 + least.index(min(least)))
            for count in counts - {0}:
                found[tuple(sorted(order[:count]))] = least[count - 1]
        return sorted(found, key=lambda each: (found[each], each))

    def neighbours(self, recomputed: Set, below_ns: float) -> Iterator[Set]:
        """Sets with one module more, or less, the most promising first, that could take less time.

        Args:
            recomputed: From which they differ.
            below_ns: What they must promise, beside computing alone.
        """
        found = {}
        beside = self._case.recomputing.together(recomputed)
        for path, module in self._case.recomputing.modules.items():
            others = [one for one in recomputed if one != path]
            if len(others) == len(recomputed):
                clashing = beside.clashing(module)
                others = [one for one in others if one not in clashing]
                others.append(path)
            each = tuple(sorted(others))
            found[each] = self.least_ns(each)
        order = sorted(found, key=lambda each: (found[each], each))
        return takewhile(lambda each: found[each] < below_ns, iter(order))

    def choices(self, recomputed: Set) -> Iterator[Choice]:
        """What must still go, by rank or by lifetime, to one tier after the other or to both at once."""
        placements: tuple[Callable[[Case, Sequence[int], Set], Choice], ...] = (
            ranked.offload_first,
            lifetime.spread,
            lifetime.paced,
        )
        for order in self._orders:
            chosen = order[: ranked.enough(self._case, order, recomputed)]
            for offload in placements:
                yield offload(self._case, chosen, recomputed)
