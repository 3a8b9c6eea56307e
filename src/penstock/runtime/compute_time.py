"""The axis of profiles: one for all devices of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Final

from penstock.observe.clock import Clock
from penstock.observe.events import Stage, StallCause
from penstock.observe.recorder import Recorder

if TYPE_CHECKING:
    from penstock.runtime.cuda.timing import DeviceTimer, Reached

_NOTABLE_NS: Final = 100_000
"""Shortest wait for a client that is reported: others had nothing to wait for."""


class ComputeTime:
    """The clock's time with every stall taken out.

    Where devices run behind, a time in an observed pass is a number that stands for the devices' own,
    until the pass is over; see [Note: device time].

    Attributes:
        stalled_ns: How long threads have waited for Penstock, altogether.
        observing: Whether the passes that run now are observed.
        timer: Of devices that run behind; ``None``: there are none.
        watch: What to call, too, at each moment of an observed pass.
    """

    def __init__(self, clock: Clock, timer: DeviceTimer | None = None) -> None:
        """Begin on the axis of ``clock``."""
        self.stalled_ns = 0
        self.observing = False
        self.timer = timer
        self.watch: list[Callable[[], None]] = []
        self._clock = clock
        self._waiting = set[int]()  # threads

    def now_ns(self) -> int:
        """The time now."""
        now_ns = self._clock.now_ns() - self.stalled_ns
        if not self.observing:
            return now_ns
        for look in self.watch:
            look()
        return now_ns if self.timer is None else self.timer.mark(now_ns)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave out of an observed pass what Penstock does while devices have nothing else to do."""
        since = self.wait_begins() if self.observing else ()
        try:
            yield
        finally:
            self.wait_ends(since)

    @contextmanager
    def waiting(self, recorder: Recorder, cause: StallCause, name: str) -> Iterator[None]:
        """Leave out what this thread waits in this block, and report it as a stall.

        A block inside of another one is a part of that.

        Args:
            recorder: Gets the stall.
            cause: Its cause.
            name: What is waited for.
        """
        thread = get_ident()
        if thread in self._waiting:
            yield
            return
        self._waiting.add(thread)
        since, start_ns = self.wait_begins(), self._clock.now_ns()
        try:
            yield
        finally:
            self._waiting.discard(thread)
            self.wait_ends(since)
            end_ns = self._clock.now_ns()
            if end_ns - start_ns >= _NOTABLE_NS:
                self.stalled_ns += end_ns - start_ns
                recorder.span(Stage.STALL, start_ns, end_ns, cause=cause, slot=name)

    def wait_begins(self) -> Reached:
        """As ``DeviceTimer.wait_begins``; empty without a timer."""
        return () if self.timer is None else self.timer.wait_begins()

    def wait_ends(self, since: Reached) -> None:
        """As ``DeviceTimer.wait_ends``."""
        if since and self.timer is not None:
            self.timer.wait_ends(since)
