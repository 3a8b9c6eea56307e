"""The predicted outcome of a policy on a profile: its plan, the replay, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.plan import policies
from penstock.plan.address_space import AddressUse, first_fit, two_ended
from penstock.plan.machine import Budgets, Machine
from penstock.plan.min_budget import min_budget
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay import Replayed, Trace, replay
from penstock.plan.replay.result import Level


@dataclass(frozen=True)
class PolicyOutcome:
    """One policy's plan and its predicted cost."""

    plan: Plan
    replayed: Replayed
    """Result of the replay."""
    trace: Trace
    least_bytes: int | None
    """Minimum known device budget for this policy with these tiers; None if it fits or none is known."""

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.plan.policy

    @property
    def fits(self) -> bool:
        """True if the device budget and the tiers' capacities are kept."""
        return self.plan.feasible and self.replayed.feasible

    @cached_property
    def first_fit(self) -> AddressUse:
        """Address space used if slots are placed first fit."""
        return first_fit(self.trace.residences)

    @cached_property
    def two_ended(self) -> AddressUse:
        """Address space used with kept slots at one end and the other slots at the other end."""
        return two_ended(self.trace.residences)

    def average_bytes(self, memory: str) -> int:
        """Return the mean over the step of the bytes in ``"device"``, ``"host"`` or ``"flash"``."""
        if memory == "device":
            return self.replayed.average_bytes
        return _mean(self.trace.memory[memory], self.replayed.step_ns)

    @property
    def moved_bytes(self) -> int:
        """Bytes written to and read from both tiers in one step."""
        tiers = (self.replayed.host, self.replayed.flash)
        return sum(tier.written_bytes + tier.read_bytes for tier in tiers)


def outcome(policy: str, profile: Profile, machine: Machine, budgets: Budgets) -> PolicyOutcome:
    """Make a plan and replay it.

    Raises:
        ConfigError: The policy does not exist.
    """
    plan = policies.get(policy)(profile, machine, budgets)
    replayed = replay(profile, plan, machine, trace=True)
    assert replayed.trace is not None
    fits = plan.feasible and replayed.feasible
    least = None if fits else min_budget(profile, machine, budgets, policies.get(policy))
    return PolicyOutcome(plan, replayed, replayed.trace, least)


def best_first(outcomes: Iterable[PolicyOutcome]) -> list[PolicyOutcome]:
    """Sort outcomes: those that fit by step time and traffic, then the others by needed memory."""
    return sorted(outcomes, key=_rank)


def _rank(one: PolicyOutcome) -> tuple[bool, float, int, str]:
    if one.fits:
        return False, one.replayed.step_ns, one.moved_bytes, one.policy
    needed = float("inf") if one.least_bytes is None else one.least_bytes
    return True, needed, one.replayed.peak_bytes, one.policy


def _mean(levels: tuple[Level, ...], step_ns: int) -> int:
    ends = [*(when for when, _ in levels[1:]), step_ns]
    held = sum(n * max(0, end - at) for (at, n), end in zip(levels, ends, strict=False))
    return held // step_ns if step_ns else 0
