"""Time, injected: the real clock, or one that a test or a replay turns by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment; never goes back."""


class RealClock:
    """``time.perf_counter_ns``."""

    now_ns = staticmethod(time.perf_counter_ns)


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """The time it was advanced to."""
        return self._now_ns

    def advance(self, ns: int) -> None:
        """Let ``ns`` nanoseconds pass."""
        self._now_ns += ns
