"""Clocks: the real one, and one that a test or a replay advances by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of the time."""

    def now_ns(self) -> int:
        """Return nanoseconds since a fixed moment; never goes back."""


class RealClock:
    """The clock of ``time.perf_counter_ns``."""

    now_ns = staticmethod(time.perf_counter_ns)


class ManualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Return the time to which it was advanced."""
        return self._now_ns

    def advance(self, ns: int) -> None:
        """Let ``ns`` nanoseconds pass."""
        self._now_ns += ns
