"""How often to save: as often as an allowed overhead lets, by what saving was measured to cost.

After CheckFreq (Mohan, Phanishayee, Chidambaram; FAST 2021): the interval follows from what a step takes,
what a save holds training up, and how long it writes; and it follows them when they change.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

from penstock.core.errors import ConfigError

_REMEMBERED: Final = 25
"""Steps and saves of which the median counts."""


class Interval:
    """Steps between two saves. Not thread-safe.

    Attributes:
        steps: How many, now.
    """

    def __init__(
        self, overhead: float, *, first_steps: int = 10, most_steps: int = 100_000
    ) -> None:
        """Begin without a measurement.

        Args:
            overhead: What saving may add to the time that training takes, as a fraction: 0.01 is 1 %.
            first_steps: The interval until something was measured.
            most_steps: The longest.

        Raises:
            ConfigError: An overhead that is not between 0 and 1, or no steps.
        """
        if not 0.0 < overhead < 1.0:
            raise ConfigError(f"an overhead of {overhead} is not between 0 and 1; 0.01 is 1 %")
        if not 1 <= first_steps <= most_steps:
            raise ConfigError(f"intervals from {first_steps} to {most_steps} steps make no sense")
        self.steps = first_steps
        self._overhead = overhead
        self._most = most_steps
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._stall_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._busy_s: deque[float] = deque(maxlen=_REMEMBERED)

    def stepped(self, seconds: float) -> None:
        """A step took so long, without what saving took of it."""
        self._step_s.append(seconds)
        self._tune()

    def saved(self, *, stall_s: float, busy_s: float) -> None:
        """A save held training up for so long, and was durable after so long."""
        self._stall_s.append(stall_s)
        self._busy_s.append(busy_s)
        self._tune()

    def _tune(self) -> None:
        if not self._stall_s or not self._step_s:
            return
        step_s = max(statistics.median(self._step_s), 1e-9)
        allowed = statistics.median(self._stall_s) / (self._overhead * step_s)
        writing = statistics.median(self._busy_s) / step_s  # one save at a time
        self.steps = min(self._most, max(1, math.ceil(allowed), math.ceil(writing)))
