"""The largest batch that fits: a guess from two profiles, then profiles on both sides of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.plan import policies
from penstock.plan.check import peak_bytes
from penstock.plan.machine import Budgets, Machine
from penstock.plan.profile import Profile
from penstock.plan.replay import replay
from penstock.report.plan_table import Largest

MOST: Final = 1 << 20
"""No larger batch is tried."""
_GUESSES: Final = 8
"""Having tried so many, needs are not linear enough for guesses."""


class LargestBatch:
    """Searches for the largest batch, policy by policy. What was found for one is where the next begins.

    Whether a batch fits is always told by a profile that was made for that batch, and never by scaling.
    Fitting is taken to be monotonous: the answer fits, and one more does not.
    """

    def __init__(
        self, profile_of: Callable[[int], Profile], given: int, machine: Machine, budgets: Budgets
    ) -> None:
        """Nothing is searched yet.

        Args:
            profile_of: Makes the profile of a batch.
            given: The batch that the user asked for.
            machine: What plans are made for.
            budgets: What they may use.
        """
        self._profile_of = profile_of
        self._given = given
        self._machine = machine
        self._budgets = budgets
        self._profiles: dict[int, Profile] = {}
        self._fits: dict[tuple[str, int], bool] = {}
        self._found = 0

    def profile(self, batch_size: int) -> Profile:
        """The profile of this batch; made once."""
        if batch_size not in self._profiles:
            self._profiles[batch_size] = self._profile_of(batch_size)
        return self._profiles[batch_size]

    def of(self, policy: str) -> Largest:
        """The largest batch for which the policy's plan fits."""
        low, high, near, tried = 0, MOST + 1, 1, 0
        trial = self._found if policy == "auto" and self._found else self._given
        while high - low > 1:
            if self.fits(policy, trial):
                low = trial
            else:
                high = trial
            tried += 1
            known = sorted(batch for batch in self._profiles if low < batch < high)
            guess = self._guess(policy, trial) if tried < _GUESSES else 0
            if known:  # what costs no profile comes first
                trial = known[len(known) // 2]
            elif low < guess < high:
                trial = guess
            else:  # a guess at or beyond a side: the answer is likely to be near it
                trial = low + near if guess <= low else high - near
                near *= 4
            if not low < trial < high:
                trial = (low + high) // 2
        self._found = max(self._found, low)
        return Largest(low, bounded=low < MOST)

    def fits(self, policy: str, batch_size: int) -> bool:
        """Whether the policy's plan for this batch fits."""
        key = policy, batch_size
        if key not in self._fits:
            profile = self.profile(batch_size)
            plan = policies.get(policy)(profile, self._machine, self._budgets)
            fits = plan.feasible and replay(profile, plan, self._machine).feasible
            self._fits[key] = fits
        return self._fits[key]

    def _guess(self, policy: str, last: int) -> int:
        """Where what the policy needs at the least, taken to be linear, meets the budget."""
        other = self._given if last != self._given else self._given // 2 or 2
        needs = [self._need_bytes(policy, batch) for batch in (last, other)]
        each = (needs[0] - needs[1]) / (last - other)
        if each <= 0:
            return MOST
        return int(last + (self._budgets.device_bytes - needs[0]) / each)

    def _need_bytes(self, policy: str, batch_size: int) -> int:
        profile = self.profile(batch_size)
        tight = Budgets(0, self._budgets.host_bytes, self._budgets.flash_bytes)
        # what `auto` needs is what offloading everything needs, or less; and that is asked faster
        ask = policies.get("all" if policy == "auto" else policy)
        return peak_bytes(profile, ask(profile, self._machine, tight), self._machine)
