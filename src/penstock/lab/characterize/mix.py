"""Different networks that share the machine: their steps and checkpoints, alone and beside each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from penstock.lab.characterize.checkpoint_methods import WAYS, each_way
from penstock.lab.characterize.networks import NETWORKS
from penstock.lab.characterize.rank_processes import RankProcesses, spawn, wait_for_any
from penstock.lab.characterize.scratch import check_free_space
from penstock.lab.characterize.settings import Settings

_STATES_ON_DISK: Final = len(WAYS)
"""Disk space in states: of each job a checkpoint of each kind."""


def measure_mix(settings: Settings, facts: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train a job of each network of ``settings.mix``, each alone, then all at the same time.

    All are in memory from beginning to end; a job is alone while the others wait for a command. In each
    epoch every job makes its steps alone, and is saved in every way. Then all train for as long as such
    steps of each take together. They go on, and one after the other is stopped to be saved once more in
    every way. A network that has two stages is in the first.

    Returns:
        ``seconds``: for how long they trained at the same time, until the last step of each had ended.
        ``all_slowdown``: that, over the time that the same steps take one after the other; below 1,
        sharing the machine pays. ``networks``: of each job the median step alone and beside the others,
        and of each way the median stall, in seconds. The last step of a job that made several is left out
        of its median: towards its end others had stopped.

    Raises:
        NoSpaceError: The checkpoints do not fit in the folder.
        WorkerError: A process was killed or died.
    """
    with ExitStack() as stack:
        jobs = {}
        for name in settings.mix:
            own = folder / f"{name}-in-the-mix"
            own.mkdir()
            what = f"the job of {NETWORKS[name].title} in the mix"
            jobs[name] = stack.enter_context(spawn(name, what, own, **facts))
        for job in jobs.values():
            job.receive()
        told = {name: job.ask("facts")[0] for name, job in jobs.items()}
        check_free_space(
            folder, _STATES_ON_DISK * sum(each["state_bytes"] for each in told.values())
        )
        alone, beside = ({name: _Samples() for name in jobs} for _ in range(2))
        seconds = one_after_the_other = 0.0
        for _ in range(settings.epochs):
            for name, job in jobs.items():
                alone[name].steps_s += job.ask("train", steps=settings.epoch_steps)[0]["steps_s"]
                alone[name].save(job)
            wanted = sum(settings.epoch_steps * each.step_s for each in alone.values())
            begun = time.perf_counter()
            together = _Together(jobs, folder)
            together.begin(*jobs)
            wait_for_any(jobs.values(), wanted)  # none replies unless it fails
            trained = together.end(*jobs)
            seconds += time.perf_counter() - begun
            for name, steps_s in trained.items():
                beside[name].steps_s += steps_s[:-1] or steps_s
                one_after_the_other += len(steps_s) * alone[name].step_s
            together.begin(*jobs)
            for name, job in jobs.items():
                together.end(name)
                beside[name].save(job)
                together.begin(name)
            together.end(*jobs)
    return {
        "seconds": seconds,
        "all_slowdown": seconds / one_after_the_other,
        "networks": [
            {
                "name": name,
                "title": NETWORKS[name].title,
                "state_bytes": told[name]["state_bytes"],
                "threads": told[name]["threads"],
                "step_s": {"alone": alone[name].step_s, "beside": beside[name].step_s},
                "stall_s": {
                    way: {"alone": alone[name].stall_s(way), "beside": beside[name].stall_s(way)}
                    for way in WAYS
                },
                "steps": len(beside[name].steps_s),
            }
            for name in jobs
        ],
    }


class _Samples:
    """Steps and saves of one job, alone or beside the others."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self._saves: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}

    @property
    def step_s(self) -> float:
        """Median step."""
        return statistics.median(self.steps_s)

    def stall_s(self, way: str) -> float:
        """Median stall."""
        return float(statistics.median(each["stall_s"] for each in self._saves[way]))

    def save(self, job: RankProcesses) -> None:
        """Save once in every way."""
        for way, steps in each_way(self._saves, self.step_s):
            self._saves[way] += job.ask("save", way=way, steps=steps, step_s=self.step_s)


class _Together:
    """Jobs that train at the same time, each until it is told to end."""

    def __init__(self, jobs: Mapping[str, RankProcesses], folder: Path) -> None:
        self._jobs = jobs
        self._folder = folder

    def begin(self, *names: str) -> None:
        """Have jobs train until ``end``, and make one step at least."""
        for name in names:
            self._jobs[name].send("train", steps=1, until=str(self._may_end(name)))

    def end(self, *names: str) -> dict[str, list[float]]:
        """Have them end; wait for their last steps, and return the times of all since ``begin``."""
        for name in names:
            self._may_end(name).touch()
        steps_s = {name: self._jobs[name].receive()[0]["steps_s"] for name in names}
        for name in names:
            self._may_end(name).unlink()
        return steps_s

    def _may_end(self, name: str) -> Path:
        return self._folder / f"{name}-may-end"
