"""Slowdown of a job's steps while other programs run, and the rate of those programs.

A measurement with neighbours is compared with the job alone just before and just after; the faster of
the two counts, because a short disturbance of the machine makes one of them slower and never faster.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.lab.characterize.neighbours import KINDS
from penstock.lab.characterize.rank_processes import RankProcess, RankProcesses, spawn

_MIN_STEPS: Final = 3


class SoloSteps:
    """A job without neighbours, measured again before each kind of them.

    Attributes:
        team: The processes of the job.
        steps: Number of steps in one measurement.
    """

    def __init__(self, team: RankProcesses, step_s: float, seconds: float) -> None:
        """Choose the number of steps that takes about ``seconds``, at least three."""
        self.team = team
        self.steps = max(_MIN_STEPS, math.ceil(seconds / step_s))
        self.seconds = seconds

    def step_s(self) -> float:
        """Measure the median time of a step now."""
        return median_step(self.team.ask("train", steps=self.steps))


def median_step(trained: list[dict[str, Any]]) -> float:
    """Return the median time of a step on the slowest rank."""
    return max(float(statistics.median(each["steps_s"])) for each in trained)


def measure_copies(
    name: str, alone: SoloSteps, count: int, facts: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Train copies of the job at the same time.

    Returns:
        ``slowdown``: of the job's steps. ``all_slowdown``: the time in which all jobs together make some
        steps, over the time they take one after the other; below 1, sharing the machine pays.
    """
    with ExitStack() as stack:
        others = []
        for number in range(count):
            own = folder / f"{name}-copy-{number}"
            own.mkdir()
            copy = spawn(name, f"copy {number + 1} of {name}", own, **facts)
            others.append(stack.enter_context(copy))
        for each in others:
            each.receive()
        before = alone.step_s()
        teams = [alone.team, *others]
        start = time.perf_counter()
        for each in teams:
            each.send("train", steps=alone.steps)
        replies = [each.receive() for each in teams]
        seconds = time.perf_counter() - start
    beside = median_step(replies[0])
    by_itself = min(before, alone.step_s())
    return {
        "count": count,
        "slowdown": beside / by_itself,
        "all_slowdown": seconds / (len(teams) * alone.steps * by_itself),
    }


def measure_programs(alone: SoloSteps, count: int, folder: Path) -> dict[str, Any]:
    """Run ``count`` programs of each kind in turn; return the slowdown of the job and of the programs."""
    made = {}
    for kind in KINDS:
        before = alone.step_s()
        with _programs(kind, count, folder) as programs:
            time.sleep(min(alone.seconds, 0.5))  # their rate while the job does nothing
            first = _counts(programs)
            time.sleep(alone.seconds)
            second = _counts(programs)
            beside = median_step(alone.team.ask("train", steps=alone.steps))
            third = _counts(programs)
        undisturbed, disturbed = _rate(first, second), _rate(second, third)
        by_itself = min(before, alone.step_s())
        made[kind] = {
            "count": count,
            "slowdown": beside / by_itself,
            "neighbour_slowdown": undisturbed / disturbed if disturbed else None,
        }
    return made


@contextmanager
def _programs(kind: str, count: int, folder: Path) -> Iterator[RankProcesses]:
    children: list[RankProcess] = []
    try:
        for number in range(count):
            command = (
                "-m",
                "penstock.lab.characterize.neighbours",
                kind,
                str(folder),
                str(os.getpid()),
            )
            what = f"neighbour {number + 1} that is bound by {kind}"
            children.append(RankProcess(what, command, folder))
        programs = RankProcesses(children)
        programs.receive()
        yield programs
    finally:
        RankProcesses(children).kill()


def _counts(programs: RankProcesses) -> tuple[int, float]:
    """Return the rounds of all programs, and the mean time at which they were counted."""
    replies = programs.ask("count")
    return sum(each["rounds"] for each in replies), statistics.mean(each["t_s"] for each in replies)


def _rate(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[0] - one[0]) / (other[1] - one[1])
