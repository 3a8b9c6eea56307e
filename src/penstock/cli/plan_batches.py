"""Search for the largest batch that fits: a guess from two profiles, then profiles around the answer.

Profiles take long to make. Between two batches everything in them is nearly linear, so the likely answer
is found with interpolated profiles. These only say where to look; real ones decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Final

from penstock.core.errors import PlanError
from penstock.plan import policies
from penstock.plan.machine import Budgets, Machine
from penstock.plan.min_budget import hard_bytes
from penstock.plan.profile import Profile
from penstock.plan.replay import replay
from penstock.report.plan_table import LargestFit

MAX_BATCH: Final = 1 << 20
"""Largest batch that is tried."""
_GUESSES: Final = 8
"""Number of guesses after which the needs count as too far from linear for more."""


class LargestBatch:
    """Search for the largest batch, policy by policy; each starts from the results of the others.

    The decision for a batch always comes from a profile that was made for that batch, never from scaling.
    The search assumes that fitting is monotonous: the answer fits, and one more does not.
    """

    def __init__(
        self, profile_of: Callable[[int], Profile], given: int, machine: Machine, budgets: Budgets
    ) -> None:
        """Prepare the search.

        Args:
            profile_of: Function that makes the profile of a batch.
            given: Batch that the user asked for.
            machine: Machine for which plans are made.
            budgets: Memory that plans may use.
        """
        self._profile_of = profile_of
        self._given = given
        self._machine = machine
        self._budgets = budgets
        self._profiles: dict[int, Profile] = {}
        self._fits: dict[tuple[str, int], bool] = {}
        self._found = 0

    def profile(self, batch_size: int) -> Profile:
        """Return the profile of a batch, which is made only once."""
        if batch_size not in self._profiles:
            self._profiles[batch_size] = self._profile_of(batch_size)
        return self._profiles[batch_size]

    def of(self, policy: str) -> LargestFit:
        """Return the largest batch for which the policy's plan fits."""
        low, high, near, tried = 0, MAX_BATCH + 1, 1, 0
        trial = self._found if policy == "auto" and self._found else self._given
        while high - low > 1:
            if self.fits(policy, trial):
                low = trial
            else:
                high = trial
            tried += 1
            known = sorted(batch for batch in self._profiles if low < batch < high)
            guess = self._guess(policy, trial, low, high) if tried < _GUESSES else 0
            if known:  # decisions that need no new profile come first
                trial = known[len(known) // 2]
            elif low < guess < high:
                trial = guess
            else:  # a guess at or beyond a limit: the answer is likely to be near it
                trial = low + near if guess <= low else high - near
                near *= 4
            if not low < trial < high:
                trial = (low + high) // 2
        self._found = max(self._found, low)
        return LargestFit(low, bounded=low < MAX_BATCH)

    def fits(self, policy: str, batch_size: int) -> bool:
        """Return True if the policy's plan for this batch fits."""
        key = policy, batch_size
        if key not in self._fits:
            self._fits[key] = self._fit(policy, self.profile(batch_size))
        return self._fits[key]

    def _fit(self, policy: str, profile: Profile) -> bool:
        plan = policies.get(policy)(profile, self._machine, self._budgets)
        return plan.feasible and replay(profile, plan, self._machine).feasible

    def _guess(self, policy: str, last: int, low: int, high: int) -> int:
        """Return the batch to try after ``last``: the largest that seems to fit, or one more."""
        if low > 0 and high <= MAX_BATCH:
            seeming = self._seeming(policy, low, high)
            if seeming is not None:
                return max(seeming, low + 1)
        return self._linear_guess(policy, last)

    def _seeming(self, policy: str, low: int, high: int) -> int | None:
        """Return the largest batch that fits by interpolated profiles; None if the two are not alike."""
        one, other = self.profile(low), self.profile(high)
        begin, span = low, high - low
        while high - low > 1:
            trial = (low + high) // 2
            try:
                profile = between(one, other, trial - begin, span)
            except PlanError:
                return None
            if self._fit(policy, profile):
                low = trial
            else:
                high = trial
        return low

    def _linear_guess(self, policy: str, last: int) -> int:
        """Return the batch at which the policy's minimum budget, taken to be linear, meets the budget."""
        other = self._given if last != self._given else self._given // 2 or 2
        needs = [self._need_bytes(policy, batch) for batch in (last, other)]
        each = (needs[0] - needs[1]) / (last - other)
        if each <= 0:
            return MAX_BATCH
        return int(last + (self._budgets.device_bytes - needs[0]) / each)

    def _need_bytes(self, policy: str, batch_size: int) -> int:
        profile = self.profile(batch_size)
        tight = Budgets(0, self._budgets.host_bytes, self._budgets.flash_bytes)
        # `auto` needs no more than offloading everything does, and that is computed faster
        ask = policies.get("all" if policy == "auto" else policy)
        return hard_bytes(profile, ask(profile, self._machine, tight), self._machine)


def between(one: Profile, other: Profile, part: int, span: int) -> Profile:
    """Interpolate linearly between two profiles, at ``part`` of ``span``.

    Raises:
        PlanError: The profiles differ in more than numbers.
    """
    found: Profile = _between(one, other, part, span)
    return found


def _between(one: Any, other: Any, part: int, span: int) -> Any:
    if type(one) is int and type(other) is int:
        return one + (other - one) * part // span
    if isinstance(one, tuple) and isinstance(other, tuple):
        if len(one) != len(other):
            raise PlanError(f"one profile has {len(one)} elements where the other has {len(other)}")
        return tuple(_between(*each, part, span) for each in zip(one, other, strict=True))
    if is_dataclass(one) and type(one) is type(other):
        names = [each.name for each in fields(one) if each.init]
        values = (_between(getattr(one, n), getattr(other, n), part, span) for n in names)
        made: Callable[..., Any] = type(one)
        return made(**dict(zip(names, values, strict=True)))
    if one != other:
        raise PlanError(f"one profile has {one!r} where the other has {other!r}")
    return one
