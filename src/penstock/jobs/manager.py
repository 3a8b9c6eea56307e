"""A manager of jobs: scripts that share a machine, under a budget that their sum never exceeds.

1. Each job is begun when its turn has come and there is room (:mod:`.policy`), under ``penstock run``.
2. At the end of a turn who has to leave is told to sleep, and does at the end of his step. When his
   memory is seen to be gone, and not before, the next one is woken.
3. Where that is permitted, the kernel keeps the budget too (:mod:`.budget`).
4. What is recorded on disk is enough for another manager to go on ([Note: managers and their jobs]).

[Note: managers and their jobs]
    Jobs are in sessions of their own. If their manager dies, those who compute go on, and those who
    sleep sleep on: nobody is woken without a manager, so the budget holds. The next manager finds them by
    number and moment of start, and by the lock that they hold if they were begun but not recorded.
    Only a manager that lives holds the lock of the state directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from penstock.core.errors import ConfigError, JobError
from penstock.core.units import MIB
from penstock.jobs.budget import Budget
from penstock.jobs.command import Command, run_command
from penstock.jobs.control import Server, answer
from penstock.jobs.description import Description
from penstock.jobs.interrupts import Interrupts
from penstock.jobs.limits import limits_of
from penstock.jobs.policy import (
    ALIVE,
    Decision,
    Entry,
    Phase,
    Turn,
    ahead,
    decide,
    slice_s,
    virtual_start,
)
from penstock.jobs.record import Recording, StateDirectory
from penstock.jobs.task import Task
from penstock.jobs.teller import Teller

_LOOK_S: Final = 0.02
_CALM_S: Final = 0.1
"""Between looks while nobody is between two states: each takes a core from who computes."""
_LOOKS_A_SLICE: Final = 20
_CALM: Final = frozenset({Phase.WAITING, Phase.AWAKE, Phase.ASLEEP, Phase.OVER})
_MEASURE_S: Final = 0.25
_SPARE_BYTES: Final = 128 * MIB
"""Not lent where the kernel keeps the budget: who sleeps would be ended for a little too much."""
_START_S: Final = 60.0
"""A process that has been starting for longer counts as computing."""


class Manager:
    """Runs jobs; see ``run``. For one thread; others talk to it by a :class:`.Client`.

    Attributes:
        description: What it was told.
        found: Names of jobs of an earlier manager that live.
    """

    def __init__(
        self,
        description: Description,
        *,
        state: str,
        tell: Callable[[str], None] | None = None,
        command: Command = run_command,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check everything, take the directory, and find the jobs of a manager that was killed.

        Args:
            description: The machine and the jobs.
            state: A directory of its own; it is made if need be.
            tell: Is told, in a line, what happens.
            command: What a job's process runs.
            clock: Seconds.

        Raises:
            ConfigError: A script or directory is not there, another manager has the directory, or jobs
                live in it that this description does not have.
            JobError: What was recorded cannot be read, or it cannot listen.
        """
        description.check_places()
        self.description = description
        self.found: list[str] = []
        self._tell = tell or (lambda line: None)
        self._teller = Teller(self._tell)
        self._command = command
        self._clock = clock
        self._state = StateDirectory(state)
        self._tasks: dict[str, Task] = {}
        self._turn = Turn()
        self._then = clock()
        self._measured = -1e9
        self._starting: dict[str, float] = {}
        self._ending = False
        self._interrupts = Interrupts()
        self._recording = Recording(self._state, self._tell)
        self._budget = Budget(description.machine, state=self._state.path, tell=self._tell)
        try:
            for spec in description.jobs:
                self._tasks[spec.name] = Task(spec, description.machine, self._state)
            group = self._find()
            for task in self._tasks.values():
                task.forget_earlier()
            self._limits = limits_of(description.machine, self._resting_bytes)
            self._budget.keep(group)
            if self._budget.is_enforced:
                self._limits = replace(self._limits, spare_bytes=_SPARE_BYTES)
            for task in self._tasks.values():
                task.found_in(self._budget)
            self._server = Server(self._state.fd, partial(answer, self))
        except BaseException:
            self._let_go()
            raise

    def _find(self) -> str | None:
        """Take over the jobs of an earlier manager, if not all of them are over; returns their group."""
        record = self._state.read() or {"jobs": []}
        group = record.get("group")
        try:
            found = {str(each["name"]): each for each in record["jobs"]}
            if all(each["phase"] == Phase.OVER.value for each in found.values()):
                found = {}  # that run is over: this is another
            for name, task in self._tasks.items():
                if name not in found and task.lives_unrecorded:
                    task.adopt(task.to_json())
            for name, each in found.items():
                if name in self._tasks:
                    self._tasks[name].adopt(each)
                elif each["phase"] not in (Phase.OVER.value, Phase.WAITING.value):
                    raise ConfigError(
                        f"job {name!r} of an earlier manager may live, process {each['pid']}, and is not"
                        " described any more: describe it again, or end it and remove"
                        f" {self._state.path!r}"
                    )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise JobError(
                f"the record in {self._state.path!r} is damaged ({error!r}): see that none of its jobs is"
                " running, and remove the directory"
            ) from error
        self.found = [name for name, task in self._tasks.items() if task.lives]
        return group

    # -- running --------------------------------------------------------------------------------------

    def run(self, watch: Callable[[dict[str, Any]], None] | None = None) -> bool:
        """Run until all jobs are over; once.

        In the main thread Ctrl-C and SIGTERM stop them in order, a second time at once. SIGHUP leaves
        them as they are, for another manager.

        Args:
            watch: Is given the status, ten to fifty times a second.

        Returns:
            Whether all are over, and none has failed.
        """
        try:
            with self._interrupts.heard():
                self._recording.write(self._document(), self._clock())
                self._budget.say()
                while not self._interrupts.leaving and any(
                    task.phase is not Phase.OVER for task in self._tasks.values()
                ):
                    self._server.serve(self._until_next_look_s())
                    self._heed()
                    self.advance()
                    if watch is not None:
                        watch(self.status())
                self._recording.write(self._document(), self._clock())
        finally:
            self._server.close()
        return all(task.outcome == "done" for task in self._tasks.values())

    def _until_next_look_s(self) -> float:
        if not all(task.phase in _CALM for task in self._tasks.values()):
            return _LOOK_S
        if self._limits.slice_s is None:  # a turn is long then
            return _CALM_S
        return max(_LOOK_S, min(_CALM_S, self._limits.slice_s / _LOOKS_A_SLICE))

    def advance(self) -> None:
        """Look, decide, and act, once."""
        now = self._clock()
        passed, self._then = now - self._then, now
        measure = now - self._measured >= _MEASURE_S
        if measure:
            self._measured = now
        ending = any(task.is_ending for task in self._tasks.values())
        for task in self._tasks.values():
            task.observe(now, measure=measure, others_end=ending)
            if task.phase in (Phase.AWAKE, Phase.SUSPENDING):
                task.awake_s += passed
                task.virtual_s += passed / task.spec.weight
        self._count_turn(now, passed)
        entries = self.entries()
        decision = decide(entries, self._turn, self._limits)
        self._turn = decision.turn
        self._act(decision, entries)
        self._fetch_ahead()
        self._teller.look(self._tasks.values(), now)
        self._recording.write_if_changed(self._document(), now, shape=self._shape())

    def _count_turn(self, now: float, passed: float) -> None:
        """The turn lasts from when all of those are awake whose turn it is."""
        for name, task in self._tasks.items():
            if task.phase is not Phase.STARTING:
                self._starting.pop(name, None)
        begun = all(
            task.phase is Phase.AWAKE
            or (
                task.phase is Phase.STARTING
                and now - self._starting.setdefault(name, now) > _START_S
            )
            for name, task in self._tasks.items()
            if name in self._turn.chosen
        )
        if begun:
            self._turn = replace(self._turn, spent_s=self._turn.spent_s + passed)

    def entries(self) -> list[Entry]:
        """The jobs as the policy sees them."""
        now = self._clock()
        limit = self.description.machine.memory_bytes
        first = [task.entry(now, free_bytes=limit) for task in self._tasks.values()]
        rests = {each.name: each.rest_bytes for each in first if each.phase in ALIVE}
        made = []
        for task in self._tasks.values():
            others = sum(nbytes for name, nbytes in rests.items() if name != task.spec.name)
            made.append(task.entry(now, free_bytes=max(limit - others, 0)))
        return made

    def _act(self, decision: Decision, entries: list[Entry]) -> None:
        self._budget.allow(
            [_woken(each) if each.name in decision.wake else each for each in entries]
        )
        for name in decision.sleep:
            self._tasks[name].sleep()
        for name in decision.wake:
            task = self._tasks[name]
            others = [each for each in entries if each.name != name]
            if task.phase is Phase.WAITING:
                task.virtual_s = max(task.virtual_s, virtual_start(others))
                self._begin(task)
            else:
                task.wake()
        for name, task in self._tasks.items():
            task.note = decision.notes.get(name, "")
            if task.held_back and not task.note and task.phase is Phase.ASLEEP:
                task.note = "sleeps until it is resumed"

    def _begin(self, task: Task) -> None:
        spec = task.spec
        channel, kept = self._state.channel(spec.name), self._state.kept(spec.name)
        try:
            task.begin(self._command(spec, self.description.machine, channel, kept), self._budget)
        except JobError:
            return  # it is over, and says why
        self._recording.write(self._document(), self._clock())

    def _fetch_ahead(self) -> None:
        """See [Note: ahead of its turn]."""
        entries = self.entries()
        rests = {name: task.status.flash_bytes for name, task in self._tasks.items()}
        wanted = self.description.machine.prefetch and self._turn.spent_s > 0
        lent = ahead(entries, self._turn, self._limits, rests) if wanted else None
        if lent is not None:
            self._budget.allow(
                [
                    replace(each, fetch_bytes=lent[1]) if each.name == lent[0] else each
                    for each in entries
                ]
            )
        for name, task in self._tasks.items():
            if lent is not None and name == lent[0]:
                task.fetch(lent[1])
            elif name not in self._turn.chosen:
                task.fetch(0)

    # -- telling --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """How the machine and the jobs are; the manual has the fields."""
        entries = self.entries()
        return {
            "schema": 1,
            "machine": {
                "memory_bytes": self._limits.memory_bytes,
                "slice_s": slice_s(entries, self._turn, self._limits),
                "held_bytes": sum(task.held_bytes for task in self._tasks.values()),
                "charged_bytes": sum(each.charge_bytes for each in entries),
                "flash_capacity_bytes": self._limits.flash_bytes,
                "flash_bytes": self._resting_bytes,
                "flash_directories": list(self.description.machine.directories),
                "bytes_per_s": self._teller.bytes_per_s,
                "stopping": self._ending,
                "enforced": self._budget.is_enforced,
                "kept_by": self._budget.kept_by,
            },
            "jobs": [task.report() for task in self._tasks.values()],
        }

    @property
    def _resting_bytes(self) -> int:
        """Memory of jobs that is on flash now."""
        return sum(task.status.flash_bytes for task in self._tasks.values() if task.lives)

    # -- being told -----------------------------------------------------------------------------------

    def suspend(self, name: str) -> str:
        """Have a job sleep until ``resume``; what comes of it, in words. Raises JobError."""
        task = self._task(name, "suspend")
        if not self._limits.flash_bytes:
            raise JobError(f"job {name!r} cannot sleep: [machine] flash names no directory")
        task.held_back = True
        if task.phase is Phase.WAITING:
            return f"{name} does not begin until it is resumed"
        return f"{name} sleeps at the end of its step, until it is resumed"

    def resume(self, name: str) -> str:
        """Let a job have turns again; what comes of it, in words. Raises JobError."""
        task = self._task(name, "resume")
        if not task.held_back:
            return f"{name} has its turns already"
        others = [each for each in self.entries() if each.name != name]
        task.virtual_s = max(task.virtual_s, virtual_start(others))
        task.held_back = False
        return f"{name} has turns again"

    def stop(self, name: str | None = None) -> str:
        """End a job in order, or all; what comes of it, in words. Raises JobError."""
        if name is not None:
            self._task(name, "stop").stop()
            return f"{name} is told to end"
        self._ending = True
        for task in self._tasks.values():
            if task.phase is not Phase.OVER:
                task.stop()
        return "all jobs are told to end, and the manager ends after them"

    def _task(self, name: str, what: str) -> Task:
        task = self._tasks.get(name)
        if task is None:
            raise JobError(
                f"there is no job {name!r} to {what}; there are {', '.join(self._tasks)}"
            )
        if task.phase is Phase.OVER:
            raise JobError(f"job {name!r} is over ({task.told}): there is nothing to {what}")
        return task

    def _heed(self) -> None:
        """Do what signals have asked for."""
        if self._interrupts.count and not self._ending:
            self._tell(
                f"stops its jobs, {self.description.machine.grace_s:g} s for each; again: at once"
            )
            self.stop()
        elif self._interrupts.count > 1:
            for task in self._tasks.values():
                task.kill()

    # -- what stays -----------------------------------------------------------------------------------

    def _document(self) -> dict[str, Any]:
        """What another manager must know."""
        jobs = [task.to_json() for task in self._tasks.values()]
        return {"jobs": jobs, "group": self._budget.group}

    def _shape(self) -> object:
        """Of what is recorded, that which may not be lost."""
        return [
            (task.phase, task.identity, task.held_back, task.stopping)
            for task in self._tasks.values()
        ]

    def close(self) -> None:
        """Let go of all; processes go on as they are. Idempotent."""
        self._server.close()
        self._let_go()

    def _let_go(self) -> None:
        self._budget.close(wait=not any(task.lives for task in self._tasks.values()))
        for task in self._tasks.values():
            task.close()
        self._tasks.clear()
        self._state.close()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _woken(entry: Entry) -> Entry:
    """As it is about to be."""
    phase = Phase.STARTING if entry.phase is Phase.WAITING else Phase.WAKING
    return replace(entry, phase=phase)
