"""Suspending by signal: SIGUSR1 puts a script to sleep at the end of its step, SIGUSR2 wakes it.

The script knows nothing of it: its own thread suspends the job between two steps, and waits there. What
would end the wait otherwise, as Ctrl-C, goes up through the script when its memory is back.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Protocol

from penstock.core.errors import PenstockError
from penstock.core.units import format_bytes
from penstock.jobs.suspend import Job, resume, suspend

SLEEP: Final = signal.SIGUSR1
WAKE: Final = signal.SIGUSR2
_LOOK_S: Final = 0.02
"""How often a sleeping job looks whether it is to wake: a signal handler must not take locks."""


class Stepping(Job, Protocol):
    """A job that says when a step is over; a :class:`penstock.Session` does."""

    on_step: Callable[[], None] | None
    """Called between two steps, by the thread that trains."""


class Sleeper:
    """Suspends and resumes a job as signals say. Make it in the main thread.

    Attributes:
        asked: Whether the job is to sleep.
    """

    def __init__(self, job: Stepping, *, tell: Callable[[str], None]) -> None:
        """Listen from now on, to those of the signals that nobody listens to.

        Args:
            job: To suspend; its steps must end in the main thread.
            tell: Is told, in a line, what happens.
        """
        self.asked = False
        self._job = job
        self._tell = tell
        self._pid = os.getpid()
        job.on_step = self.step_over
        for number in (SLEEP, WAKE):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # else a child that was forked, as a data loader's worker
            self.asked = number == SLEEP

    def step_over(self) -> None:
        """A step has ended: sleep, if that was asked for. Raises what interrupts the sleep."""
        if not self.asked:
            return
        try:
            with _later():
                self._suspend()
            while self.asked:
                time.sleep(_LOOK_S)
        except PenstockError as error:
            self._tell(f"cannot be suspended, and goes on: {error}")
        finally:
            self.asked = False
            with _later():
                self._resume()

    def _suspend(self) -> None:
        begun = time.monotonic()
        suspended = suspend(self._job)
        took = f"{time.monotonic() - begun:.1f} s"
        self._tell(
            f"suspended process {self._pid}: {format_bytes(suspended.nbytes)} on flash, after {took};"
            f" kill -USR2 {self._pid} resumes it"
        )

    def _resume(self) -> None:
        if self._job.suspended is None:
            return
        begun = time.monotonic()
        resume(self._job)
        self._tell(f"resumed process {self._pid} in {time.monotonic() - begun:.1f} s")


@contextmanager
def _later() -> Iterator[None]:
    """Within, what Python code was to do when a signal comes is put off: no step may be half done."""
    missed: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda heard, frame: missed.append(heard))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for heard in missed:
            signal.raise_signal(heard)
