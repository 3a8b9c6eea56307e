"""Manager of jobs: scripts that share a machine under a memory budget for their sum.

1. Each job is started under ``penstock run`` when its turn comes and it fits (:mod:`.policy`).
2. At the end of a turn, jobs that must make room are told to sleep, which they do at the end of their
   step. Only when their memory has been freed, by measurement, is the next job woken.
3. If that is permitted, the kernel enforces the budget too (:mod:`.budget`).
4. The record on disk lets another manager continue ([Note: managers and their jobs]).

[Note: managers and their jobs]
    Jobs run in their own process sessions. If their manager dies, computing jobs continue and sleeping
    jobs keep sleeping: only a manager wakes jobs, so the budget holds. The next manager finds them by
    process number and start time, or, if they were started but not recorded, by the lock that they hold.
    Only a living manager holds the lock of the state directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

from penstock.core.errors import ConfigError, JobError
from penstock.core.units import MIB
from penstock.jobs.budget import JobsBudget
from penstock.jobs.command import Command, run_command
from penstock.jobs.control import Server, answer
from penstock.jobs.description import Description
from penstock.jobs.interrupts import ManagerInterrupts
from penstock.jobs.limits import limits_of
from penstock.jobs.policy import (
    ALIVE,
    JobDecision,
    JobEntry,
    JobPhase,
    PolicyTurn,
    decide,
    prefetch_allowance,
    slice_s,
    virtual_start,
)
from penstock.jobs.progress import ProgressReporter
from penstock.jobs.record import RecordWriter, StateDirectory
from penstock.jobs.task import Task

_POLL_S: Final = 0.02
_SLOW_POLL_S: Final = 0.1
"""Interval of polls while no job changes its phase, since a poll takes time of a core from jobs."""
_POLLS_PER_SLICE: Final = 20
_STEADY: Final = frozenset({JobPhase.WAITING, JobPhase.AWAKE, JobPhase.ASLEEP, JobPhase.OVER})
_MEASURE_S: Final = 0.25
_MARGIN_BYTES: Final = 128 * MIB
"""Memory that is not used for prefetching if the kernel enforces the budget and would kill for it."""
_START_S: Final = 60.0
"""Time after which a starting process counts as computing."""


class Manager:
    """Runs jobs; see ``run``. For one thread; other threads and processes use a :class:`.Client`.

    Attributes:
        description: Configuration.
        found: Names of living jobs of an earlier manager.
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
        """Check everything, lock the directory, and find the jobs of a killed manager.

        Args:
            description: The machine and the jobs.
            state: State directory of this manager; it is created if it does not exist.
            tell: Function that prints a line for the user.
            command: Function that returns the command of a job's process.
            clock: Clock in seconds.

        Raises:
            ConfigError: A script or directory does not exist, another manager uses the state directory,
                or living jobs of it are not in the description.
            JobError: The record cannot be read, or the control socket cannot be opened.
        """
        description.check_places()
        self.description = description
        self.found: list[str] = []
        self._tell = tell or (lambda line: None)
        self._teller = ProgressReporter(self._tell)
        self._command = command
        self._clock = clock
        self._state = StateDirectory(state)
        self._tasks: dict[str, Task] = {}
        self._turn = PolicyTurn()
        self._then = clock()
        self._measured = -1e9
        self._starting: dict[str, float] = {}
        self._ending = False
        self._interrupts = ManagerInterrupts()
        self._recording = RecordWriter(self._state, self._tell)
        self._budget = JobsBudget(description.machine, state=self._state.path, tell=self._tell)
        try:
            for spec in description.jobs:
                self._tasks[spec.name] = Task(spec, description.machine, self._state)
            group = self._find()
            for task in self._tasks.values():
                task.clear_earlier()
            self._limits = limits_of(description.machine, self._resting_bytes)
            self._budget.enforce(group)
            if self._budget.is_enforced:
                self._limits = replace(self._limits, spare_bytes=_MARGIN_BYTES)
            for task in self._tasks.values():
                task.found_in(self._budget)
            self._server = Server(self._state.fd, partial(answer, self))
        except BaseException:
            self._close_all()
            raise

    def _find(self) -> str | None:
        """Take over the jobs of an earlier manager, unless all have ended; return their group."""
        record = self._state.read() or {"jobs": []}
        group = record.get("group")
        try:
            found = {str(each["name"]): each for each in record["jobs"]}
            if all(each["phase"] == JobPhase.OVER.value for each in found.values()):
                found = {}  # that run has ended: this is a new one
            for name, task in self._tasks.items():
                if name not in found and task.lives_unrecorded:
                    task.adopt(task.to_json())
            for name, each in found.items():
                if name in self._tasks:
                    self._tasks[name].adopt(each)
                elif each["phase"] not in (JobPhase.OVER.value, JobPhase.WAITING.value):
                    raise ConfigError(
                        f"job {name!r} of an earlier manager may still run, process {each['pid']}, but is"
                        " not in the description any more: add it again, or end it and remove"
                        f" {self._state.path!r}"
                    )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise JobError(
                f"the record in {self._state.path!r} is damaged ({error!r}): make sure that none of its"
                " jobs is running, and remove the directory"
            ) from error
        self.found = [name for name, task in self._tasks.items() if task.lives]
        return group

    # -- running --------------------------------------------------------------------------------------

    def run(self, watch: Callable[[dict[str, Any]], None] | None = None) -> bool:
        """Run until all jobs have ended. May be called once.

        In the main thread Ctrl-C and SIGTERM stop the jobs properly, and kill them the second time.
        SIGHUP leaves them as they are, for another manager.

        Args:
            watch: Function that receives the status, ten to fifty times a second.

        Returns:
            True if all have ended, and none has failed.
        """
        try:
            with self._interrupts.handled():
                self._recording.write(self._document(), self._clock())
                self._budget.report()
                while not self._interrupts.detaching and any(
                    task.phase is not JobPhase.OVER for task in self._tasks.values()
                ):
                    self._server.serve(self._poll_interval_s())
                    self._handle_signals()
                    self.advance()
                    if watch is not None:
                        watch(self.status())
                self._recording.write(self._document(), self._clock())
        finally:
            self._server.close()
        return all(task.outcome == "done" for task in self._tasks.values())

    def _poll_interval_s(self) -> float:
        if not all(task.phase in _STEADY for task in self._tasks.values()):
            return _POLL_S
        if self._limits.slice_s is None:  # a turn is long then
            return _SLOW_POLL_S
        return max(_POLL_S, min(_SLOW_POLL_S, self._limits.slice_s / _POLLS_PER_SLICE))

    def advance(self) -> None:
        """Poll the jobs, decide, and act, once."""
        now = self._clock()
        passed, self._then = now - self._then, now
        measure = now - self._measured >= _MEASURE_S
        if measure:
            self._measured = now
        ending = any(task.is_ending for task in self._tasks.values())
        for task in self._tasks.values():
            task.observe(now, measure=measure, others_end=ending)
            if task.phase in (JobPhase.AWAKE, JobPhase.SUSPENDING):
                task.awake_s += passed
                task.virtual_s += passed / task.spec.weight
        self._count_turn(now, passed)
        entries = self.entries()
        decision = decide(entries, self._turn, self._limits)
        self._turn = decision.turn
        self._act(decision, entries)
        self._prefetch()
        self._teller.update(self._tasks.values(), now)
        self._recording.write_if_changed(self._document(), now, shape=self._shape())

    def _count_turn(self, now: float, passed: float) -> None:
        """Count the time of the turn, which begins when all its jobs are awake."""
        for name, task in self._tasks.items():
            if task.phase is not JobPhase.STARTING:
                self._starting.pop(name, None)
        begun = all(
            task.phase is JobPhase.AWAKE
            or (
                task.phase is JobPhase.STARTING
                and now - self._starting.setdefault(name, now) > _START_S
            )
            for name, task in self._tasks.items()
            if name in self._turn.chosen
        )
        if begun:
            self._turn = replace(self._turn, spent_s=self._turn.spent_s + passed)

    def entries(self) -> list[JobEntry]:
        """Return the jobs as input of the policy."""
        now = self._clock()
        limit = self.description.machine.memory_bytes
        first = [task.entry(now, free_bytes=limit) for task in self._tasks.values()]
        rests = {each.name: each.rest_bytes for each in first if each.phase in ALIVE}
        made = []
        for task in self._tasks.values():
            others = sum(nbytes for name, nbytes in rests.items() if name != task.spec.name)
            made.append(task.entry(now, free_bytes=max(limit - others, 0)))
        return made

    def _act(self, decision: JobDecision, entries: list[JobEntry]) -> None:
        self._budget.allow(
            [_woken(each) if each.name in decision.wake else each for each in entries]
        )
        for name in decision.sleep:
            self._tasks[name].sleep()
        for name in decision.wake:
            task = self._tasks[name]
            others = [each for each in entries if each.name != name]
            if task.phase is JobPhase.WAITING:
                task.virtual_s = max(task.virtual_s, virtual_start(others))
                self._begin(task)
            else:
                task.wake()
        for name, task in self._tasks.items():
            task.note = decision.notes.get(name, "")
            if task.held_back and not task.note and task.phase is JobPhase.ASLEEP:
                task.note = "sleeps until it is resumed"

    def _begin(self, task: Task) -> None:
        spec = task.spec
        channel, kept = self._state.channel(spec.name), self._state.kept(spec.name)
        try:
            task.begin(self._command(spec, self.description.machine, channel, kept), self._budget)
        except JobError:
            return  # it has ended, with the reason
        self._recording.write(self._document(), self._clock())

    def _prefetch(self) -> None:
        """Let the next job prefetch memory; see [Note: prefetching a job]."""
        entries = self.entries()
        rests = {name: task.status.flash_bytes for name, task in self._tasks.items()}
        wanted = self.description.machine.prefetch and self._turn.spent_s > 0
        lent = prefetch_allowance(entries, self._turn, self._limits, rests) if wanted else None
        if lent is not None:
            self._budget.allow(
                [
                    replace(each, fetch_bytes=lent[1]) if each.name == lent[0] else each
                    for each in entries
                ]
            )
        for name, task in self._tasks.items():
            if lent is not None and name == lent[0]:
                task.prefetch(lent[1])
            elif name not in self._turn.chosen:
                task.prefetch(0)

    # -- status ---------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the status of the machine and the jobs, as in the manual."""
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
        """Bytes of jobs' memory that are on flash now."""
        return sum(task.status.flash_bytes for task in self._tasks.values() if task.lives)

    # -- requests -------------------------------------------------------------------------------------

    def suspend(self, name: str) -> str:
        """Suspend a job until ``resume``; return a message. Raises JobError."""
        task = self._task(name, "suspend")
        if not self._limits.flash_bytes:
            raise JobError(f"job {name!r} cannot sleep: [machine] flash names no directory")
        task.held_back = True
        if task.phase is JobPhase.WAITING:
            return f"{name} does not start until it is resumed"
        return f"{name} sleeps at the end of its step, until it is resumed"

    def resume(self, name: str) -> str:
        """Give a job turns again; return a message. Raises JobError."""
        task = self._task(name, "resume")
        if not task.held_back:
            return f"{name} already has turns"
        others = [each for each in self.entries() if each.name != name]
        task.virtual_s = max(task.virtual_s, virtual_start(others))
        task.held_back = False
        return f"{name} has turns again"

    def stop(self, name: str | None = None) -> str:
        """Stop a job, or all; return a message. Raises JobError."""
        if name is not None:
            self._task(name, "stop").stop()
            return f"{name} is being stopped"
        self._ending = True
        for task in self._tasks.values():
            if task.phase is not JobPhase.OVER:
                task.stop()
        return "all jobs are being stopped, and the manager ends after them"

    def _task(self, name: str, what: str) -> Task:
        task = self._tasks.get(name)
        if task is None:
            raise JobError(
                f"there is no job {name!r} to {what}; there are {', '.join(self._tasks)}"
            )
        if task.phase is JobPhase.OVER:
            raise JobError(f"job {name!r} has ended ({task.told}): there is nothing to {what}")
        return task

    def _handle_signals(self) -> None:
        """Act on received signals."""
        if self._interrupts.count and not self._ending:
            self._tell(
                f"stopping all jobs, with {self.description.machine.grace_s:g} s for each; interrupt"
                " again to kill them"
            )
            self.stop()
        elif self._interrupts.count > 1:
            for task in self._tasks.values():
                task.kill()

    # -- record ---------------------------------------------------------------------------------------

    def _document(self) -> dict[str, Any]:
        """Return the record for another manager."""
        jobs = [task.to_json() for task in self._tasks.values()]
        return {"jobs": jobs, "group": self._budget.group}

    def _shape(self) -> object:
        """Return the part of the record that must not be lost."""
        return [
            (task.phase, task.identity, task.held_back, task.stopping)
            for task in self._tasks.values()
        ]

    def close(self) -> None:
        """Close everything; the jobs' processes continue as they are. Idempotent."""
        self._server.close()
        self._close_all()

    def _close_all(self) -> None:
        self._budget.close(wait=not any(task.lives for task in self._tasks.values()))
        for task in self._tasks.values():
            task.close()
        self._tasks.clear()
        self._state.close()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _woken(entry: JobEntry) -> JobEntry:
    """Return the entry in the phase after its wake-up."""
    phase = JobPhase.STARTING if entry.phase is JobPhase.WAITING else JobPhase.WAKING
    return replace(entry, phase=phase)
