"""Termination of a job by SIGINT, then SIGTERM, then SIGKILL.

An awake job has ended after twice the grace time at the latest. A sleeping job has three times the grace
time to wake up, and then as much as an awake one: five times in total. If several sleep, the time of each
begins when it is its turn to be woken.

A job that is just starting may ignore a signal, because its parent did (a shell starts what runs in the
background so) and it has not set its handlers yet. It gets the signal when it no longer ignores it, and
the grace time is not longer for that.
"""

from __future__ import annotations

import signal
from typing import Final

from penstock.jobs.processes import JobProcess

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_AWAKE_TIMES: Final = len(_SIGNALS) - 1
_ASLEEP_TIMES: Final = 3
"""Multiple of the grace time for a sleeping job, which is woken first so that its script can end."""


class Termination:
    """Termination of one job, advanced by calls of ``proceed``. For one thread."""

    def __init__(self, grace_s: float) -> None:
        """Set the grace time after each of SIGINT, SIGTERM and SIGKILL."""
        self._grace_s = grace_s
        self._times = 0
        self._killed_after_s: float | None = None
        self._signalled_s: float | None = None
        self._deferred: signal.Signals | None = None

    @property
    def killed_after_s(self) -> float | None:
        """Time that was waited before SIGKILL; None if it was not sent."""
        return self._killed_after_s

    @property
    def has_begun(self) -> bool:
        """True once a signal was sent, after which the job no longer sleeps."""
        return self._times > 0

    def proceed(
        self, process: JobProcess, now: float, *, asleep: bool, waits: bool = False
    ) -> None:
        """Send the next signal if it is due.

        Args:
            process: Process of the job.
            now: Time in seconds.
            asleep: It sleeps, or is falling asleep or waking.
            waits: It sleeps, and other jobs end before it, so its time has not begun.
        """
        if self._signalled_s is None:
            self._signalled_s = now
            process.send(signal.SIGCONT)  # a stopped process would not handle the others
            if asleep:
                return
        if waits:
            self._signalled_s = now
            return
        self._send_deferred(process)
        waited = now - self._signalled_s
        if (asleep or self._times) and waited < self._grace_s * (_ASLEEP_TIMES if asleep else 1):
            return
        number = signal.SIGKILL if asleep else _SIGNALS[min(self._times, len(_SIGNALS) - 1)]
        self._times += 1
        self._signalled_s = now
        if number is signal.SIGKILL:
            self._killed_after_s = self._grace_s * (_ASLEEP_TIMES if asleep else _AWAKE_TIMES)
            process.kill_all()
        else:
            self._deferred = number
            self._send_deferred(process)

    def _send_deferred(self, process: JobProcess) -> None:
        """Send the latest signal, unless it was sent or the process ignores it now."""
        if self._deferred is not None and not process.ignores(self._deferred):
            process.send(self._deferred)
            self._deferred = None
