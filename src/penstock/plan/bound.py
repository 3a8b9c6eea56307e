"""Lower bounds on the step time of any plan: with unlimited memory, and within budgets.

[Note: lower bound of a step]
    Consider one moment. Of the bytes that would be on the device then if everything stayed, those that
    do not fit have been written or dropped. Written bytes had to pass the channels between their save and
    that moment, and must pass them again before backward's last need; dropped bytes must be recomputed in
    between. Waits before the moment, and waits and recomputation after it, do not overlap, so they add
    up. Everything else is ignored: latencies, the order of needs, the memory that a module takes while it
    is recomputed. So no plan is better than the bound, and few reach it. A step of several passes has no
    bound: their moments may overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.plan.convolution import with_algorithms
from penstock.plan.machine import Budgets, Machine
from penstock.plan.problem import PlanningProblem
from penstock.plan.profile import Profile
from penstock.plan.residency import Residents

_NEVER_NS: Final = float("inf")


@dataclass(frozen=True, slots=True)
class TierRates:
    """Bandwidths to both tiers, or from both, in bytes per second."""

    host: float
    flash: float
    over_link: bool
    """True if bytes to flash pass the host's link as well."""

    def took_ns(self, nbytes: float, host_bytes: float, flash_bytes: float) -> float:
        """Return the least time in ns to move ``nbytes``, with at most so many of them per tier."""
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


def rates(machine: Machine) -> tuple[TierRates, TierRates]:
    """Return the rates of writing and of reading."""
    return (
        TierRates(
            machine.host_write_bytes_per_s, machine.flash_write_bytes_per_s, machine.flash_over_link
        ),
        TierRates(
            machine.host_read_bytes_per_s, machine.flash_read_bytes_per_s, machine.flash_over_link
        ),
    )


def oracle_ns(profile: Profile, machine: Machine) -> int:
    """Return the step time with unlimited memory: the fastest convolutions and no waits."""
    fast = with_algorithms(profile, machine, ())
    begins = [one.start_ns for one in fast.passes] + [one.start_ns for one in fast.operators]
    ends = [one.end_ns for one in fast.passes] + [one.end_ns for one in fast.operators]
    return max(ends, default=0) - min(begins, default=0)


def min_step_ns(profile: Profile, machine: Machine, budgets: Budgets) -> int:
    """Return a step time that no plan within these budgets can beat in a replay.

    Args:
        profile: The step.
        machine: The machine that it runs on.
        budgets: The memory that a plan may use.
    """
    ideal_ns = oracle_ns(profile, machine)
    case = PlanningProblem(profile, machine, budgets)
    moment = peak_moment(case) if len(profile.passes) == 1 else None
    if moment is None:
        return ideal_ns
    slack_ns = 2 * len(profile.slots)  # a replay rounds times
    return max(ideal_ns, int(ideal_ns + moment.least_ns(case) - slack_ns))


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The time at which most bytes would be on the device if everything stayed."""

    resident: frozenset[int]
    """Slots that would be on the device then."""
    over_bytes: int
    """Bytes by which they exceed the budget."""
    before_ns: int
    """Time since the first of them was saved."""
    after_ns: int
    """Time until the last of them is needed."""
    unread_bytes: int
    """Bytes of them that are never read back: they are not needed again, or are held elsewhere."""
    again: tuple[tuple[float, int], ...]
    """(ns per byte, bytes) of those that can be recomputed, cheapest first."""
    ratio: float
    """Best compression ratio of any codec; at most 1."""

    def least_ns(self, case: PlanningProblem) -> float:
        """Return the least time of waits and recomputation, over all splits between the two."""
        low, high = 0, min(self.over_bytes, sum(nbytes for _, nbytes in self.again))
        while high - low > 2:  # the time is convex in the recomputed bytes
            third = (high - low) // 3
            if self._took_ns(low + third, case) <= self._took_ns(high - third, case):
                high -= third
            else:
                low += third
        took_ns = min(self._took_ns(again, case) for again in range(low, high + 1))
        return 0.0 if took_ns == _NEVER_NS else took_ns

    def _took_ns(self, again_bytes: int, case: PlanningProblem) -> float:
        return self.took_ns(again_bytes, _cost_ns(self.again, again_bytes), case)

    def took_ns(self, again_bytes: int, again_ns: float, case: PlanningProblem) -> float:
        """Return the least time of waits and recomputation if ``again_bytes`` take ``again_ns`` again."""
        out, back = rates(case.machine)
        ratio, budgets = self.ratio, case.budgets
        room = [
            one / ratio if ratio else _NEVER_NS for one in (budgets.host_bytes, budgets.flash_bytes)
        ]
        offloaded_bytes = self.over_bytes - again_bytes
        if offloaded_bytes > sum(room):
            return _NEVER_NS
        written_ns = ratio * out.took_ns(offloaded_bytes, *room)
        read_ns = ratio * back.took_ns(offloaded_bytes - self.unread_bytes, *room)
        return max(0.0, written_ns - self.before_ns) + max(again_ns, read_ns - self.after_ns)


def peak_moment(case: PlanningProblem) -> PeakMoment | None:
    """Return the moment at which most would be resident; None if everything fits."""
    profile, given, steps = case.profile, case.given, case.profile.arrays
    slots, device_bytes = profile.slots, case.budgets.device_bytes
    everything = Residents(profile, bytearray(len(slots)))
    small = np.where(
        steps.save,
        given.arrays.small_at_save[steps.slot],
        given.arrays.small_at_use[steps.slot],
    )
    alive = np.where(steps.free, 0, everything.kept_bytes + small)
    most = int(np.max(alive, initial=0))
    if most <= device_bytes:
        return None
    best = int(np.argmax(alive))
    resident = set(everything.kept.at(best).tolist())
    now_ns = profile.steps[best][0]
    needs = {
        i: need for i in resident if (need := slots[i].needed_at_ns) is not None and need > now_ns
    }
    unread = (i for i in resident if i not in needs or slots[i].held_elsewhere)
    return PeakMoment(
        resident=frozenset(resident),
        over_bytes=most - device_bytes,
        before_ns=now_ns - min(slots[i].saved_at_ns for i in resident),
        after_ns=max(needs.values(), default=now_ns) - now_ns,
        unread_bytes=sum(slots[i].key.nbytes for i in unread),
        again=tuple(sorted(_again(case, resident, resident.difference(needs)))),
        ratio=_least_ratio(profile),
    )


def _again(
    case: PlanningProblem, resident: set[int], unneeded: set[int]
) -> Iterator[tuple[float, int]]:
    """Return (least ns per byte, bytes) of each resident slot that can be recomputed."""
    slots = case.profile.slots
    least: dict[int, float] = {}
    for one in case.recomputing.segments(case.recomputing.modules):
        dropped = [i for _, i, _ in one.drops]
        each_ns = one.took_ns / sum(slots[i].key.nbytes for i in dropped)
        for i in resident.intersection(dropped):
            least[i] = min(0.0 if i in unneeded else each_ns, least.get(i, each_ns))
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
