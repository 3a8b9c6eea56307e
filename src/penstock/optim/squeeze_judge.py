"""Decision whether the next pass compresses records: a hint from what waits, and a trial by time.

[Note: when squeezing pays]
    Threads that update tiles wait for flash, or they do not. If they wait longer than it takes to squeeze
    and expand what they update, it is done in that time and costs nothing: flash is the limit. If they do
    not wait, cores may be, but need not: waiting is also short where somebody else uses the cores, or
    where flash was fast for a moment. So that is a hint only. After some passes with that hint a few are
    made the other way, and what took less time is kept for long. Passes without squeezing give the hint
    when threads wait longer than it took. What shrinks too little is left alone.

    While backward goes on in the same cores nobody waits for flash in vain, and what squeezing takes is
    taken from backward, which is not timed here: a step of a GPT of 124 million parameters, whose update
    costs it 0.4 s on two cores, lost another second. So nobody is asked then: it is off.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_WORTH: Final = 0.97
"""Above this share of the bytes it is given up."""
_HINTS: Final = 3
"""Passes in a row that must give the hint."""
_TRIAL: Final = 2
"""Passes of a trial that are timed; the one before them has other records to read."""
_TRUST: Final = 64
"""Passes for which the outcome of a trial stands."""


class Judge:
    """Decides after each pass. Not thread-safe.

    Attributes:
        is_on: Whether the next pass squeezes.
    """

    def __init__(self) -> None:
        """Begin with compression on."""
        self.is_on = True
        self._took_s: dict[bool, deque[float]] = {way: deque(maxlen=3) for way in (True, False)}
        self._untold = 2  # passes that say nothing
        self._hints = 0
        self._trust = 0
        self._is_trial = False
        self._cost_s = 0.0

    def passed(
        self, *, took_s: float, waited_s: float, spent_s: float, whole: int, squeezed: int
    ) -> None:
        """A pass is over.

        Args:
            took_s: What the step was waited for.
            waited_s: What threads have waited for flash, while the step was waited for.
            spent_s: What they have spent on squeezing and expanding.
            whole: Bytes that were written, before they were squeezed.
            squeezed: And after.
        """
        if self._untold:
            self._untold -= 1
            return
        self._took_s[self.is_on].append(took_s)
        if self.is_on and whole:
            self._cost_s = spent_s
            if squeezed >= _WORTH * whole:
                self._cost_s = float("inf")  # nobody waits that long
                self._is_trial = False
                self._turn(False)
                return
        if self._is_trial:
            self._conclude()
            return
        self._trust -= 1
        is_hint = waited_s < spent_s / 4 if self.is_on else waited_s > self._cost_s
        self._hints = self._hints + 1 if is_hint else 0
        if self._hints >= _HINTS and self._trust <= 0:
            self._is_trial = True
            self._turn(not self.is_on)

    def _conclude(self) -> None:
        if len(self._took_s[self.is_on]) < _TRIAL:
            return
        self._is_trial = False
        self._trust = _TRUST
        is_better = min(self._took_s[True]) < min(self._took_s[False])
        if is_better != self.is_on:
            self._turn(is_better)

    def _turn(self, on: bool) -> None:
        self.is_on = on
        self._took_s[on].clear()
        self._untold = 1
        self._hints = 0
