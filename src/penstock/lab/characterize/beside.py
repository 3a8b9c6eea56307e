"""How much longer a job's steps take with something beside it, and what that gets done.

What is beside it is compared with the job alone just before and just after, the quicker of the two: what
else disturbs a machine for a second or two makes one of them slower, and never quicker.
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
from penstock.lab.characterize.teams import Child, Team, hire

_LEAST_STEPS: Final = 3


class Alone:
    """A job and its steps without neighbours, measured anew before each kind of them.

    Attributes:
        team: It.
        steps: How many steps are looked at.
    """

    def __init__(self, team: Team, step_s: float, seconds: float) -> None:
        """Look at steps for about so long, at least."""
        self.team = team
        self.steps = max(_LEAST_STEPS, math.ceil(seconds / step_s))
        self.seconds = seconds

    def step_s(self) -> float:
        """The median of its steps now."""
        return median_step(self.team.ask("train", steps=self.steps))


def median_step(trained: list[dict[str, Any]]) -> float:
    """Of the slowest rank."""
    return max(float(statistics.median(each["steps_s"])) for each in trained)


def beside_copies(
    name: str, alone: Alone, count: int, facts: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Copies of the job train at the same time.

    Returns:
        ``slowdown``: of its steps. ``all_slowdown``: the time that all of them take together for some
        steps over what they would take one after the other; below 1: sharing pays.
    """
    with ExitStack() as stack:
        others = []
        for number in range(count):
            own = folder / f"{name}-copy-{number}"
            own.mkdir()
            copy = hire(name, f"copy {number + 1} of {name}", own, **facts)
            others.append(stack.enter_context(copy))
        for each in others:
            each.end()
        before = alone.step_s()
        teams = [alone.team, *others]
        start = time.perf_counter()
        for each in teams:
            each.begin("train", steps=alone.steps)
        told = [each.end() for each in teams]
        seconds = time.perf_counter() - start
    together = median_step(told[0])
    by_itself = min(before, alone.step_s())
    return {
        "count": count,
        "slowdown": together / by_itself,
        "all_slowdown": seconds / (len(teams) * alone.steps * by_itself),
    }


def beside_programs(alone: Alone, count: int, folder: Path) -> dict[str, Any]:
    """So many programs of each kind in turn; ``slowdown`` of the job, and theirs."""
    made = {}
    for kind in KINDS:
        before = alone.step_s()
        with _programs(kind, count, folder) as programs:
            time.sleep(min(alone.seconds, 0.5))  # nothing else runs: how quick they are alone
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
def _programs(kind: str, count: int, folder: Path) -> Iterator[Team]:
    children: list[Child] = []
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
            children.append(Child(what, command, folder))
        programs = Team(children)
        programs.end()
        yield programs
    finally:
        Team(children).kill()


def _counts(programs: Team) -> tuple[int, float]:
    """Rounds of all of them, and when."""
    told = programs.ask("count")
    return sum(each["rounds"] for each in told), statistics.mean(each["t_s"] for each in told)


def _rate(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[0] - one[0]) / (other[1] - one[1])
