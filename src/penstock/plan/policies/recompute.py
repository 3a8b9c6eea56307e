"""``recompute``: offload nothing; recompute as few modules as the budget requires.

Two ways of choosing them, both at the granularity of modules, with and without recipes
([Note: recipes]):

- Sublinear (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4): segments of
  about the square root of the saved bytes, all recomputed: one more forward, and the least memory.
- Cost-aware (as DTR, Kirisame et al., ICLR 2021, section 3, ranks): segments of one size, in the order
  of bytes freed per second of recomputation, as few as needed. Sizes from the whole down to single
  layers are tried, each half of the one before.

Of the choices that fit, the one that recomputes least is taken; if none does, the one that needs least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.plan.assembly import policy_of
from penstock.plan.placement import first_true
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.recompute_sets import RecomputableModule


def choose(case: PlanningProblem) -> Choice:
    """Return the policy's choice for a planning problem.

    Workspaces are limited as if everything were offloaded; if nothing fits then, all of them are removed,
    because more bytes stay resident here.
    """
    options = _options(case.fitted())
    if not any(case.with_limits(one.lean).fits(one) for one in options):
        options += _options(case.with_limits(case.leanest))
    return min(options, key=lambda one: (_need_bytes(case, one), recompute_ns(case, one)))


def _options(case: PlanningProblem) -> list[Choice]:
    return [case.offload({}), sublinear(case), *cost_aware(case)]


def _need_bytes(case: PlanningProblem, choice: Choice) -> int:
    """Return the bytes that a choice needs, or the budget if that is more."""
    hard_bytes = case.with_limits(choice.lean).residency(choice).hard_bytes
    return max(case.budgets.device_bytes, hard_bytes)


def recompute_ns(case: PlanningProblem, choice: Choice) -> int:
    """Return the recomputation time of a choice, over all passes."""
    modules = case.with_limits(choice.lean).recomputing.modules
    return sum(modules[path].forward_ns for path in choice.recomputed)


def sublinear(case: PlanningProblem) -> Choice:
    """Return the choice that recomputes every segment of about the square root of the saved bytes."""
    limit = case.profile.saved_bytes / math.sqrt(max(1, len(case.groups)))
    return case.offload({}, (one.path for one in case.recomputing.antichain(limit)))


def cost_aware(case: PlanningProblem) -> Iterator[Choice]:
    """Yield for each size of segments, and for recipes, the choice that recomputes as few as possible."""
    for modules in compatible_sets(case):
        order = by_worth(modules)
        everything = case.offload({}, order)
        yield _fewest(case, order) if case.fits(everything) else everything


def _fewest(case: PlanningProblem, order: list[str]) -> Choice:
    def fits(count: int) -> bool:
        choice = case.offload({}, order[:count])
        return not case.lacks(case.dropped(choice)) and case.fits(choice)

    return case.offload({}, order[: first_true(len(order), fits)])


def compatible_sets(case: PlanningProblem) -> Iterator[list[RecomputableModule]]:
    """Yield sets that can be recomputed together: modules of each size, recipes, and both."""
    recomputing = case.recomputing
    recipes = recomputing.recipes()
    if recipes:
        yield recipes
    for limit in sizes(case):
        modules = recomputing.antichain(limit)
        yield modules
        beside = recomputing.recipes(modules) if recipes else []
        if beside:
            yield modules + beside


def sizes(case: PlanningProblem) -> list[float]:
    """Return size limits of segments: successive halves of the largest, down to the smallest."""
    modules = case.recomputing.sizes
    least = min(modules, default=0)
    most = max(modules, default=0)
    found = []
    while most and most >= least:
        found.append(float(most))
        most //= 2
    return found


def by_worth(modules: list[RecomputableModule]) -> list[str]:
    """Sort modules by bytes freed per second of recomputation, most first."""
    return [one.path for one in sorted(modules, key=lambda one: (-one.worth, one.path))]


def _notes(case: PlanningProblem) -> tuple[str, ...]:
    if case.recomputing.modules:
        return ()
    return ("the profile has no module that can be recomputed: nothing is recomputed",)


recompute = policy_of("recompute", choose, _notes)
