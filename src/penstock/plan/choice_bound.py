"""Lower bound on the step time of one choice: quicker than a replay.

It follows [Note: lower bound of a step] (bound.py). At every save of forward, the offloaded bytes that do
not fit beside the kept ones must have been written; from the first need on, offloaded slots must be read
before they are used. In a step of several passes neither is considered: only compute time counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.plan.arrays import Integers, StepArrays
from penstock.plan.assembly import samples_of
from penstock.plan.bound import TierRates, rates
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.residency import OFFLOADED, Residents


def min_step_ns(case: PlanningProblem, choice: Choice) -> int:
    """Return a step time that no feasible replay of this choice can beat, in a twentieth of its time.

    Args:
        case: The planning problem.
        choice: The decision for each group.
    """
    case = case.with_limits(choice.lean)
    profile, mask = case.profile, case.mask(choice)
    begin_ns, end_ns = profile.axis_ns
    again_ns = 0
    if choice.recomputed:
        modules = case.recomputing.modules
        again_ns = sum(modules[path].forward_ns for path in choice.recomputed)
    waits_ns = 0.0
    if OFFLOADED in mask and len(profile.passes) == 1:
        ratio = min([1.0, *(sample.ratio for sample in samples_of(case, choice).values())])
        found = Residents(profile, mask, case.segments(choice))
        walk = _Walk(case, choice, found, profile.arrays, ratio)
        waits_ns = walk.written_ns() + max(0.0, walk.read_ns(again_ns) - again_ns)
    return end_ns - begin_ns + again_ns + max(0, int(waits_ns) - 2 * len(profile.slots))


@dataclass(frozen=True, slots=True)
class _Walk:
    """Walk over the events of a profile under one choice."""

    case: PlanningProblem
    choice: Choice
    residents: Residents
    steps: StepArrays
    ratio: float

    @property
    def _turn(self) -> int:
        """Index of the first event of backward."""
        return int(np.argmax(self.steps.use)) if self.steps.use.any() else self.steps.count

    @property
    def _room(self) -> Integers:
        """Bytes free beside the kept ones at each event, before anything is recomputed."""
        steps = self.steps
        return self.case.budgets.device_bytes - self.residents.kept_bytes - steps.small

    def _on_flash(self) -> Integers:
        """Return an array over slots: 1 on flash, 0 elsewhere."""
        tiers = np.array([tier == "flash" for tier in self.choice.tiers], np.int64)
        return tiers[self.case.group_of]

    def written_ns(self) -> float:
        """Return a lower bound on forward's waits for writes."""
        turn, steps = self._turn, self.steps
        save = steps.save[:turn]
        gone = np.where(save & (self.residents.fate[:turn] == OFFLOADED), steps.nbytes[:turn], 0)
        if not gone.any():
            return 0.0
        on_flash = np.cumsum(gone * self._on_flash()[steps.slot[:turn]])
        every = np.cumsum(gone)
        room = self._room[:turn]
        took = _took_ns(rates(self.case, self.ratio)[0], every - room, every - on_flash, on_flash)
        took = took * self.ratio - (steps.at_ns[:turn] - steps.at_ns[int(np.argmax(gone > 0))])
        return float(np.max(took, initial=0.0, where=save & (every > np.maximum(room, 0))))

    def read_ns(self, again_ns: int) -> float:
        """Return a lower bound on the time added to backward, recomputation included."""
        turn, steps, first = self._turn, self.steps, self.residents.comes
        if turn == steps.count:
            return again_ns
        before = np.zeros(len(steps.sizes), np.bool_)
        before[steps.slot[:turn][steps.save[:turn]]] = True
        slots = self.case.profile.slots
        before &= ~np.fromiter((slot.held_elsewhere for slot in slots), np.bool_, len(slots))
        comes = np.where(before & (first >= turn), first, steps.count)
        sizes = [
            np.bincount(comes, weights, steps.count + 1)[turn:-1] for weights in self._weights()
        ]
        every, on_flash = (np.cumsum(one) for one in sizes)
        room = max(0, int(self._room[turn]))
        took = _took_ns(rates(self.case, self.ratio)[1], every - room, every - on_flash, on_flash)
        took = took * self.ratio - (steps.at_ns[turn:] - steps.at_ns[turn])
        later = again_ns - (np.cumsum(self._again_ns()) - self._again_ns())[turn:]
        return max(again_ns, float(np.max(took + later, where=sizes[0] > 0, initial=0.0)))

    def _weights(self) -> tuple[Integers, Integers]:
        sizes = self.steps.sizes
        return sizes, sizes * self._on_flash()

    def _again_ns(self) -> Integers:
        """Return the recomputation time at each event."""
        found = np.zeros(self.steps.count + 1, np.int64)
        took = [one.took_ns for one in self.case.segments(self.choice)]
        np.add.at(found, self.residents.first_uses, np.array(took, np.int64))
        return found[:-1]


def _took_ns(rates: TierRates, nbytes: Integers, host: Integers, flash: Integers) -> Integers:
    """Vectorized ``TierRates.took_ns``."""
    both = rates.host if rates.over_link else rates.host + rates.flash
    took_s = np.maximum(
        nbytes / both,
        np.maximum(
            (nbytes - host - rates.staged_bytes) / rates.flash, (nbytes - flash) / rates.host
        ),
    )
    return np.where(nbytes > 0, took_s * 1e9, 0.0)
