"""What a policy comes to on a profile, before a step is run: its plan, replayed, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.plan import policies
from penstock.plan.address_space import AddressUse, first_fit, two_ended
from penstock.plan.least import min_budget
from penstock.plan.machine import Budgets, Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay import Replayed, Trace, replay
from penstock.plan.replay.result import Level


@dataclass(frozen=True)
class Outcome:
    """One policy's plan, and what it will cost."""

    plan: Plan
    replayed: Replayed
    """With its trace."""
    trace: Trace
    least_bytes: int | None
    """The least device memory that is known to do for this policy, with these tiers; None if none is."""

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self.plan.policy

    @property
    def fits(self) -> bool:
        """Whether the device budget and the tiers' capacities are kept."""
        return self.plan.feasible and self.replayed.feasible

    @cached_property
    def first_fit(self) -> AddressUse:
        """The address space for slots that are placed first fit."""
        return first_fit(self.trace.residences)

    @cached_property
    def two_ended(self) -> AddressUse:
        """The same, with what is kept at one end and what comes and goes at the other."""
        return two_ended(self.trace.residences)

    def average_bytes(self, memory: str) -> int:
        """The mean over the step of what ``"device"``, ``"host"`` or ``"flash"`` holds."""
        if memory == "device":
            return self.replayed.average_bytes
        return _mean(self.trace.memory[memory], self.replayed.step_ns)

    @property
    def moved_bytes(self) -> int:
        """Written to and read from both tiers in one step."""
        tiers = (self.replayed.host, self.replayed.flash)
        return sum(tier.written_bytes + tier.read_bytes for tier in tiers)


def outcome(policy: str, profile: Profile, machine: Machine, budgets: Budgets) -> Outcome:
    """Plan and replay.

    Raises:
        ConfigError: There is no such policy.
    """
    plan = policies.get(policy)(profile, machine, budgets)
    replayed = replay(profile, plan, machine, trace=True)
    assert replayed.trace is not None
    fits = plan.feasible and replayed.feasible
    least = None if fits else min_budget(profile, machine, budgets, policies.get(policy))
    return Outcome(plan, replayed, replayed.trace, least)


def best_first(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those that fit by step time, then the bytes that they move; then the others by what they need."""
    return sorted(outcomes, key=_rank)


def _rank(one: Outcome) -> tuple[bool, float, int, str]:
    if one.fits:
        return False, one.replayed.step_ns, one.moved_bytes, one.policy
    needed = float("inf") if one.least_bytes is None else one.least_bytes
    return True, needed, one.replayed.peak_bytes, one.policy


def _mean(levels: tuple[Level, ...], step_ns: int) -> int:
    ends = [*(when for when, _ in levels[1:]), step_ns]
    held = sum(n * max(0, end - at) for (at, n), end in zip(levels, ends, strict=False))
    return held // step_ns if step_ns else 0
