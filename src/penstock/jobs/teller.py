"""What a manager says of its jobs while they run, and how fast they move bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from penstock.jobs.policy import Phase
from penstock.jobs.task import Task

_RATE_S: Final = 1.0
_SAMPLE_S: Final = 0.25
_STUCK_S: Final = 5.0
"""After so long without anybody awake it is said why."""
_TOLD: Final = {Phase.STARTING: "begins", Phase.AWAKE: "is awake", Phase.ASLEEP: "sleeps"}


class Teller:
    """Says each thing once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Say how.

        Args:
            tell: Is given a line.
        """
        self._tell = tell
        self._said: dict[tuple[str, str], str] = {}
        self._samples: deque[tuple[float, int]] = deque([(0.0, 0)])
        self._stuck_since: float | None = None

    def look(self, tasks: Collection[Task], now: float) -> None:
        """Say what is new since the last time."""
        for task in tasks:
            self._say(task, "told", task.told)
            self._say(task, "phase", _TOLD.get(task.phase, ""))
            if task.phase is Phase.WAITING:
                self._say(task, "note", task.note)
        self._look_for_stuck(tasks, now)
        if now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, sum(task.io_bytes for task in tasks if task.lives)))
            while now - self._samples[0][0] > _RATE_S and len(self._samples) > 1:
                self._samples.popleft()

    def _look_for_stuck(self, tasks: Collection[Task], now: float) -> None:
        """Jobs that have grown may each fit only where the others' processes are gone."""
        waiting = [each for each in tasks if each.phase is Phase.ASLEEP and not each.held_back]
        if not waiting or any(each.lives and each.phase is not Phase.ASLEEP for each in tasks):
            self._stuck_since = None
            return
        self._stuck_since = now if self._stuck_since is None else self._stuck_since
        if now - self._stuck_since >= _STUCK_S:
            for each in waiting:
                self._say(
                    each,
                    "stuck",
                    f"{each.note}, and all sleep: stop one, or give [machine] more memory and start"
                    " the manager again",
                )

    def _say(self, task: Task, kind: str, what: str) -> None:
        key = task.spec.name, kind
        if self._said.get(key, "") == what:
            return
        self._said[key] = what
        if what:
            self._tell(f"{task.spec.name}: {what}")

    @property
    def bytes_per_s(self) -> float:
        """To and from devices, of all jobs, over the last second."""
        (begun, first), (ended, last) = self._samples[0], self._samples[-1]
        return max(0.0, (last - first) / (ended - begun)) if ended > begun else 0.0
