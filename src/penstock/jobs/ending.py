"""How a job is ended: in order first, then in harsher ways.

One that is awake is over after twice the time of grace, at the latest. One that sleeps has three times
that to be awake, and then as much as the other: five times in all. Of several that sleep each has as much
when it is its turn to be woken.
"""

from __future__ import annotations

import signal
from typing import Final

from penstock.jobs.processes import Process

_HARSHER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
_AWAKE_TIMES: Final = len(_HARSHER) - 1
_ASLEEP_TIMES: Final = 3
"""Who sleeps is woken first, to end as scripts do; that takes longer."""


class Ending:
    """Of one job, told again and again how it is. For one thread."""

    def __init__(self, grace_s: float) -> None:
        """Say how long it may take at each of SIGINT, SIGTERM, SIGKILL."""
        self._grace_s = grace_s
        self._times = 0
        self._killed_after_s: float | None = None
        self._told_s: float | None = None

    @property
    def killed_after_s(self) -> float | None:
        """If it came to the last one: for how long it had been waited."""
        return self._killed_after_s

    @property
    def has_begun(self) -> bool:
        """Whether a signal was sent: what follows it does not sleep any more."""
        return self._times > 0

    def proceed(self, process: Process, now: float, *, asleep: bool, waits: bool = False) -> None:
        """Do what there is to be done now.

        Args:
            process: Of the job.
            now: Seconds.
            asleep: Whether it sleeps, or is on the way to or from that.
            waits: Whether it sleeps, and others that are to end go before it: its time has not begun.
        """
        if self._told_s is None:
            self._told_s = now
            process.send(signal.SIGCONT)  # who was stopped would hear none of the others
            if asleep:
                return
        if waits:
            self._told_s = now
            return
        waited = now - self._told_s
        if (asleep or self._times) and waited < self._grace_s * (_ASLEEP_TIMES if asleep else 1):
            return
        number = signal.SIGKILL if asleep else _HARSHER[min(self._times, len(_HARSHER) - 1)]
        self._times += 1
        self._told_s = now
        if number is signal.SIGKILL:
            self._killed_after_s = self._grace_s * (_ASLEEP_TIMES if asleep else _AWAKE_TIMES)
            process.kill_all()
        else:
            process.send(number)
