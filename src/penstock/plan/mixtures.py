"""Mixed choices: recompute some modules and offload what must still leave the device.

The set of recomputed modules matters most. So sets of modules are sorted by a lower bound on their step
time (:mod:`penstock.plan.bound`), which takes a hundredth of the time of making and replaying a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Final

from penstock.plan.bound import PeakMoment, peak_moment
from penstock.plan.policies import lifetime, ranked
from penstock.plan.policies.recompute import by_worth, compatible_sets
from penstock.plan.problem import Choice, PlanningProblem

_PARTS: Final = 8
"""Number of prefixes of a ranking of modules that are tried as sets to recompute."""

Set = tuple[str, ...]
"""Module paths, none inside another, in alphabetical order."""


class Mixture:
    """Generator of mixed choices for one planning problem."""

    def __init__(self, case: PlanningProblem) -> None:
        self._case = case.fitted()

    @cached_property
    def _orders(self) -> tuple[list[int], ...]:
        return ranked.rank(self._case), lifetime.rank(self._case)

    @cached_property
    def _moment(self) -> PeakMoment | None:
        return peak_moment(self._case)

    @cached_property
    def _alive_bytes(self) -> dict[str, int]:
        """Bytes by which dropping each module lowers the peak, by module."""
        resident = self._moment.resident if self._moment else frozenset()
        groups, slots = self._case.groups, self._case.profile.slots
        return {
            path: sum(
                slots[i].key.nbytes for g in one.groups for i in groups[g].indices if i in resident
            )
            for path, one in self._case.recomputing.modules.items()
        }

    def least_ns(self, recomputed: Set) -> float:
        """Return a lower bound on the step's time beyond plain compute if these are recomputed."""
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
        """List sets of modules of similar size that free most for their time, most promising first."""
        found: dict[Set, float] = {(): self.least_ns(())}
        for modules in compatible_sets(self._case):
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
        """Yield sets with one module more or less that could be faster, most promising first.

        Args:
            recomputed: The set that they differ from.
            below_ns: Time beyond plain compute that their lower bound must stay below.
        """
        found = {}
        beside = self._case.recomputing.conflict_set(recomputed)
        for path, module in self._case.recomputing.modules.items():
            others = [one for one in recomputed if one != path]
            if len(others) == len(recomputed):
                conflicts = beside.conflicts_with(module)
                others = [one for one in others if one not in conflicts]
                others.append(path)
            each = tuple(sorted(others))
            found[each] = self.least_ns(each)
        order = sorted(found, key=lambda each: (found[each], each))
        return takewhile(lambda each: found[each] < below_ns, iter(order))

    def choices(self, recomputed: Set) -> Iterator[Choice]:
        """Yield choices that offload the rest by rank or lifetime, to one tier at a time or to both."""
        placements: tuple[Callable[[PlanningProblem, Sequence[int], Set], Choice], ...] = (
            ranked.offload_first,
            lifetime.spread,
            lifetime.paced,
        )
        for order in self._orders:
            chosen = order[: ranked.enough(self._case, order, recomputed)]
            for offload in placements:
                yield offload(self._case, chosen, recomputed)
