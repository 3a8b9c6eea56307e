"""How short a step can be at best: of a choice, and of any plan there is.

[Note: what bounds a step]
    Look at one moment. What would be on the device then, if everything stayed, and does not fit, is
    away: written before, or dropped. What was written had to pass the channels between its save and that
    moment, and has to pass them again before backward's last need; what was dropped must be computed
    again in between. Waits before the moment, and waits and computing again after it, are apart, so they
    add up. Nothing else is looked at: latencies, the order of needs, what a module needs beside it
    while it is run again. So no plan is better than the bound, and few reach it. Of several passes
    nothing is said: their moments are not apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from penstock.plan.baseline import oracle_ns
from penstock.plan.case import Case
from penstock.plan.machine import Budgets, Machine
from penstock.plan.profile import Event, Profile

_NEVER_NS: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast bytes pass to both tiers, or back, in bytes per second."""

    host: float
    flash: float
    over_link: bool
    """Whether what goes to flash passes the host's link as well."""

    def took_ns(self, nbytes: float, host_bytes: float, flash_bytes: float) -> float:
        """The least time for so much, of which each tier takes no more than it has room for."""
        if nbytes <= 0:
            return 0.0
        if nbytes > host_bytes + flash_bytes:
            return _NEVER_NS
        both = self.host if self.over_link else self.host + self.flash
        took_s = max(
            nbytes / both,
            (nbytes - host_bytes) / self.flash,
            (nbytes - flash_bytes) / self.host,
        )
        return took_s * 1e9


def rates(machine: Machine) -> tuple[Rates, Rates]:
    """Outwards, and back."""
    return (
        Rates(
            machine.host_write_bytes_per_s, machine.flash_write_bytes_per_s, machine.flash_over_link
        ),
        Rates(
            machine.host_read_bytes_per_s, machine.flash_read_bytes_per_s, machine.flash_over_link
        ),
    )


def least_step_ns(profile: Profile, machine: Machine, budgets: Budgets) -> int:
    """No plan that keeps these budgets makes a shorter step, on paper.

    Args:
        profile: What the step saves and computes.
        machine: What it runs on.
        budgets: What a plan may use.
    """
    ideal_ns = oracle_ns(profile, machine)
    case = Case(profile, machine, budgets)
    moment = fullest(case) if len(profile.passes) == 1 else None
    if moment is None:
        return ideal_ns
    slack_ns = 2 * len(profile.slots)  # of times that a replay rounds
    return max(ideal_ns, int(ideal_ns + moment.least_ns(case) - slack_ns))


@dataclass(frozen=True, slots=True)
class Moment:
    """When most would be on the device, if everything stayed."""

    there: frozenset[int]
    """The slots that then would be."""
    over_bytes: int
    """By how much that is more than the budget."""
    before_ns: int
    """Since the first of it was saved."""
    after_ns: int
    """Until the last of it is needed."""
    unread_bytes: int
    """Of what is there, that nothing reads back: it is never needed, or held elsewhere."""
    again: tuple[tuple[float, int], ...]
    """(ns for each byte, bytes) of what can be computed again, the cheapest first."""
    ratio: float
    """What a byte becomes at best on its way to a tier."""

    def least_ns(self, case: Case) -> float:
        """The least that waiting and computing again take together, over all shares of the two."""
        low, high = 0, min(self.over_bytes, sum(nbytes for _, nbytes in self.again))
        while high - low > 2:  # what it takes is convex in what is computed again
            third = (high - low) // 3
            if self._took_ns(low + third, case) <= self._took_ns(high - third, case):
                high -= third
            else:
                low += third
        took_ns = min(self._took_ns(again, case) for again in range(low, high + 1))
        return 0.0 if took_ns == _NEVER_NS else took_ns

    def _took_ns(self, again_bytes: int, case: Case) -> float:
        return self.took_ns(again_bytes, _cost_ns(self.again, again_bytes), case)

    def took_ns(self, again_bytes: int, again_ns: float, case: Case) -> float:
        """The least that waiting and computing again take, if so much is dropped, for so long."""
        out, back = rates(case.machine)
        ratio, budgets = self.ratio, case.budgets
        room = [
            one / ratio if ratio else _NEVER_NS for one in (budgets.host_bytes, budgets.flash_bytes)
        ]
        away_bytes = self.over_bytes - again_bytes
        if away_bytes > sum(room):
            return _NEVER_NS
        written_ns = ratio * out.took_ns(away_bytes, *room)
        read_ns = ratio * back.took_ns(away_bytes - self.unread_bytes, *room)
        return max(0.0, written_ns - self.before_ns) + max(again_ns, read_ns - self.after_ns)


def fullest(case: Case) -> Moment | None:
    """The moment at which most would be there; None: everything fits."""
    profile, given = case.profile, case.given
    slots = profile.slots
    alive, there = 0, set[int]()
    most, best = case.budgets.device_bytes, None
    for place, (_, event, i) in enumerate(profile.steps):
        if event is Event.FREE:
            alive -= slots[i].key.nbytes
            continue
        if event is Event.SAVE:
            alive += slots[i].key.nbytes
        if alive + given.small_at(event, i) > most:
            most, best = alive + given.small_at(event, i), place
    if best is None:
        return None
    for _, event, i in profile.steps[: best + 1]:
        if event is Event.SAVE:
            there.add(i)
        elif event is Event.FREE:
            there.discard(i)
    now_ns = profile.steps[best][0]
    needs = {
        i: need for i in there if (need := slots[i].needed_at_ns) is not None and need > now_ns
    }
    unread = (i for i in there if i not in needs or slots[i].held_elsewhere)
    return Moment(
        there=frozenset(there),
        over_bytes=most - case.budgets.device_bytes,
        before_ns=now_ns - min(slots[i].saved_at_ns for i in there),
        after_ns=max(needs.values(), default=now_ns) - now_ns,
        unread_bytes=sum(slots[i].key.nbytes for i in unread),
        again=tuple(sorted(_again(case, there, there.difference(needs)))),
        ratio=_least_ratio(profile),
    )


def _again(case: Case, there: set[int], unneeded: set[int]) -> Iterator[tuple[float, int]]:
    """Of what is there, and can be computed again: the least ns for each byte, and the bytes."""
    slots = case.profile.slots
    least: dict[int, float] = {}
    for path, module in case.recomputing.modules.items():
        of_pass: dict[int, int] = {}
        indices = [i for g in module.groups for i in case.groups[g].indices]
        for i in indices:
            index = slots[i].pass_index
            of_pass[index] = of_pass.get(index, 0) + slots[i].key.nbytes
        for i in there.intersection(indices):
            index = slots[i].pass_index
            each_ns = case.recomputing.forward_ns(path, index) / of_pass[index]
            if i in unneeded:
                each_ns = 0.0
            least[i] = min(each_ns, least.get(i, each_ns))
    return ((each_ns, slots[i].key.nbytes) for i, each_ns in least.items())


def _cost_ns(again: Iterable[tuple[float, int]], nbytes: int) -> float:
    total_ns = 0.0
    for each_ns, size in again:
        total_ns += each_ns * min(size, nbytes)
        nbytes -= size
        if nbytes <= 0:
            break
    return total_ns


def _least_ratio(profile: Profile) -> float:
    ratios = (sample.ratio for slot in profile.slots for sample in slot.codecs)
    return min(1.0, min(ratios, default=1.0))
