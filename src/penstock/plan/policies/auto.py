"""``auto``: at least as good as every other policy, by replay; then better, while that is quickly found.

1. Everything fits: everything stays.
2. The choices of all other policies are replayed; the quick ones, unless there are many slots, also with
   convolutions in parts of the batch where their workspace can be less for little time (Oyama et al.,
   "μ-cuDNN", 2018). The best is taken: those that fit before those that do not, then by step time, then
   by the bytes that are moved. So none is better on paper. If a step takes no longer than with memory
   without end, that is the plan: so ``ranked`` often is at once. One that cannot be better, by what
   bounds its step, is not replayed.
3. Recompute and offload are mixed (:mod:`penstock.plan.mixing`): sets of modules, those first that allow
   the shortest step at best; and what must still be offloaded is, by rank or by lifetime, to one tier
   after the other or to both. Then sets with one module more or less than the best.
4. The best of these, and then the next best, are changed slot by slot, module by module: kept, to host
   memory, to flash, recomputed, two exchanged, encoded or not, read back later, as long as the step
   becomes shorter.

All of this ends when ``search.WORK`` is spent and something fits. Step 2 then is complete for profiles of
some thousand slots; of larger ones the last of its policies may not have been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.plan.assemble import assemble
from penstock.plan.case import Case, Choice
from penstock.plan.convolution import frugal
from penstock.plan.machine import Budgets, Machine
from penstock.plan.mixing import Mixing
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
    lean = case.leaning(case.leanest)
    if not lean.fits(lean.offload({})):  # nor does it with some of the workspaces
        return lean.offload({})
    return case.fitted([""] * len(case.groups)).offload({})


_FOR_SETS: Final = 0.5
"""Up to what share of the work sets of modules are looked at."""
_FOR_NEIGHBOURS: Final = 0.8
"""And up to what share those next to the best."""

OTHERS: Final[tuple[Callable[[Case], Choice], ...]] = (
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
"""The other policies, those that are most often the best first."""
_QUICK: Final = 4
"""The first of them know how good they are at best before one is replayed, for they choose quickly."""


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
    small = case.leaning(frugal(case.given, case.machine)) if search.ample else case
    quick = [case] if small is case else [small, case]
    search.look_first(_choices(OTHERS[:_QUICK], quick))
    if not search.done:
        search.look(_choices(OTHERS[_QUICK:], [case]))
    if not search.done:
        mix(case.leaning(search.best.lean), search)
        search.descend()
    return search.best


def _choices(
    policies: Sequence[Callable[[Case], Choice]], cases: Sequence[Case]
) -> Iterator[Choice]:
    """What these policies choose, and where they would split a convolution also what they do without."""
    for choose_one in policies:
        for case in cases:
            choice = choose_one(case)
            yield choice
            if any(one.parts > 1 for one in choice.lean):
                yield choose_one(Case(case.given, case.machine, case.budgets))


def mix(case: Case, search: Search) -> None:
    """Recompute some, offload what must still go: sets of modules, and then what is next to the best."""
    mixing = Mixing(case)
    for recomputed in mixing.sets():
        if search.done or search.spent(_FOR_SETS):
            break
        if mixing.least_ns(recomputed) < search.best_wait_ns:
            search.explore(mixing.choices(recomputed))
    tried: set[tuple[str, ...]] = set()
    while not search.done and not search.spent(_FOR_NEIGHBOURS):
        near = mixing.neighbours(search.best.recomputed, search.best_wait_ns)
        untried = [each for each in near if each not in tried]
        if not untried:
            break
        tried.add(untried[0])
        search.explore(mixing.choices(untried[0]))
