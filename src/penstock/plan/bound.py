"""Lower bound on the waits and the recomputation of a step, whatever its plan.

[Note: lower bound of a step]
    Consider one moment. Of the bytes that would be on the device then if everything stayed, those that
    do not fit have been written or dropped. Written bytes had to pass the channels between their save and
    that moment, and must pass them again before backward's last need; dropped bytes must be recomputed in
    between. If there is staging memory, all of them pass the link, but as many as that holds need not
    have been written to flash by then, nor are they read from there. Waits before the moment, and waits
    and recomputation after it, do not overlap, so they add up. Everything else is ignored: latencies, the
    order of needs, the memory that a module takes while it is recomputed. So no plan is better than the
    bound, and few reach it. A step of several passes has no bound: their moments may overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.plan.problem import PlanningProblem
from penstock.plan.profile import Profile
from penstock.plan.residency import Residents

NEVER_NS: Final = float("inf")
"""Time of what the tiers have no room for."""


@dataclass(frozen=True, slots=True)
class TierRates:
    """Bandwidths to both tiers, or from both, in bytes per second."""

    host: float
    flash: float
    over_link: bool
    """True if bytes to flash pass the host's link as well."""
    staged_bytes: float = 0.0
    """Bytes to flash that pass only the link: they may be in staging memory."""

    def took_ns(self, nbytes: float, host_bytes: float, flash_bytes: float) -> float:
        """Return the least time in ns to move ``nbytes``, with at most so many of them per tier."""
        if nbytes <= 0:
            return 0.0
        if nbytes > host_bytes + flash_bytes:
            return NEVER_NS
        both = self.host if self.over_link else self.host + self.flash
        took_s = max(
            nbytes / both,
            (nbytes - host_bytes - self.staged_bytes) / self.flash,
            (nbytes - flash_bytes) / self.host,
        )
        return took_s * 1e9


def rates(case: PlanningProblem, ratio: float) -> tuple[TierRates, TierRates]:
    """Return the rates of writing and of reading, if bytes move by this compression ratio."""
    machine, staging_bytes = case.machine, case.budgets.staging_bytes
    over_link = machine.flash_over_link or staging_bytes > 0
    staged_bytes = staging_bytes / ratio if ratio else NEVER_NS
    return (
        TierRates(
            *(machine.host_write_bytes_per_s, machine.flash_write_bytes_per_s),
            *(over_link, staged_bytes),
        ),
        TierRates(
            *(machine.host_read_bytes_per_s, machine.flash_read_bytes_per_s),
            *(over_link, staged_bytes),
        ),
    )


@dataclass(frozen=True, slots=True)
class PeakMoment:
    """The time at which most bytes would be on the device if everything stayed."""

    resident: frozenset[int]
    """Slots that would be on the device then."""
    unneeded: frozenset[int]
    """Those of them that are not needed any more."""
    over_bytes: int
    """Bytes by which they exceed the budget."""
    before_ns: int
    """Time since the first of them was saved."""
    after_ns: int
    """Time until the last of them is needed."""
    unread_bytes: int
    """Bytes of them that are never read back: they are not needed again, or are held elsewhere."""
    ratio: float
    """Best compression ratio of any codec; at most 1."""

    def took_ns(self, again_bytes: int, again_ns: float, case: PlanningProblem) -> float:
        """Return the least time of waits and recomputation if ``again_bytes`` take ``again_ns`` again."""
        ratio, budgets = self.ratio, case.budgets
        out, back = rates(case, ratio)
        room = [
            one / ratio if ratio else NEVER_NS for one in (budgets.host_bytes, budgets.flash_bytes)
        ]
        offloaded_bytes = self.over_bytes - again_bytes
        if offloaded_bytes > sum(room):
            return NEVER_NS
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
        unneeded=frozenset(resident.difference(needs)),
        over_bytes=most - device_bytes,
        before_ns=now_ns - min(slots[i].saved_at_ns for i in resident),
        after_ns=max(needs.values(), default=now_ns) - now_ns,
        unread_bytes=sum(slots[i].key.nbytes for i in unread),
        ratio=_least_ratio(profile),
    )


def _least_ratio(profile: Profile) -> float:
    ratios = (sample.ratio for slot in profile.slots for sample in slot.codecs)
    return min(1.0, min(ratios, default=1.0))
