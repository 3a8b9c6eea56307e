"""Suspending a script that knows nothing of it: at the end of a step, by signal or by its manager.

SIGUSR1 puts it to sleep and SIGUSR2 wakes it; a manager of jobs does the same by a file ([Note:
channel]). The script's own thread suspends the job between two steps, and waits there. What
would end the wait otherwise, as Ctrl-C, goes up through the script when its memory is back.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Protocol

from penstock.core.errors import PenstockError
from penstock.core.process import fork_guard
from penstock.core.units import MIB, format_bytes
from penstock.swap.channel import JobEnd
from penstock.swap.pending_signals import SLEEP, WAKE, PendingSignals
from penstock.swap.resume_record import ResumeRecord
from penstock.swap.suspend import Job, resume, suspend

_LOOK_S: Final = 0.02
"""How often a sleeping job looks whether it is to wake: a signal handler must not take locks."""
_TELL_S: Final = 0.05
"""How often its manager is told how many steps there were."""
_FETCH_BYTES: Final = 128 * MIB
"""What comes ahead between two looks."""


class Stepping(Job, Protocol):
    """A job that says when a step is over; a :class:`penstock.Session` does."""

    on_step: Callable[[], None] | None
    """Called between two steps, by the thread that trains."""


class Sleeper:
    """Suspends and resumes a job as signals and its manager say. Make it in the main thread.

    Attributes:
        asked: Whether the job is to sleep, by a signal.
    """

    def __init__(
        self,
        job: Stepping,
        *,
        tell: Callable[[str], None],
        channel: JobEnd | None = None,
        keeper: ResumeRecord | None = None,
        early: PendingSignals | None = None,
    ) -> None:
        """Listen from now on, to those of the signals that nobody listens to.

        Args:
            job: To suspend; its steps must end in the main thread.
            tell: Is told, in a line, what happens.
            channel: To its manager, if it has one.
            keeper: Has what sleeps survive the process, if that is wanted.
            early: Has listened until now, if somebody has.
        """
        self.asked = False
        self._job = job
        self._tell = tell
        self._channel = channel
        self._keeper = keeper
        self._steps = 0
        if keeper is not None:
            keeper.sleep_by(self._sleep_with)
        self._refused = -1
        self._fetches_no_more = False
        self._told = 0.0
        self._guard = fork_guard()
        job.on_step = self.step_over
        for number in (SLEEP, WAKE):
            if signal.getsignal(number) is signal.SIG_DFL or (early and early.listens_to(number)):
                signal.signal(number, self._heard)
        if early is not None and early.asked:  # looked at last: no signal is lost
            self.asked = True
        self._report(state="awake")

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if not self._guard.in_child:  # else a child that was forked, as a data loader's worker
            self.asked = number == SLEEP

    @property
    def _is_to_sleep(self) -> bool:
        if self._channel is None:
            return self.asked
        order = self._channel.look()
        return order.sleep and order.number != self._refused

    def step_over(self) -> None:
        """A step has ended: sleep, if that was asked for. Raises what interrupts the sleep."""
        if self._guard.in_child:
            return
        self._count()
        if self.asked and self._channel is not None:
            self.asked = False
            self._tell(
                "a signal does not suspend it, for it would keep others waiting: it has a manager; use"
                " `penstock jobs suspend`"
            )
        keeper = self._keeper
        if keeper is not None:
            keeper.step_over(self._job, self._steps)
        if not self._is_to_sleep:
            if keeper is not None:
                keeper.call_off()
        elif keeper is None or not keeper.puts_off():
            self._sleep()

    def _sleep_with(self, checkpoint: str, state: object) -> None:
        """A checkpoint was made, for it to sleep."""
        self._sleep(checkpoint=checkpoint, state=state)

    def _sleep(self, **known: Any) -> None:
        try:
            with _later():
                if self._keeper is not None:
                    self._keeper.keep(self._job, self._steps)
                self._suspend(**known)
            while self._is_to_sleep:
                self._fetch()
                time.sleep(_LOOK_S)
        except (PenstockError, OSError, MemoryError, RuntimeError) as error:  # no threads, say
            self._refuse(error)
        finally:
            self.asked = False
            with _later():
                self._resume()

    def _count(self) -> None:
        self._steps += 1
        if self._channel is None:
            return
        self._channel.status.steps = self._steps
        now = time.monotonic()
        if now - self._told >= _TELL_S:
            self._told = now
            self._channel.tell()

    def _report(self, *, moved_bytes: int = 0, moving_s: float = 0.0, **changes: Any) -> None:
        if self._channel is not None:
            status = self._channel.status
            status.moved_bytes += moved_bytes
            status.moving_s += moving_s
            self._channel.tell(order=self._channel.order.number, **changes)

    def _refuse(self, error: Exception) -> None:
        self._tell(f"cannot be suspended, and goes on: {error}")
        if self._channel is not None:
            self._refused = self._channel.order.number
            self._report(refused=str(error))

    def _suspend(self, **known: Any) -> None:
        self._report(state="suspending", refused="")
        self._fetches_no_more = False
        begun = time.monotonic()
        suspended = suspend(self._job, **known)
        took = time.monotonic() - begun
        wake = (
            f"kill -USR2 {self._guard.pid} resumes it"
            if self._channel is None
            else "its manager wakes it"
        )
        self._tell(
            f"suspended process {self._guard.pid}: {format_bytes(suspended.nbytes)} on flash, after"
            f" {took:.1f} s; {wake}"
        )
        sleeps = 0 if self._channel is None else self._channel.status.sleeps + 1
        self._report(
            state="asleep",
            flash_bytes=suspended.nbytes,
            sleeps=sleeps,
            moved_bytes=suspended.written_bytes,
            moving_s=took,
        )

    def _fetch(self) -> None:
        """Have ahead what the manager allows, a piece at a time.

        Never raises what would wake it, for its memory may be another's now. What fails here, ``resume``
        tries again.
        """
        suspended = self._job.suspended
        if self._channel is None or suspended is None or self._fetches_no_more:
            return
        there = self._channel.status.fetched_bytes
        allowed = self._channel.order.fetch_bytes
        if allowed == there:
            return
        try:
            now = suspended.fetch(min(allowed, there + _FETCH_BYTES))
        except (PenstockError, OSError, MemoryError, RuntimeError) as error:
            self._fetches_no_more = True
            self._tell(f"nothing more of it comes back ahead of its turn: {error}")
            return
        if now != there:
            self._report(fetched_bytes=now)

    def _resume(self) -> None:
        if self._job.suspended is None:
            self._report(state="awake")
            return
        self._report(state="waking")
        begun = time.monotonic()
        nbytes = self._job.suspended.nbytes
        resume(self._job)
        took = time.monotonic() - begun
        self._tell(f"resumed process {self._guard.pid} in {took:.1f} s")
        self._report(
            state="awake", flash_bytes=0, fetched_bytes=0, moved_bytes=nbytes, moving_s=took
        )


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
