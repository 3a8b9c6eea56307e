"""``auto``: the best choice of all other policies by replay, improved by a bounded local search.

1. If everything fits, everything is kept.
2. The choices of all other policies are replayed; the quick ones, unless there are many slots, also with
   convolutions in parts of the batch where that saves workspace at little cost (Oyama et al., "μ-cuDNN",
   2018). The best is taken: those that fit before those that do not, then by step time, then by bytes
   moved. So no other policy is better on paper. If its step takes no longer than with unlimited memory,
   that is the plan: ``ranked`` often is. A choice whose lower bound is no better than the best is not
   replayed.
3. Recomputation and offloads are mixed (:mod:`penstock.plan.mixtures`): sets of modules are tried in the
   order of their lower bounds, and the rest is offloaded by rank or by lifetime, to one tier after the
   other or to both. Then come sets with one module more or less than the best.
4. The best of these, and then the next best, are changed slot by slot, module by module: kept, moved to
   host memory, moved to flash, recomputed, swapped, encoded or not, as long as the step becomes shorter.

The search ends when ``search.WORK_SLOTS`` is spent and something fits. Step 2 is then complete for
profiles of some thousand slots; for larger ones the last of its policies may not have been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.plan.assembly import assemble
from penstock.plan.convolution import frugal
from penstock.plan.machine import Budgets, Machine
from penstock.plan.mixtures import Mixture
from penstock.plan.placement import place
from penstock.plan.plan import Plan
from penstock.plan.policies import (
    flashneuron,
    lifetime,
    ranked,
    recompute,
    vdnn_all,
    vdnn_conv,
    vdnn_dyn,
)
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.profile import Profile
from penstock.plan.search import Search


def _all(case: PlanningProblem) -> Choice:
    """Choose as ``all``, but keep storages that something else keeps alive: offloading frees nothing."""
    case = case.fitted()
    order = sorted(case.movable)
    tiers = place([case.groups[g] for g in order], case.budgets)
    return case.offload(dict(zip(order, tiers, strict=True)))


def _keep(case: PlanningProblem) -> Choice:
    lean = case.with_limits(case.leanest)
    if not lean.fits(lean.offload({})):  # then it does not fit with larger workspaces either
        return lean.offload({})
    return case.fitted([""] * len(case.groups)).offload({})


_FOR_SETS: Final = 0.5
"""Fraction of the search work after which no further sets of modules are tried."""
_FOR_NEIGHBOURS: Final = 0.8
"""Fraction of the search work after which no further neighbours of the best set are tried."""

OTHERS: Final[tuple[Callable[[PlanningProblem], Choice], ...]] = (
    ranked.choose,
    lifetime.choose,
    flashneuron.choose,
    _all,
    vdnn_dyn.choose,
    vdnn_all.choose,
    recompute.choose,
    vdnn_conv.choose,
    _keep,
)
"""Choosers of the other policies, those that are most often the best first."""
_QUICK: Final = 4
"""Number of these that choose quickly, so that their lower bounds are compared before any is replayed."""


def auto(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Return the best plan that a short search finds."""
    case = PlanningProblem(profile, machine, budgets, split=True)
    if ranked.everything_fits(case):
        why = ranked.why_everything_fits(case)
        return assemble("auto", case, case.offload({}), lambda _: why)
    return assemble("auto", case, choose(case))


def choose(case: PlanningProblem) -> Choice:
    """Return the choice for a planning problem in which not everything fits."""
    search = Search(case)
    small = case
    if search.can_try_two_cases:
        small = case.with_limits(frugal(case.given, case.machine))
    quick = [case] if small is case else [small, case]
    search.try_by_bound(_choices(OTHERS[:_QUICK], quick))
    if not search.done:
        search.try_all(_choices(OTHERS[_QUICK:], [case]))
    if not search.done:
        mix(case.with_limits(search.best.lean), search)
        search.descend()
    return search.best


def _choices(
    policies: Sequence[Callable[[PlanningProblem], Choice]], cases: Sequence[PlanningProblem]
) -> Iterator[Choice]:
    """Yield the policies' choices; if one splits a convolution, also the choice without splitting."""
    for choose_one in policies:
        for case in cases:
            choice = choose_one(case)
            yield choice
            if any(one.parts > 1 for one in choice.lean):
                yield choose_one(PlanningProblem(case.given, case.machine, case.budgets))


def mix(case: PlanningProblem, search: Search) -> None:
    """Try choices that recompute sets of modules and offload the rest; then neighbours of the best."""
    mixing = Mixture(case)
    for recomputed in mixing.sets():
        if search.done or search.spent(_FOR_SETS):
            break
        if mixing.least_ns(recomputed) < search.best_wait_ns:
            search.try_while_affordable(mixing.choices(recomputed))
    tried: set[tuple[str, ...]] = set()
    while not search.done and not search.spent(_FOR_NEIGHBOURS):
        near = mixing.neighbours(search.best.recomputed, search.best_wait_ns)
        untried = [each for each in near if each not in tried]
        if not untried:
            break
        tried.add(untried[0])
        search.try_while_affordable(mixing.choices(untried[0]))
