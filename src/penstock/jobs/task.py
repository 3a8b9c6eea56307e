"""One job of a manager, from waiting to its end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.core.errors import JobError
from penstock.core.units import MIB, format_bytes
from penstock.jobs.budget import JobsBudget
from penstock.jobs.description import JobsMachine, JobSpec
from penstock.jobs.job_cgroups import JobCgroup
from penstock.jobs.logs import disk_is_full, last_lines, length_of, rotate
from penstock.jobs.policy import ALIVE, JobEntry, JobPhase
from penstock.jobs.processes import Identity, JobProcess, describe_end, end_holders
from penstock.jobs.record import StateDirectory
from penstock.jobs.termination import Termination
from penstock.swap.channel import ManagerEnd, Status

_NEED_FACTOR: Final = 1.05
"""Factor from measured to needed memory."""
_TOLERANCE_BYTES: Final = 16 * MIB
"""Excess over the declared memory that is tolerated."""
_STEPS: Final = 2
"""Number of steps after which a job's measured memory is its need."""
_RETRY_S: Final = 30.0
"""Time after which a job that could not sleep is asked again."""
_EXPECTED_BYTES_PER_S: Final = 3e9
"""Expected speed of suspending and resuming until it is measured. Rather too high than too low: then the
job sleeps once too early, and the speed is known."""
_EXIT_LIMIT_S: Final = 5.0
"""Time limit for killed processes to disappear."""
_UNFINISHED: Final = "unfinished"


class Task:
    """A job, its process and its history. For one thread.

    Attributes:
        spec: Configuration of the job.
        phase: Phase at the last poll.
        held_bytes: DRAM that it holds, by the last measurement.
        virtual_s: Virtual time; see :mod:`.policy`.
        held_back: A user has suspended it.
        stopping: It is to end.
        told: Message on its last event.
        note: Reason why it waits.
    """

    def __init__(self, spec: JobSpec, machine: JobsMachine, state: StateDirectory) -> None:
        """Prepare the job without starting it. Raises JobError if its channel cannot be created."""
        self.spec = spec
        self.phase = JobPhase.WAITING
        self.held_bytes = 0
        self.virtual_s = self.awake_s = 0.0
        self.held_back = self.stopping = False
        self.told = self.note = ""
        self.code: int | None = None
        self.outcome = _UNFINISHED
        self.channel = ManagerEnd(state.channel(spec.name))
        self.log = state.log(spec.name)
        self._log_begin = 0
        self._machine = machine
        self._process: JobProcess | None = None
        self._room: JobCgroup | None = None
        self._overrun = ""
        self._need_bytes = spec.memory_bytes
        self._rest_bytes = machine.asleep_bytes
        self._peak_bytes = 0
        self._waits_since: float | None = None
        self._fixed_until = 0.0
        self._ending = Termination(machine.grace_s)

    # -- state ----------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """Status that the job reports."""
        return self.channel.status

    @property
    def identity(self) -> Identity | None:
        """Identity of its process."""
        return None if self._process is None else self._process.identity

    @property
    def lives(self) -> bool:
        """True if it has a process."""
        return self.phase in ALIVE

    def _move_s(self, need_bytes: int) -> float:
        """Return the average time of one suspend and resume; see ``JobEntry.move_s``."""
        status = self.status
        if status.sleeps:
            return status.moving_s / status.sleeps
        return 2 * need_bytes / _EXPECTED_BYTES_PER_S

    @property
    def is_ending(self) -> bool:
        """True if it is to end and is not asleep."""
        return self.stopping and self.lives and self.phase is not JobPhase.ASLEEP

    @property
    def io_bytes(self) -> int:
        """Total bytes that its process has read and written."""
        return 0 if self._process is None else self._process.io_bytes()

    def entry(self, now: float, *, free_bytes: int) -> JobEntry:
        """Return the job as input of the policy.

        Args:
            now: Time in seconds.
            free_bytes: Memory for a job that runs alone, which a job of unknown need gets.
        """
        if self._waits_since is None:
            self._waits_since = now
        need_bytes = self._needs(free_bytes)
        return JobEntry(
            name=self.spec.name,
            phase=self.phase,
            need_bytes=need_bytes,
            held_bytes=self.held_bytes,
            rest_bytes=self._rest_bytes,
            fetch_bytes=self.channel.order.fetch_bytes if self.phase is JobPhase.ASLEEP else 0,
            device_bytes=self.spec.device_bytes,
            weight=self.spec.weight,
            priority=self.spec.priority,
            virtual_s=self.virtual_s,
            move_s=self._move_s(need_bytes),
            waited_s=now - self._waits_since,
            held_back=self.held_back,
            urgent=self.stopping,
            fixed=now < self._fixed_until or self._ending.has_begun,
        )

    def _needs(self, free_bytes: int) -> int:
        """Return the memory that it needs, with slack on measured memory if that fits."""
        if self._need_bytes is None:
            return free_bytes
        least = max(self.spec.memory_bytes or 0, self._peak_bytes)
        return max(least, min(self._need_bytes, free_bytes))

    # -- actions --------------------------------------------------------------------------------------

    def begin(self, command: Sequence[str], budget: JobsBudget) -> None:
        """Start its process within the budget. Raises JobError; the job has then ended."""
        lock = None
        try:
            lock = self.channel.lock_for_child()
            if lock is None:
                raise JobError(
                    "a process of an earlier run of this job still lives, and belongs to another owner"
                )
            self.channel.clear()
            self._log_begin = length_of(self.log)
            self._room = budget.room_for(self.spec.name)
            env = {**os.environ, **self.spec.env}
            if self._room is not None:
                command = self._room.inside(command, env)
            self._process = JobProcess.begin(
                command,
                cwd=self.spec.cwd,
                env=env,
                log=self.log,
                inherit=lock,
            )
        except (JobError, OSError) as error:
            self._end(f"failed: {error}")
            raise JobError(f"job {self.spec.name!r}: {error}") from error
        finally:
            if lock is not None:
                os.close(lock)
        self.phase = JobPhase.STARTING

    def sleep(self) -> None:
        """Tell it to sleep at the end of its step."""
        self.channel.want(sleep=True)
        self.phase = JobPhase.SUSPENDING

    def wake(self) -> None:
        """Tell it to wake."""
        self.channel.want(sleep=False)
        self.phase = JobPhase.WAKING

    def prefetch(self, nbytes: int) -> None:
        """Let it prefetch up to ``nbytes`` of its memory while it sleeps."""
        if self.phase is JobPhase.ASLEEP and self.channel.order.fetch_bytes != nbytes:
            self.channel.want(sleep=True, fetch_bytes=nbytes)

    def stop(self) -> None:
        """Begin to end it properly; ``observe`` does the rest."""
        if self.phase is JobPhase.WAITING:
            self._end("stopped before it started")
        self.stopping = True

    def kill(self) -> None:
        """Kill its processes."""
        if self._process is not None:
            self._process.kill_all()

    # -- observation ----------------------------------------------------------------------------------

    def observe(self, now: float, *, measure: bool, others_end: bool = False) -> None:
        """Poll its state, and act on it.

        Args:
            now: Time in seconds.
            measure: Measure its memory in any phase.
            others_end: Some jobs that are to end are not asleep.
        """
        if self._process is None:
            return
        before, status = self.phase, self.channel.look()
        if self._process.has_ended():
            self._ended()
            return
        self.phase = self._phase_of(status)
        if before is not self.phase and self.phase in (JobPhase.ASLEEP, JobPhase.AWAKE):
            measure = True
        if measure:
            self._rotate_log()
        if measure or self.phase is JobPhase.ASLEEP:
            self._measure()
        if self.phase in (JobPhase.AWAKE, JobPhase.SUSPENDING, JobPhase.STARTING):
            self._waits_since = now
        if (
            self.phase is JobPhase.AWAKE
            and status.refused
            and status.order == self.channel.order.number
        ):
            self._cannot_sleep(status.refused, now)
        if self.stopping:
            waits = self.phase is JobPhase.ASLEEP and others_end
            asleep = self.phase in (JobPhase.ASLEEP, JobPhase.SUSPENDING, JobPhase.WAKING)
            self._ending.proceed(self._process, now, asleep=asleep, waits=waits)

    def _rotate_log(self) -> None:
        if rotate(self.log, most_bytes=self._machine.log_bytes):
            self._log_begin = 0

    def _phase_of(self, status: Status) -> JobPhase:
        order = self.channel.order
        assert self._process is not None
        if status.pid != self._process.identity.pid or status.state == "starting":
            return JobPhase.STARTING
        followed = status.order >= order.number
        if order.sleep and not (followed and status.refused):
            return JobPhase.ASLEEP if status.state == "asleep" else JobPhase.SUSPENDING
        return JobPhase.AWAKE if status.state in ("awake", "over") else JobPhase.WAKING

    def _measure(self) -> None:
        assert self._process is not None
        self.held_bytes = self._process.held_bytes()
        if self._room is not None:  # then the kernel's memory for it counts too
            self.held_bytes = max(self.held_bytes, self._room.held_bytes())
            self._check_overrun()
        status = self.status
        if self.phase is JobPhase.ASLEEP:
            if not status.fetched_bytes and not self.channel.order.fetch_bytes:
                self._rest_bytes = self.held_bytes
        elif self.phase is JobPhase.AWAKE:
            self._peak_bytes = max(self._peak_bytes, self.held_bytes)
            self._update_need()

    def _update_need(self) -> None:
        needed = int(self._peak_bytes * _NEED_FACTOR)
        if self._need_bytes is None:
            if self.status.steps >= _STEPS:
                self._need_bytes = needed
                self.told = f"holds {format_bytes(self._peak_bytes)}, which is its need from now on"
            return
        if self._peak_bytes <= self._need_bytes + _TOLERANCE_BYTES:
            return
        declared, self._need_bytes = self._need_bytes, needed
        self.told = (
            f"holds {format_bytes(self._peak_bytes)}, more than its declared {format_bytes(declared)};"
            " its need is raised to that"
        )
        if self._peak_bytes > self._machine.memory_bytes:
            self.held_back = True
            self.told = (
                f"holds {format_bytes(self._peak_bytes)}, more than [machine] memory,"
                f" {format_bytes(self._machine.memory_bytes)}: it is suspended; stop it, or raise"
                " [machine] memory, start the manager again, and resume it"
            )

    def _cannot_sleep(self, why: str, now: float) -> None:
        self.told = f"could not be suspended and continues, so others wait: {why}"
        self._fixed_until = now + _RETRY_S
        self.channel.want(sleep=False)

    def _check_overrun(self) -> None:
        """Check whether the kernel has killed a process of the job."""
        if self._room is None or not self._room.was_overrun():
            return
        need = self.spec.memory_bytes
        declared = "not declared" if need is None else f"declared as {format_bytes(need)}"
        self.told = self._overrun = (
            f"the kernel has killed one of its processes at its limit of"
            f" {format_bytes(self._room.limit_bytes)}, which is what others leave of [machine] memory,"
            f" {format_bytes(self._machine.memory_bytes)}; its need is {declared}: set its `memory` to"
            " its peak, reduce its memory, or raise [machine] memory"
        )

    def _ended(self) -> None:
        assert self._process is not None
        code = self._process.code
        status = self.channel.look()  # its last status
        if code is None and status.pid == self._process.identity.pid:
            code = status.code
        if self.channel.has_process():
            end_holders(self.channel.path)
        self.code = code
        text = describe_end(code)
        lines = [] if code == 0 else last_lines(self.log, begin=self._log_begin)
        self._check_overrun()
        if self._overrun:
            text = f"{text.partition(',')[0]}: {self._overrun}"
        elif self.stopping:
            how = text.partition(",")[0]
            if (waited_s := self._ending.killed_after_s) is not None:
                how += f", as it did not end within {waited_s:g} s"
            text = f"stopped ({how})"
        elif lines:
            text += f"; its log ends: {' | '.join(lines)}"
        if code and not self.stopping and disk_is_full(self.log):
            text += f"; the disk of its log, {self.log!r}, is full"
        self._end(text)

    def _end(self, text: str) -> None:
        self.told = text
        self.phase = JobPhase.OVER
        self.held_bytes = 0
        self.note = ""
        if self.stopping or text.startswith("stopped"):
            self.outcome = "stopped"
        else:
            self.outcome = "done" if self.code == 0 else "failed"
        if self._process is not None:
            self._process.close()
        if self._room is not None:
            self._room.end()

    # -- record ---------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the record for ``adopt``."""
        identity = self.identity
        return {
            "name": self.spec.name,
            "phase": self.phase.value,
            "pid": 0 if identity is None else identity.pid,
            "start_ticks": 0 if identity is None else identity.start_ticks,
            "need_bytes": self._need_bytes,
            "rest_bytes": self._rest_bytes,
            "peak_bytes": self._peak_bytes,
            "virtual_s": self.virtual_s,
            "awake_s": self.awake_s,
            "held_back": self.held_back,
            "stopping": self.stopping,
            "outcome": self.outcome,
            "code": self.code,
            "told": self.told,
            "log_begin": self._log_begin,
        }

    def adopt(self, found: Mapping[str, Any]) -> None:
        """Take over the record of an earlier manager, and the process if it lives."""
        self.virtual_s = float(found["virtual_s"])
        self.awake_s = float(found["awake_s"])
        self.held_back = bool(found["held_back"])
        self.stopping = bool(found["stopping"])
        self._rest_bytes = int(found["rest_bytes"])
        self._log_begin = int(found["log_begin"])
        self._peak_bytes = int(found["peak_bytes"])
        if self._need_bytes is None and found["need_bytes"] is not None:
            self._need_bytes = int(found["need_bytes"])
        phase = JobPhase(found["phase"])
        if phase is JobPhase.OVER:
            self.phase, self.outcome, self.code = phase, str(found["outcome"]), found["code"]
            self.told = str(found["told"])
            return
        identity = self._last_process(Identity(int(found["pid"]), int(found["start_ticks"])))
        if not identity.pid:
            return  # it had not started
        pid = identity.pid
        self._process = JobProcess.find(identity)
        if self._process is not None:
            self.phase = JobPhase.STARTING
            self.told = f"found again, process {pid}"
            if self._need_bytes is not None:
                self._update_need()
            return
        self._kill_orphans()
        status = self.channel.look()  # again: it may have ended a moment ago
        if status.pid == pid and status.code is not None:
            self.code = status.code
            self._end(describe_end(self.code))
        elif self.spec.durable and not self.stopping:
            self.told = (
                f"its process {pid} has ended; being durable, it starts again from its saved state"
            )
        else:
            self._end(
                f"its process {pid} was killed, or the machine was restarted, while no manager was"
                " running"
            )

    def _last_process(self, recorded: Identity) -> Identity:
        """Return its last process, which may not have been recorded. Raises JobError."""
        status = self.channel.look()  # cleared before each start
        if not status.pid and not recorded.lives() and self.channel.has_process():
            status = self.channel.wait_for_pid()
        return Identity(status.pid, status.start_ticks) if status.pid else recorded

    @property
    def lives_unrecorded(self) -> bool:
        """True if an earlier manager has started it but not recorded that."""
        return Identity(self.status.pid, self.status.start_ticks).lives()

    def _kill_orphans(self) -> None:
        """Kill the processes that its ended process has left, which no budget would count."""
        end = time.monotonic() + _EXIT_LIMIT_S
        while self.channel.has_process() and time.monotonic() < end:
            end_holders(self.channel.path)
            time.sleep(_EXIT_LIMIT_S / 200)

    def found_in(self, budget: JobsBudget) -> None:
        """Find the control group of a job that an earlier manager has started."""
        if self.lives and self.identity is not None:
            self._room = budget.room_of(self.spec.name, self.identity.pid)

    def clear_earlier(self) -> None:
        """Clear the channel of an earlier run, if the job has not started."""
        if self.phase is JobPhase.WAITING and not self.channel.has_process():
            self.channel.clear()

    def report(self) -> dict[str, Any]:
        """Return the job's status, with the fields in the manual."""
        status, identity = self.status, self.identity
        lives = self.lives
        return {
            "name": self.spec.name,
            "phase": self.phase.value,
            "outcome": self.outcome,
            "exit_code": self.code,
            "pid": identity.pid if lives and identity is not None else None,
            "priority": self.spec.priority,
            "weight": self.spec.weight,
            "need_bytes": self._need_bytes,
            "held_bytes": self.held_bytes,
            "flash_bytes": status.flash_bytes if lives else 0,
            "fetched_bytes": status.fetched_bytes if lives else 0,
            "moved_bytes": status.moved_bytes,
            "moving_s": status.moving_s,
            "sleeps": status.sleeps,
            "steps": status.steps,
            "awake_s": self.awake_s,
            "held_back": self.held_back,
            "stopping": self.stopping and lives,
            "log": self.log,
            "told": self.told,
            "note": self.note,
        }

    def close(self) -> None:
        """Close its channel and process descriptor; the process continues."""
        if self._process is not None:
            self._process.close()
        self.channel.close()
