"""How far to read ahead: as little as keeps the loader from being waited for.

A read takes some time from its beginning until its samples are decoded; a step takes some time, too. So
``lead / step`` batches must be under way, and one more. Both times are measured, and vary: when a step
had to wait all the same, there is one more batch from then on; when none had for long, one less, but for
what the times ask for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_LEAST: Final = 2
"""Fewest batches."""
_LATEST: Final = 0.2
"""Weight of the latest time in a running mean."""
_LONG: Final = 128
"""Steps without a wait after which there is one batch less."""
_NO_WAIT_SHARE: Final = 0.01
"""Shortest wait, as a part of a step, that is no noise."""


@dataclass(slots=True)
class Depth:
    """Batches to have under way or ready."""

    step_s: float = 0.0
    """Between two batches, without the wait for the second; a running mean."""
    lead_s: float = 0.0
    """From the beginning of a read to its first batch; a running mean."""
    waits: int = 0
    """Steps that had to wait."""
    more: int = 0
    """Beyond what the times ask for."""
    _quiet: int = 0

    @property
    def batches(self) -> int:
        """The number of batches."""
        asked = 1 + math.ceil(self.lead_s / self.step_s) if self.step_s else _LEAST
        return max(_LEAST, asked + self.more)

    def stepped(self, step_s: float, waited_s: float) -> None:
        """Note that a batch was taken ``step_s`` after the last, of which ``waited_s`` were waiting."""
        work = max(0.0, step_s - waited_s)
        self.step_s = _mean(self.step_s, work)
        if waited_s > max(_NO_WAIT_SHARE * work, 20e-6):
            self.waits += 1
            self._quiet = 0
            self.more += 1
            return
        self._quiet += 1
        if self._quiet >= _LONG and self.more > 0:
            self.more -= 1
            self._quiet = 0

    def arrived(self, lead_s: float) -> None:
        """Note the time from a group's beginning to its end, without that spent behind other groups."""
        self.lead_s = _mean(self.lead_s, lead_s)


def _mean(mean: float, latest: float) -> float:
    return latest if not mean else mean + (latest - mean) * _LATEST
