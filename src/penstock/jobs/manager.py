"""A manager of jobs: scripts that share a machine, under a budget that their sum never exceeds.

1. Each job is begun when its turn has come and there is room (:mod:`.policy`), under ``penstock run``.
2. At the end of a turn who has to leave is told to sleep, and does at the end of his step. When his
   memory is seen to be gone, and not before, the next one is woken.
3. What is recorded on disk is enough for another manager to go on ([Note: managers and their jobs]).

[Note: managers and their jobs]
    Jobs are in sessions of their own. If their manager dies, those who compute go on, and those who
    sleep sleep on: nobody is woken without a manager, so the budget holds. The next manager finds them by
    number and moment of start, and by the lock that they hold if they were begun but not recorded.
    Only a manager that lives holds the lock of the state directory.

[Note: ahead of its turn]
    What the others leave of the budget is lent to who comes next, for the turn: so much of its memory
    comes back already, while others compute, who may end at any time. It stays on flash as well, so that
    it can be given up at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, Final

from penstock.core.errors import ConfigError, JobError, free_space_bytes
from penstock.core.units import MIB, format_bytes
from penstock.jobs.control import Server
from penstock.jobs.description import Description
from penstock.jobs.policy import (
    ALIVE,
    Decision,
    Entry,
    Limits,
    Phase,
    Turn,
    decide,
    following,
    virtual_start,
)
from penstock.jobs.record import StateDirectory
from penstock.jobs.task import Command, Task, run_command

_LOOK_S: Final = 0.02
_MEASURE_S: Final = 0.25
_RECORD_S: Final = 5.0
_START_S: Final = 60.0
"""A process that has been starting for longer counts as computing."""
_RATE_S: Final = 1.0
_LEAST_FETCH_BYTES: Final = 64 * MIB
_SPARE_BYTES: Final = 16 * MIB
"""Of the budget, not lent: what is measured is never to the byte what was expected."""


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
        self._command = command
        self._clock = clock
        self._state = StateDirectory(state)
        self._tasks: dict[str, Task] = {}
        self._turn = Turn()
        self._then = clock()
        self._measured = self._recorded = -1e9
        self._last_record: Any = None
        self._said: dict[str, str] = {}
        self._samples: deque[tuple[float, int]] = deque()
        self._starting: dict[str, float] = {}
        self._ending = self._leaving = self._record_failed = False
        self._interrupts = 0
        try:
            for spec in description.jobs:
                self._tasks[spec.name] = Task(spec, description.machine, self._state)
            self._find()
            self._limits = self._find_limits()
            self._server = Server(self._state.fd, self._handle)
        except BaseException:
            self._let_go()
            raise

    def _find_limits(self) -> Limits:
        machine = self.description.machine
        flash = None
        if machine.directories:
            free = sum(free_space_bytes(each) for each in _devices(machine.directories))
            free += sum(task.status.flash_bytes for task in self._tasks.values() if task.lives)
            flash = free if machine.capacity_bytes is None else machine.capacity_bytes
            if machine.capacity_bytes is not None and free < machine.capacity_bytes:
                raise ConfigError(
                    f"[machine] flash_capacity is {format_bytes(flash)}, and"
                    f" {', '.join(machine.directories)} has {format_bytes(free)} free"
                )
        return Limits(
            memory_bytes=machine.memory_bytes,
            slice_s=machine.slice_s,
            patience_s=machine.patience_s,
            device_bytes=machine.device_bytes,
            flash_bytes=flash,
        )

    def _find(self) -> None:
        """Take over the jobs of an earlier manager, if not all of them are over."""
        record = self._state.read()
        if record is None:
            return
        try:
            found = {str(each["name"]): each for each in record["jobs"]}
            if all(each["phase"] == Phase.OVER.value for each in found.values()):
                return  # that run is over: this is another
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

    # -- running --------------------------------------------------------------------------------------

    def run(self, watch: Callable[[dict[str, Any]], None] | None = None) -> bool:
        """Run until all jobs are over; once.

        In the main thread Ctrl-C and SIGTERM stop them in order, a second time at once. SIGHUP leaves
        them as they are, for another manager.

        Args:
            watch: Is given the status, some fifty times a second.

        Returns:
            Whether all are over, and none has failed.

        """
        try:
            with self._signals():
                self._record(durable=True)
                while not self._leaving and any(
                    task.phase is not Phase.OVER for task in self._tasks.values()
                ):
                    self._server.serve(_LOOK_S)
                    self._heed()
                    self.advance()
                    if watch is not None:
                        watch(self.status())
                self._record(durable=True)
        finally:
            self._server.close()
        return all(task.outcome == "done" for task in self._tasks.values())

    def advance(self) -> None:
        """Look, decide, and act, once."""
        now = self._clock()
        passed, self._then = now - self._then, now
        measure = now - self._measured >= _MEASURE_S
        if measure:
            self._measured = now
        for task in self._tasks.values():
            task.observe(now, measure=measure)
            if task.phase in (Phase.AWAKE, Phase.SUSPENDING):
                task.awake_s += passed
                task.virtual_s += passed / task.spec.weight
        self._count_turn(now, passed)
        entries = self.entries()
        decision = decide(entries, self._turn, self._limits)
        self._turn = decision.turn
        self._act(decision, entries)
        self._fetch_ahead()
        self._say_all()
        self._sample(now)
        self._record_if_changed(now)

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
        for name in decision.sleep:
            self._tasks[name].sleep()
        for name in decision.wake:
            task = self._tasks[name]
            others = [each for each in entries if each.name != name]
            if task.phase is Phase.WAITING:
                task.virtual_s = max(task.virtual_s, virtual_start(others or entries))
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
            task.begin(self._command(spec, self.description.machine, channel, kept))
        except JobError:
            return  # it is over, and says why
        self._record(durable=True)

    def _fetch_ahead(self) -> None:
        """See [Note: ahead of its turn]."""
        entries = self.entries()
        following_one: Entry | None = None
        left = self._limits.slice_s - self._turn.spent_s
        if self.description.machine.prefetch and self._turn.spent_s and left > 0:
            following_one = following(entries, self._turn, self._limits, left_s=left)
        for each in entries:
            task = self._tasks[each.name]
            if following_one is None or each.name != following_one.name:
                if each.name not in self._turn.chosen:
                    task.fetch(0)
                continue
            if each.fetch_bytes:
                continue
            free = self._limits.memory_bytes - sum(one.charge_bytes for one in entries)
            nbytes = min(free - _SPARE_BYTES, task.status.flash_bytes)
            if nbytes >= _LEAST_FETCH_BYTES:
                task.fetch(nbytes)

    # -- telling --------------------------------------------------------------------------------------

    def _say_all(self) -> None:
        for name, task in self._tasks.items():
            if task.told and self._said.get(name) != task.told:
                self._said[name] = task.told
                self._tell(f"{name}: {task.told}")
            place = f"{name} phase"
            if self._said.get(place) != task.phase.value:
                self._said[place] = task.phase.value
                if task.phase in _TOLD:
                    self._tell(f"{name}: {_TOLD[task.phase]}")

    def _sample(self, now: float) -> None:
        if self._samples and now - self._samples[-1][0] < _MEASURE_S:
            return
        self._samples.append(
            (now, sum(task.io_bytes for task in self._tasks.values() if task.lives))
        )
        while now - self._samples[0][0] > _RATE_S:
            self._samples.popleft()

    def status(self) -> dict[str, Any]:
        """How the machine and the jobs are; the manual has the fields."""
        entries = self.entries()
        (begun, first), (ended, last) = self._ends_of_samples()
        return {
            "schema": 1,
            "machine": {
                "memory_bytes": self._limits.memory_bytes,
                "held_bytes": sum(task.held_bytes for task in self._tasks.values()),
                "charged_bytes": sum(each.charge_bytes for each in entries),
                "flash_capacity_bytes": self._limits.flash_bytes,
                "flash_bytes": sum(
                    task.status.flash_bytes for task in self._tasks.values() if task.lives
                ),
                "flash_directories": list(self.description.machine.directories),
                "bytes_per_s": max(0.0, (last - first) / (ended - begun)) if ended > begun else 0.0,
                "stopping": self._ending,
            },
            "jobs": [task.report() for task in self._tasks.values()],
        }

    def _ends_of_samples(self) -> tuple[tuple[float, int], tuple[float, int]]:
        if not self._samples:
            return (0.0, 0), (0.0, 0)
        return self._samples[0], self._samples[-1]

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

    def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        what, name = request.get("do"), request.get("name")
        if what == "status":
            return self.status()
        if what == "stop" and name is None:
            return {"told": self.stop()}
        if not isinstance(name, str):
            raise JobError(f"the request {what!r} needs the name of a job")
        if what == "stop":
            return {"told": self.stop(name)}
        if what == "suspend":
            return {"told": self.suspend(name)}
        if what == "resume":
            return {"told": self.resume(name)}
        raise JobError(f"the request {what!r} is unknown; known are status, suspend, resume, stop")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self._heard)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._leaving = True
        else:
            self._interrupts += 1

    def _heed(self) -> None:
        """Do what signals have asked for."""
        if self._interrupts and not self._ending:
            self._tell(
                f"stops its jobs, {self.description.machine.grace_s:g} s for each; again: at once"
            )
            self.stop()
        elif self._interrupts > 1:
            for task in self._tasks.values():
                task.kill()

    # -- what stays -----------------------------------------------------------------------------------

    def _record_if_changed(self, now: float) -> None:
        shape = [
            (task.phase, task.identity, task.held_back, task.stopping)
            for task in self._tasks.values()
        ]
        if shape != self._last_record:
            self._last_record = shape
            self._record(durable=True)
        elif now - self._recorded > _RECORD_S:
            self._record(durable=False)

    def _record(self, *, durable: bool) -> None:
        self._recorded = self._clock()
        try:
            jobs = [task.to_json() for task in self._tasks.values()]
            self._state.write({"jobs": jobs}, durable=durable)
            self._record_failed = False
        except JobError as error:
            if not self._record_failed:
                self._tell(f"warning: {error}")
            self._record_failed = True

    def close(self) -> None:
        """Let go of all; processes go on as they are. Idempotent."""
        self._server.close()
        self._let_go()

    def _let_go(self) -> None:
        for task in self._tasks.values():
            task.close()
        self._tasks.clear()
        self._state.close()

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_TOLD: Final = {Phase.STARTING: "begins", Phase.AWAKE: "is awake", Phase.ASLEEP: "sleeps"}


def _devices(directories: tuple[str, ...]) -> list[str]:
    """One directory for each file system."""
    return list({os.stat(each).st_dev: each for each in directories}.values())
