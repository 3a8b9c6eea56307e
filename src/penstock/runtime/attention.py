"""How closely coming passes are looked at: observed, or at least recorded slot by slot.

[Note: observed passes]
    A pass that a plan is made from is *observed*: who made what is noted, and nothing is run again, for
    what is not saved cannot be planned. So it is with the first one. When a pass drifts under a plan that
    runs modules again, it does not tell enough: then the next ones are observed, until one tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.plan.plan import Plan
from penstock.runtime.known_passes import MAX_KINDS
from penstock.runtime.storage import Pass

FULL_PASSES: Final = 2 * MAX_KINDS
"""Passes of which all slots are recorded, at most, after one that did not look as planned."""
MAX_OBSERVED_PASSES: Final = 32
"""So that passes that never come back are not waited for."""


class Attention:
    """Passes that are still to be profiled. Used under the planner's lock.

    Attributes:
        full_passes: Of so many of the next passes all slots are recorded.
        observe_again: Whether a pass did not tell enough, so that its likes are to be observed.
    """

    def __init__(self, *, recompute: bool) -> None:
        """For one planner; ``recompute`` is whether modules may be run again."""
        self.full_passes = 0
        self.observe_again = False
        self._recompute = recompute
        self._observed_passes = 0

    def planned(self) -> None:
        """A plan has been made of what was observed."""
        self._observed_passes = 0
        self.observe_again = False

    def note(self, finished: Pass) -> None:
        """Count a pass if it was observed."""
        self._observed_passes += finished.observed

    def record(self, finished: Pass, *, missed: bool) -> None:
        """Have the next passes recorded in full, if that of this one was ``missed``."""
        if not finished.kept_bytes:
            self.full_passes = max(0, self.full_passes - 1)
        elif missed or finished.promoted:
            self.full_passes = FULL_PASSES

    def would_tell(self, plan: Plan, kinds: Sequence[Pass]) -> bool:
        """Return whether a better plan may be made if the next pass is observed; ``kinds`` are known."""
        if self._observed_passes >= MAX_OBSERVED_PASSES:
            return False
        unseen = self._recompute and not all(known.observed for known in kinds)
        return self.observe_again or (unseen and plan.offloaded_bytes > 0)
