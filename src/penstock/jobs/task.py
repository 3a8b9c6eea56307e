"""One job in its manager's hands: from waiting to over."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.core.errors import JobError
from penstock.core.units import MIB, format_bytes
from penstock.jobs.budget import Budget
from penstock.jobs.description import JobSpec, Machine
from penstock.jobs.enclosure import Room
from penstock.jobs.ending import Ending
from penstock.jobs.logs import last_lines, length_of, no_room, turn_over
from penstock.jobs.policy import ALIVE, Entry, Phase
from penstock.jobs.processes import Identity, Process, describe_end, end_holders
from penstock.jobs.record import StateDirectory
from penstock.swap.channel import ManagerEnd, Status

_SLACK: Final = 1.05
"""What is measured is needed, and so much more."""
_OVER_BYTES: Final = 16 * MIB
"""So much above what was declared is no matter."""
_STEPS: Final = 2
"""After so many, what a job holds is what it needs."""
_TRY_AGAIN_S: Final = 30.0
"""For so long a job that could not sleep is not asked again."""
_EXPECTED_BYTES_PER_S: Final = 3e9
"""Until it has slept: so much of a job is expected to go, and to come back, in a second. Rather too much
than too little: then it sleeps once too early, and what that takes is known."""
_DYING_S: Final = 5.0
"""For so long is waited for processes that have been ended."""
_UNFINISHED: Final = "unfinished"


class Task:
    """A job, its process and its history. For one thread.

    Attributes:
        spec: As it was described.
        phase: Where it is, as last observed.
        held_bytes: DRAM that it holds, as last measured.
        virtual_s: See :mod:`.policy`.
        held_back: Whether somebody wants it to sleep.
        stopping: Whether it is to end.
        told: What happened to it last, in words.
        note: Why it waits, in words.
    """

    def __init__(self, spec: JobSpec, machine: Machine, state: StateDirectory) -> None:
        """Nothing begins. Raises JobError if its channel cannot be made."""
        self.spec = spec
        self.phase = Phase.WAITING
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
        self._process: Process | None = None
        self._room: Room | None = None
        self._overrun = ""
        self._need_bytes = spec.memory_bytes
        self._rest_bytes = machine.asleep_bytes
        self._peak_bytes = 0
        self._waits_since: float | None = None
        self._fixed_until = 0.0
        self._ending = Ending(machine.grace_s)

    # -- what it is -----------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """By its own account."""
        return self.channel.status

    @property
    def identity(self) -> Identity | None:
        """Its process."""
        return None if self._process is None else self._process.identity

    @property
    def lives(self) -> bool:
        """Whether it has a process."""
        return self.phase in ALIVE

    def _move_s(self, need_bytes: int) -> float:
        """What one sleep and the way back took on average; see ``Entry.move_s``."""
        status = self.status
        if status.sleeps:
            return status.moving_s / status.sleeps
        return 2 * need_bytes / _EXPECTED_BYTES_PER_S

    @property
    def is_ending(self) -> bool:
        """Whether it is to end, and can: it is awake, or about to be."""
        return self.stopping and self.lives and self.phase is not Phase.ASLEEP

    @property
    def io_bytes(self) -> int:
        """What its process has read and written, in all."""
        return 0 if self._process is None else self._process.io_bytes()

    def entry(self, now: float, *, free_bytes: int) -> Entry:
        """As the policy sees it.

        Args:
            now: Seconds.
            free_bytes: What there is for a job that runs alone; so much one of unknown need is given.
        """
        if self._waits_since is None:
            self._waits_since = now
        need_bytes = self._needs(free_bytes)
        return Entry(
            name=self.spec.name,
            phase=self.phase,
            need_bytes=need_bytes,
            held_bytes=self.held_bytes,
            rest_bytes=self._rest_bytes,
            fetch_bytes=self.channel.order.fetch_bytes if self.phase is Phase.ASLEEP else 0,
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
        """What it is to be given; the slack of what was measured only as far as there is room."""
        if self._need_bytes is None:
            return free_bytes
        least = max(self.spec.memory_bytes or 0, self._peak_bytes)
        return max(least, min(self._need_bytes, free_bytes))

    # -- what is done with it -------------------------------------------------------------------------

    def begin(self, command: Sequence[str], budget: Budget) -> None:
        """Start its process, as a part of the budget. Raises JobError; it is over then."""
        lock = None
        try:
            lock = self.channel.lock_for_child()
            if lock is None:
                raise JobError(
                    "a process of an earlier run of it lives still, and is not ours to end"
                )
            self.channel.clear()
            self._log_begin = length_of(self.log)
            self._room = budget.room_for(self.spec.name)
            env = {**os.environ, **self.spec.env}
            if self._room is not None:
                command = self._room.inside(command, env)
            self._process = Process.begin(
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
        self.phase = Phase.STARTING

    def sleep(self) -> None:
        """Have it sleep at the end of its step."""
        self.channel.want(sleep=True)
        self.phase = Phase.SUSPENDING

    def wake(self) -> None:
        """Have it go on."""
        self.channel.want(sleep=False)
        self.phase = Phase.WAKING

    def fetch(self, nbytes: int) -> None:
        """While it sleeps, let so much of its memory be back."""
        if self.phase is Phase.ASLEEP and self.channel.order.fetch_bytes != nbytes:
            self.channel.want(sleep=True, fetch_bytes=nbytes)

    def stop(self) -> None:
        """End it in order; ``observe`` does what there is to be done."""
        if self.phase is Phase.WAITING:
            self._end("stopped before it began")
        self.stopping = True

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill_all()

    # -- what becomes of it -------------------------------------------------------------------------

    def observe(self, now: float, *, measure: bool, others_end: bool = False) -> None:
        """Look how it is.

        Args:
            now: Seconds.
            measure: Whether its memory is measured too, in any case.
            others_end: Whether some that are to end are awake, or about to be.
        """
        if self._process is None:
            return
        before, status = self.phase, self.channel.look()
        if self._process.has_ended():
            self._ended()
            return
        self.phase = self._phase_of(status)
        if before is not self.phase and self.phase in (Phase.ASLEEP, Phase.AWAKE):
            measure = True
        if measure:
            self._turn_log()
        if measure or self.phase is Phase.ASLEEP:
            self._measure()
        if self.phase in (Phase.AWAKE, Phase.SUSPENDING, Phase.STARTING):
            self._waits_since = now
        if (
            self.phase is Phase.AWAKE
            and status.refused
            and status.order == self.channel.order.number
        ):
            self._cannot_sleep(status.refused, now)
        if self.stopping:
            waits = self.phase is Phase.ASLEEP and others_end
            asleep = self.phase in (Phase.ASLEEP, Phase.SUSPENDING, Phase.WAKING)
            self._ending.proceed(self._process, now, asleep=asleep, waits=waits)

    def _turn_log(self) -> None:
        if turn_over(self.log, most_bytes=self._machine.log_bytes):
            self._log_begin = 0

    def _phase_of(self, status: Status) -> Phase:
        order = self.channel.order
        assert self._process is not None
        if status.pid != self._process.identity.pid or status.state == "starting":
            return Phase.STARTING
        followed = status.order >= order.number
        if order.sleep and not (followed and status.refused):
            return Phase.ASLEEP if status.state == "asleep" else Phase.SUSPENDING
        return Phase.AWAKE if status.state in ("awake", "over") else Phase.WAKING

    def _measure(self) -> None:
        assert self._process is not None
        self.held_bytes = self._process.held_bytes()
        if self._room is not None:  # what the kernel holds for it counts too then
            self.held_bytes = max(self.held_bytes, self._room.held_bytes())
            self._look_for_overrun()
        status = self.status
        if self.phase is Phase.ASLEEP:
            if not status.fetched_bytes and not self.channel.order.fetch_bytes:
                self._rest_bytes = self.held_bytes
        elif self.phase is Phase.AWAKE:
            self._peak_bytes = max(self._peak_bytes, self.held_bytes)
            self._learn()

    def _learn(self) -> None:
        needed = int(self._peak_bytes * _SLACK)
        if self._need_bytes is None:
            if self.status.steps >= _STEPS:
                self._need_bytes = needed
                self.told = f"holds {format_bytes(self._peak_bytes)}: counted so from now on"
            return
        if self._peak_bytes <= self._need_bytes + _OVER_BYTES:
            return
        declared, self._need_bytes = self._need_bytes, needed
        self.told = (
            f"holds {format_bytes(self._peak_bytes)}, more than the {format_bytes(declared)} that it was"
            " to need: counted so from now on"
        )
        if self._peak_bytes > self._machine.memory_bytes:
            self.held_back = True
            self.told = (
                f"holds {format_bytes(self._peak_bytes)}, and [machine] memory is"
                f" {format_bytes(self._machine.memory_bytes)}: it is put to sleep and stays so; stop it,"
                " or give the machine more, start the manager again, and resume it"
            )

    def _cannot_sleep(self, why: str, now: float) -> None:
        self.told = f"could not be suspended, goes on, and others wait: {why}"
        self._fixed_until = now + _TRY_AGAIN_S
        self.channel.want(sleep=False)

    def _look_for_overrun(self) -> None:
        """See whether the kernel has ended a process of it."""
        if self._room is None or not self._room.was_overrun():
            return
        need = self.spec.memory_bytes
        declared = "not declared" if need is None else f"declared as {format_bytes(need)}"
        self.told = self._overrun = (
            f"the kernel has ended a process of it, for it held {format_bytes(self._room.limit_bytes)},"
            " all that others left it of [machine] memory,"
            f" {format_bytes(self._machine.memory_bytes)}; its need is {declared}: set its `memory` to"
            " what it holds at most, have it hold less, or give the machine more"
        )

    def _ended(self) -> None:
        assert self._process is not None
        code = self._process.code
        status = self.channel.look()  # the last that it said
        if code is None and status.pid == self._process.identity.pid:
            code = status.code
        if self.channel.has_process():
            end_holders(self.channel.path)
        self.code = code
        text = describe_end(code)
        lines = [] if code == 0 else last_lines(self.log, begin=self._log_begin)
        self._look_for_overrun()
        if self._overrun:
            text = f"{text.partition(',')[0]}: {self._overrun}"
        elif self.stopping:
            how = text.partition(",")[0]
            if (waited_s := self._ending.killed_after_s) is not None:
                how += f", for it did not end by itself in {waited_s:g} s"
            text = f"stopped ({how})"
        elif lines:
            text += f"; its log ends: {' | '.join(lines)}"
        if code and not self.stopping and no_room(self.log):
            text += f"; there is no space left for its log, {self.log!r}"
        self._end(text)

    def _end(self, text: str) -> None:
        self.told = text
        self.phase = Phase.OVER
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

    # -- what is kept of it ---------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """For ``adopt``."""
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
        """Take over what an earlier manager has recorded, and the process if it lives."""
        self.virtual_s = float(found["virtual_s"])
        self.awake_s = float(found["awake_s"])
        self.held_back = bool(found["held_back"])
        self.stopping = bool(found["stopping"])
        self._rest_bytes = int(found["rest_bytes"])
        self._log_begin = int(found["log_begin"])
        self._peak_bytes = int(found["peak_bytes"])
        if self._need_bytes is None and found["need_bytes"] is not None:
            self._need_bytes = int(found["need_bytes"])
        phase = Phase(found["phase"])
        if phase is Phase.OVER:
            self.phase, self.outcome, self.code = phase, str(found["outcome"]), found["code"]
            self.told = str(found["told"])
            return
        identity = self._last_begun(Identity(int(found["pid"]), int(found["start_ticks"])))
        if not identity.pid:
            return  # it had not begun
        pid = identity.pid
        self._process = Process.find(identity)
        if self._process is not None:
            self.phase = Phase.STARTING
            self.told = f"found again, process {pid}"
            if self._need_bytes is not None:
                self._learn()
            return
        self._end_left_behind()
        status = self.channel.look()  # once more: it may have ended a moment ago
        if status.pid == pid and status.code is not None:
            self.code = status.code
            self._end(describe_end(self.code))
        elif self.spec.durable and not self.stopping:
            self.told = (
                f"its process {pid} is gone; it is durable, and begins again from what was kept"
            )
        else:
            self._end(
                f"its process {pid} is gone: it was killed, or the machine was started anew, while no"
                " manager was there"
            )

    def _last_begun(self, recorded: Identity) -> Identity:
        """The process that was begun last: perhaps that was not recorded any more. Raises JobError."""
        status = self.channel.look()  # which is cleared before one is begun
        if not status.pid and not recorded.lives() and self.channel.has_process():
            status = self.channel.who()
        return Identity(status.pid, status.start_ticks) if status.pid else recorded

    @property
    def lives_unrecorded(self) -> bool:
        """Whether an earlier manager has begun it, and could not record that."""
        return Identity(self.status.pid, self.status.start_ticks).lives()

    def _end_left_behind(self) -> None:
        """Its process is gone. End what it has begun: it would be in nobody's budget."""
        end = time.monotonic() + _DYING_S
        while self.channel.has_process() and time.monotonic() < end:
            end_holders(self.channel.path)
            time.sleep(_DYING_S / 200)

    def found_in(self, budget: Budget) -> None:
        """An earlier manager has begun it: perhaps where the kernel keeps the budget."""
        if self.lives and self.identity is not None:
            self._room = budget.room_of(self.spec.name, self.identity.pid)

    def forget_earlier(self) -> None:
        """If it has not begun: what an earlier run of it has left in the channel is not its own."""
        if self.phase is Phase.WAITING and not self.channel.has_process():
            self.channel.clear()

    def report(self) -> dict[str, Any]:
        """For people and programs; the manual has the fields."""
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
        """Let go of it; its process goes on."""
        if self._process is not None:
            self._process.close()
        self.channel.close()
