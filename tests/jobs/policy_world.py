"""Jobs and a machine without processes: what the policy decides is done in so many ticks."""

from dataclasses import dataclass, replace

from penstock.jobs.policy import JobEntry as Seen
from penstock.jobs.policy import JobPhase, Limits, PolicyTurn, decide, virtual_start

TICK_S = 0.25
MOVING = (JobPhase.STARTING, JobPhase.SUSPENDING, JobPhase.WAKING)


@dataclass
class Job:
    entry: Seen
    left_s: float = 1e9
    moves_for: int = 0
    """Ticks until it is where it is going to."""
    awake_s: float = 0.0
    turns: int = 0
    longest_wait_s: float = 0.0
    able: bool = False
    """It has begun, or may."""

    @property
    def name(self):
        return self.entry.name

    def set(self, **changes):
        self.entry = replace(self.entry, **changes)


class World:
    def __init__(self, limits, jobs, *, ticks_to_move=1):
        self.limits = limits
        self.idle_s = 0.0  # nobody computes
        self.jobs = {each.name: each for each in jobs}
        self.ticks_to_move = ticks_to_move
        self.turn = PolicyTurn()
        self.decision = None

    @property
    def entries(self):
        return [each.entry for each in self.jobs.values()]

    @property
    def charged_bytes(self):
        return sum(each.charge_bytes for each in self.entries)

    @property
    def awake(self):
        return {each.name for each in self.entries if each.phase is JobPhase.AWAKE}

    def add(self, job):
        job.set(virtual_s=virtual_start(self.entries))
        self.jobs[job.name] = job

    def tick(self):
        self.idle_s += 0.0 if self.awake else TICK_S
        for job in self.jobs.values():
            self._pass_time(job)
        chosen = [self.jobs[name].entry.phase for name in self.turn.chosen]
        if all(phase is JobPhase.AWAKE for phase in chosen):
            self.turn = replace(self.turn, spent_s=self.turn.spent_s + TICK_S)
        self.decision = decide(self.entries, self.turn, self.limits)
        self.turn = self.decision.turn
        for name in self.decision.sleep:
            assert self.jobs[name].entry.phase is JobPhase.AWAKE
            self._move(name, JobPhase.SUSPENDING)
        for name in self.decision.wake:
            job = self.jobs[name]
            waking = JobPhase.STARTING if job.entry.phase is JobPhase.WAITING else JobPhase.WAKING
            assert job.entry.phase in (JobPhase.WAITING, JobPhase.ASLEEP)
            self._move(name, waking)

    def _move(self, name, phase):
        job = self.jobs[name]
        job.turns += phase is not JobPhase.SUSPENDING
        job.moves_for = self.ticks_to_move
        job.set(phase=phase, held_bytes=job.entry.need_bytes)

    def _pass_time(self, job):
        entry = job.entry
        if entry.phase in MOVING:
            job.moves_for -= 1
            if job.moves_for <= 0:
                sleeps = entry.phase is JobPhase.SUSPENDING
                job.set(
                    phase=JobPhase.ASLEEP if sleeps else JobPhase.AWAKE,
                    held_bytes=entry.rest_bytes if sleeps else entry.need_bytes,
                )
        elif entry.phase is JobPhase.AWAKE:
            job.awake_s += TICK_S
            job.left_s -= TICK_S
            job.set(virtual_s=entry.virtual_s + TICK_S / entry.weight, waited_s=0.0)
            if job.left_s <= 0:
                self.end(job.name)
        elif entry.phase is not JobPhase.OVER:
            job.set(waited_s=entry.waited_s + TICK_S)
            job.longest_wait_s = max(job.longest_wait_s, entry.waited_s + TICK_S)

    def end(self, name):
        self.jobs[name].set(phase=JobPhase.OVER, held_bytes=0)


def job(name, need=60, *, rest=0, left_s=1e9, **how):
    how.setdefault("phase", JobPhase.WAITING)
    return Job(Seen(name=name, need_bytes=need, rest_bytes=rest, **how), left_s=left_s)


def limits(memory=100, *, slice_s=2.0, patience_s=60.0, flash=10**6, device=None):
    return Limits(
        memory_bytes=memory,
        slice_s=slice_s,
        patience_s=patience_s,
        flash_bytes=flash,
        device_bytes=device,
    )
