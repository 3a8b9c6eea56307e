"""``auto``: at least as good as every other policy, by replay; then better, while that is quickly found.

1. Everything fits: everything stays.
2. The choices of all other policies are replayed; and the same with convolutions in parts of the batch
   where their workspace does not fit, or can be less for little time (Oyama et al., "μ-cuDNN", 2018). The
   best is taken: those that fit before those that do not, then by step time, then by the bytes that are
   moved. So none is better on paper. If a step takes no longer than with memory without end, that is the
   plan: so ``ranked`` often is at once.
3. Recompute and offload are mixed: for each size of segments, of those modules that free most for each
   second of running them again, none, a few, more, all; and what must still be offloaded is, by rank
   or by lifetime, to one tier after the other or to both.
4. The best of these, and then the next best, are changed slot by slot, module by module: kept, to host
   memory, to flash, recomputed, two exchanged, encoded or not, read back later, as long as the step
   becomes shorter.

All of this ends when ``search.WORK`` is spent and something fits. Step 2 then is complete for profiles of
some thousand slots; of larger ones the last of its policies may not have been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from penstock.plan.assemble import assemble
from penstock.plan.case import Case, Choice
from penstock.plan.convolution import frugal
from penstock.plan.machine import Budgets, Machine
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
from penstock.plan.profile import Profile
from penstock.plan.search import Search


def _all(case: Case) -> Choice:
    """As ``all``, but for what something else keeps alive: to offload that would free nothing."""
    case = case.fitted()
    order = sorted(case.movable)
    tiers = place([case.groups[g] for g in order], case.budgets)
    return case.offload(dict(zip(order, tiers, strict=True)))


def _keep(case: Case) -> Choice:
    return case.fitted([""] * len(case.groups)).offload({})


OTHERS: Final[tuple[Callable[[Case], Choice], ...]] = (
    ranked.choose,
    lifetime.choose,
    flashneuron.choose,
    vdnn_dyn.choose,
    vdnn_all.choose,
    _all,
    recompute.choose,
    vdnn_conv.choose,
    _keep,
)
"""The other policies, those that are most often the best first."""


def auto(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """The best plan that is quickly found."""
    case = Case(profile, machine, budgets, split=True)
    if ranked.everything_fits(case):
        why = ranked.why_everything_fits(case)
        return assemble("auto", case, case.offload({}), lambda _: why)
    return assemble("auto", case, choose(case))


def choose(case: Case) -> Choice:
    """Its choice of a case in which not everything fits."""
    search = Search(case)
    search.look(_others(case))
    if not search.done:
        search.explore(mixed(case.leaning(search.best.lean)))
        search.descend()
    return search.best


def _others(case: Case) -> Iterator[Choice]:
    """The other policies' choices: with small workspaces, in parts of the batch, and as they are."""
    small = case.leaning(frugal(case.given, case.machine))
    whole = Case(case.given, case.machine, case.budgets)
    for choose_one in OTHERS:
        if small is not case:
            yield choose_one(small)
        choice = choose_one(case)
        yield choice
        if any(one.parts > 1 for one in choice.lean):
            yield choose_one(whole)


def mixed(case: Case) -> Iterator[Choice]:
    """Recompute some, offload what must still go."""
    case = case.fitted()
    orders = (ranked.rank(case), lifetime.rank(case))
    for recomputed in _sets(case):
        for order in orders:
            count = ranked.enough(case, order, recomputed)
            yield lifetime.spread(case, order[:count], recomputed)
            yield ranked.offload_first(case, order[:count], recomputed)


def _sets(case: Case) -> Iterator[tuple[str, ...]]:
    yield ()
    for limit in recompute.sizes(case):
        order = recompute.by_worth(case.recomputing.antichain(limit))
        counts = {len(order) * part // 8 for part in (1, 2, 4, 6, 8)} - {0}
        for count in sorted(counts):
            yield tuple(sorted(order[:count]))
