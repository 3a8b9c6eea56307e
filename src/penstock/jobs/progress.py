"""Progress messages of a manager, and the speed of its jobs' transfers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from penstock.jobs.policy import JobPhase
from penstock.jobs.task import Task

_RATE_S: Final = 1.0
_SAMPLE_S: Final = 0.25
_STUCK_S: Final = 5.0
"""Time without an awake job after which the reason is reported."""
_PHASE_TEXT: Final = {
    JobPhase.STARTING: "begins",
    JobPhase.AWAKE: "is awake",
    JobPhase.ASLEEP: "sleeps",
}


class ProgressReporter:
    """Reports each change once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Remember the function.

        Args:
            tell: Function that prints a line.
        """
        self._tell = tell
        self._reported: dict[tuple[str, str], str] = {}
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._stuck_since: float | None = None

    def update(self, tasks: Collection[Task], now: float) -> None:
        """Report changes since the last call."""
        for task in tasks:
            self._report(task, "told", task.told)
            self._report(task, "phase", _PHASE_TEXT.get(task.phase, ""))
            if task.phase is JobPhase.WAITING:
                self._report(task, "note", task.note)
        self._check_stuck(tasks, now)
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, sum(task.io_bytes for task in tasks if task.lives)))
            while now - self._samples[0][0] > _RATE_S and len(self._samples) > 1:
                self._samples.popleft()

    def _check_stuck(self, tasks: Collection[Task], now: float) -> None:
        """Report jobs that sleep for ever, as grown jobs may fit only without the others' processes."""
        waiting = [each for each in tasks if each.phase is JobPhase.ASLEEP and not each.held_back]
        if not waiting or any(each.lives and each.phase is not JobPhase.ASLEEP for each in tasks):
            self._stuck_since = None
            return
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        if now - self._stuck_since >= _STUCK_S:
            for each in waiting:
                self._report(
                    each,
                    "stuck",
                    f"{each.note}, but all jobs sleep: stop one, or raise [machine] memory and start the"
                    " manager again",
                )

    def _report(self, task: Task, kind: str, what: str) -> None:
        key = task.spec.name, kind
        if self._reported.get(key, "") == what:
            return
        self._reported[key] = what
        if what:
            self._tell(f"{task.spec.name}: {what}")

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second to and from devices, for all jobs, over the last second."""
        (begun, first), (ended, last) = self._samples[0], self._samples[-1]
        return max(0.0, (last - first) / (ended - begun)) if ended > begun else 0.0
