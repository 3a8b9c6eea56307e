"""Progress of a long simulation, and its early end with the results so far."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.requests import HostRequest
from penstock.observe.clock import Clock, RealClock

INTERRUPTED: Final = "interrupted"
TIME_IS_UP: Final = "its time is up"
_EVERY: Final = 16
"""Requests between two checks of the clock."""
_TELL_NS: Final = 200_000_000


class Pace:
    """Pass requests on until the time is up or Ctrl-C is pressed.

    Within the block the first Ctrl-C ends the requests; the second raises KeyboardInterrupt.

    Attributes:
        stopped: Reason for an early end, or "".
        tell: Called from time to time with the progress in words.
    """

    def __init__(
        self, most: int | None, limit_s: float | None, *, clock: Clock | None = None
    ) -> None:
        """Start the clock.

        Args:
            most: Number of requests, to report the share that is done; None if unknown.
            limit_s: Time limit in seconds from now, or None.
            clock: Clock for the limit.

        Raises:
            ConfigError: The limit is not a number of seconds above 0.
        """
        if limit_s is not None and not (limit_s > 0 and math.isfinite(limit_s)):
            raise ConfigError(f"--stop-after is {limit_s}; it must be more than 0 seconds")
        self._clock = RealClock() if clock is None else clock
        self._end_ns = math.inf if limit_s is None else self._clock.now_ns() + limit_s * 1e9
        self._count = 0
        self._before: Any = None
        self._most = most
        self._told_ns = 0
        self.stopped = ""
        self.tell: Callable[[str], None] = lambda _: None

    def __enter__(self) -> Pace:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def of(self, requests: Iterator[HostRequest]) -> Iterator[HostRequest]:
        """Pass on the requests of one stream."""
        for request in requests:
            if self.stopped:
                return
            self._count += 1
            if not self._count % _EVERY:
                self._look()
            yield request

    def _look(self) -> None:
        now = self._clock.now_ns()
        if now >= self._end_ns:
            self.stopped = self.stopped or TIME_IS_UP
        if now - self._told_ns >= _TELL_NS:
            self._told_ns = now
            share = "" if self._most is None else f", {self._count / self._most:.1%}"
            self.tell(f"{self._count:,} requests{share}")

    def _interrupt(self, *_: object) -> None:
        self.stopped = INTERRUPTED
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            signal.signal(signal.SIGINT, before)
