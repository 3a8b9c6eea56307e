"""``flashneuron``: FlashNeuron's offloading scheduler (FAST 2021, section 4.2): activations to flash.

It knows how many bytes must be offloaded, and when each is saved; a FIFO channel writes them.

Phase 1, linear
    Slots above 1 MiB are chosen in the order of forward until the rest fits. If their writes end before
    the forward does, that is all.
Phase 2, compression-aware
    From the end of the chosen slots, slots are replaced one by one until the writes end before the
    forward does: first those that do not compress, then those that do. For each, later slots that
    compress better are added until they have its bytes, the sparsest first; a slot without such later
    slots is not replaced. If the rest does not fit then, remaining slots are added, compressible ones
    first. (In the paper the second kind are tensors that are only cast to 16 bits, replaced by sparse
    ones.)

The profile measures which slots compress, and how well (``SlotProfile.codecs``); the paper assumes
ratios, and also casts to 16 bits, which loses bits. Reading back is ignored, as in the paper. If flash
has no budget, host memory takes its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import Final

from penstock.plan.assembly import policy_of
from penstock.plan.placement import first_true, fitting
from penstock.plan.problem import Choice, PlanningProblem

MIN_BYTES: Final = 2**20
"""Smallest slot that is offloaded: smaller transfers would be slow."""


def choose(case: PlanningProblem) -> Choice:
    """Return the policy's choice for a planning problem."""
    case = case.fitted()
    tier = case.main_tier
    scheduler = _Scheduler(case, tier)
    chosen = scheduler.schedule()
    choice = case.offload(dict.fromkeys(chosen, tier))
    samples = {g: sample for g in chosen if (sample := scheduler.samples[g]) is not None}
    return replace(choice, samples=samples)


class _Scheduler:
    def __init__(self, case: PlanningProblem, tier: str) -> None:
        self._case = case
        self._tier = tier
        groups = case.groups
        large = (g for g in sorted(case.movable) if groups[g].key.nbytes > MIN_BYTES)
        rooms = case.budgets if tier == "host" else replace(case.budgets, host_bytes=0)
        self._candidates = fitting(large, groups, rooms)
        self.samples = {g: case.best_samples[g] for g in self._candidates}

    def schedule(self) -> list[int]:
        """Return the groups to offload, in the order of forward."""
        every = self._candidates
        count = first_true(len(every), lambda k: self._enough(every[:k]))
        linear, rest = every[:count], every[count:]
        if self._in_time(linear):
            return linear
        later = sorted((g for g in rest if self.samples[g]), key=self._ratio)
        given_up = sorted(linear, key=lambda g: (self.samples[g] is not None, -g))
        dropped = first_true(
            len(given_up), lambda k: self._in_time(self._exchange(linear, given_up[:k], later))
        )
        chosen = self._exchange(linear, given_up[:dropped], later)
        there = set(chosen)
        left = sorted((g for g in every if g not in there), key=self._ratio)
        more = first_true(len(left), lambda k: self._enough([*chosen, *left[:k]]))
        return sorted([*chosen, *left[:more]])

    def _ratio(self, g: int) -> float:
        sample = self.samples[g]
        return 1.0 if sample is None else sample.ratio

    def _enough(self, chosen: list[int]) -> bool:
        return self._case.fits(self._case.offloaded(chosen))

    def _exchange(self, linear: list[int], out: list[int], later: list[int]) -> list[int]:
        """Replace slots ``out`` of ``linear`` by slots of ``later`` with at least as many bytes.

        Args:
            linear: Groups chosen in the order of forward.
            out: Groups to replace, in this order, if a later one compresses better.
            later: Compressible groups, the sparsest first.
        """
        chosen = set(linear)
        added, spare_bytes = 0, 0
        for g in out:
            if added == len(later) or self._ratio(later[added]) >= self._ratio(g):
                continue
            chosen.remove(g)
            spare_bytes -= self._case.groups[g].key.nbytes
            while (
                spare_bytes < 0
                and added < len(later)
                and self._ratio(later[added]) < self._ratio(g)
            ):
                chosen.add(later[added])
                spare_bytes += self._case.groups[later[added]].key.nbytes
                added += 1
        return sorted(chosen)

    def _in_time(self, chosen: list[int]) -> bool:
        """Return True if the FIFO channel has written everything when its forward ends."""
        writes = [write for g in chosen for write in self._writes[g]]
        writes.sort(key=itemgetter(0))
        free_ns = 0
        for saved_ns, turn_ns, took_ns in writes:
            free_ns = (free_ns if free_ns > saved_ns else saved_ns) + took_ns
            if free_ns > turn_ns:
                return False
        return True

    @cached_property
    def _writes(self) -> dict[int, list[tuple[int, int, int]]]:
        """(saved at, end of forward, time to write) in ns of each slot written in forward, by group."""
        profile, machine = self._case.profile, self._case.machine
        turn_ns = {one.index: one.backward_start_ns for one in profile.passes}
        found: dict[int, list[tuple[int, int, int]]] = {}
        for g in self._candidates:
            found[g] = mine = []
            sample = self.samples[g]
            for slot in (profile.slots[i] for i in self._case.groups[g].indices):
                nbytes, end_ns = slot.key.nbytes, turn_ns[slot.pass_index]
                moved = nbytes if sample is None else sample.encoded_bytes(nbytes)
                if slot.saved_at_ns <= end_ns:
                    took_ns = round(machine.write_s(moved, self._tier) * 1e9)
                    mine.append((slot.saved_at_ns, end_ns, took_ns))
        return found


def _notes(case: PlanningProblem) -> Iterator[str]:
    if not case.budgets.flash_bytes:
        yield "no flash budget: host memory takes its place"
    if not any(group.codecs for group in case.groups):
        yield "no slot was sampled for compression: phase 2 has nothing to choose"


flashneuron = policy_of("flashneuron", choose, _notes)
