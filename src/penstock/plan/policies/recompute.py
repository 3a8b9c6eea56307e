"""``recompute``: nothing is offloaded; modules are run again in backward, as few as fit.

Two ways of choosing them, both at the granularity of modules, alone and with recipes beside them
([Note: recipes]):

- Sublinear (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4): segments of
  about the square root of all that is saved, all run again: one forward more, and the least memory.
- Cost-aware (as DTR, Kirisame et al., ICLR 2021, section 3, ranks): segments of one size, those first
  that free most bytes for each second of running them again, as few as fit. Sizes from the whole down
  to single layers are tried, each half of the one before.

Of those that fit, the one that computes least again is taken; if none does, the one that needs least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.plan.assemble import assemble
from penstock.plan.case import Case, Choice
from penstock.plan.explain import why_kept
from penstock.plan.machine import Budgets, Machine
from penstock.plan.placement import first_true
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.together import Module


def recompute(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Run modules again, as few as fit."""
    case = Case(profile, machine, budgets)
    return assemble("recompute", case, choose(case), why_kept, notes=_notes(case))


def choose(case: Case) -> Choice:
    """Its choice of a case.

    Convolutions are lean that need be if everything were offloaded; where nothing fits then, all of
    them, for more stays here.
    """
    options = _options(case.fitted())
    if not any(case.leaning(one.lean).fits(one) for one in options):
        options += _options(case.leaning(case.leanest))
    return min(options, key=lambda one: (_need_bytes(case, one), recompute_ns(case, one)))


def _options(case: Case) -> list[Choice]:
    return [case.offload({}), sublinear(case), *cost_aware(case)]


def _need_bytes(case: Case, choice: Choice) -> int:
    """What it needs, or the budget if that is more."""
    hard_bytes = case.leaning(choice.lean).residency(choice).hard_bytes
    return max(case.budgets.device_bytes, hard_bytes)


def recompute_ns(case: Case, choice: Choice) -> int:
    """What the choice computes again, over all passes."""
    modules = case.leaning(choice.lean).recomputing.modules
    return sum(modules[path].forward_ns for path in choice.recomputed)


def sublinear(case: Case) -> Choice:
    """Every segment of about the square root of what is saved."""
    limit = case.profile.saved_bytes / math.sqrt(max(1, len(case.groups)))
    return case.offload({}, (one.path for one in case.recomputing.antichain(limit)))


def cost_aware(case: Case) -> Iterator[Choice]:
    """For each size of segments, and for recipes, as few as fit."""
    for modules in together(case):
        order = by_worth(modules)
        everything = case.offload({}, order)
        yield _fewest(case, order) if case.fits(everything) else everything


def _fewest(case: Case, order: list[str]) -> Choice:
    def fits(count: int) -> bool:
        choice = case.offload({}, order[:count])
        return not case.lacks(case.dropped(choice)) and case.fits(choice)

    return case.offload({}, order[: first_true(len(order), fits)])


def together(case: Case) -> Iterator[list[Module]]:
    """What can be run again together: modules of each size, recipes, and both."""
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


def sizes(case: Case) -> list[float]:
    """Limits of segments: halves of all that is saved, as long as they tell modules apart."""
    modules = case.recomputing.sizes
    least = min(modules, default=0)
    most = max(modules, default=0)
    found = []
    while most and most >= least:
        found.append(float(most))
        most //= 2
    return found


def by_worth(modules: list[Module]) -> list[str]:
    """Those first that free most for each second of running them again."""
    return [one.path for one in sorted(modules, key=lambda one: (-one.worth, one.path))]


def _notes(case: Case) -> tuple[str, ...]:
    if case.recomputing.modules:
        return ()
    return ("the profile tells of no module that can be run again: nothing is recomputed",)
