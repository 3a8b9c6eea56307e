"""Plain steps and steps under a plan, in turns in one process; and what a replay says of the latter.

The question is whether the replay is right, given what the machine is at the moment, and not what it
will be tomorrow: what the network computes, and what flash moves, are measured between the very steps
that are predicted. In every round

1. a step without a session is timed, after one that is not: what the other kind has left is gone then;
2. some bytes are written to flash and read back, through the session's own tier;
3. a step under the plan is timed, after one that is not.

Of either kind the quicker ones count (``quick``).

The profile is of a step that kept everything. Its forward and its backward are stretched to what those
of the plain steps took, and to what hooks cost that keep everything, which is measured before in the same
way. The plan is replayed on that. Flash is as fast as the machine file says it is beside computing, or as
the rounds' transfers, which run alone, if these are slower. What lies outside (the optimizer's step, a
forward's begin before it saves anything) is as in the plain step.

The peak is that of the replay, and the two pages of 2 MiB that restored tensors may not fill (a session
leaves as much out of what it plans with). It is looked at in steps that are not timed: pages that
restored tensors have left idle, which count until somebody needs them, are given back before each. Else
it is the budget, whatever a step needs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

import penstock
from penstock.api import Session
from penstock.core.config import OffloadConfig
from penstock.core.units import GIB, MIB
from penstock.lab import zoo
from penstock.observe.recorder import Stage
from penstock.plan import Budgets, Machine, Plan, Profile, policies
from penstock.plan.replay import Replayed, replay
from penstock.plan.slots import MatchKey
from penstock.runtime import probe
from penstock.runtime.movers import page_slack_bytes
from penstock.store import ThrottledTier
from penstock.store.arena import Arena

FLASH_BYTES = 8 * GIB
PROFILES = 8
WARM_UP = 4
"""Steps under a plan before any is timed: pages are touched, reads that came late begin earlier."""
PROBE_BYTES = 32 * MIB
PEAK_STEPS = 3


class Times(NamedTuple):
    """Seconds of one step."""

    forward: float
    backward: float
    whole: float


@dataclass(frozen=True)
class Job:
    """A network in training, and how much of what it saves may stay."""

    network: str
    batch: int
    overrides: dict[str, Any] = field(default_factory=dict)
    budget_share: float = 0.5
    """Of what autograd saves; more, if that cannot be."""


@dataclass
class Training:
    """One step at a time."""

    job: Job

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.network = zoo.build(self.job.network, **self.job.overrides)
        self.batch = zoo.example_batch(self.network, self.job.batch)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-4)

    def step(self) -> Times:
        """Train."""
        start = time.perf_counter()
        loss = self.network(self.batch.inputs, self.batch.targets)
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Times(middle - start, end - middle, time.perf_counter() - start)


@dataclass(frozen=True)
class Profiled:
    """A profile, and what the step took that it is of."""

    profile: Profile
    times: Times
    hooks: float = 1.0
    """A step whose tensors are kept by a session, over one without."""


@dataclass(frozen=True)
class Flash:
    """What flash is made to be, as a share of what it is: bytes per second, or None for all of it."""

    bytes_per_s: float | None = None

    def wrap(self) -> Callable[..., Any] | None:
        """What makes a tier as slow."""
        if self.bytes_per_s is None:
            return None
        rate = int(self.bytes_per_s)
        return partial(ThrottledTier, write_bytes_per_s=rate, read_bytes_per_s=rate)

    def machine(self, machine: Machine) -> Machine:
        """The machine with flash as slow; it disturbs computing the less."""
        if self.bytes_per_s is None:
            return machine
        rate = self.bytes_per_s
        return replace(
            machine,
            interference=machine.interference * min(1.0, rate / machine.flash_read_bytes_per_s),
            flash_write_bytes_per_s=min(machine.flash_write_bytes_per_s, rate),
            flash_read_bytes_per_s=min(machine.flash_read_bytes_per_s, rate),
            flash_shared=False,
        )


@dataclass
class Rounds:
    """What the rounds gave."""

    plain: list[Times] = field(default_factory=list)
    planned: list[Times] = field(default_factory=list)
    writes: list[float] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    written_bytes: int = 0
    """Of a step."""
    read_bytes: int = 0
    evicted: int = 0
    """In all rounds: what a plan keeps had to go, for there was no room."""
    peak_bytes: int = 0
    page_slack_bytes: int = 0
    """What restored tensors take beside their bytes, in pages that are not full; as sessions plan."""
    plan: Plan | None = None
    """In the end: reads may begin earlier than in the one that was given."""


def profile_of(training: Training, directory: str) -> Profiled:
    """Of a step that keeps everything; a quick one."""
    found = []
    for _ in range(PROFILES):
        with penstock.offload(training.network, training.optimizer, policy="keep") as session:
            times = training.step()
            assert session.profile is not None
            found.append(Profiled(session.profile, times))
    one = sorted(found, key=lambda one: one.times.whole)[PROFILES // 4]
    held = _held(training, directory)
    slots = tuple(
        replace(slot, held_elsewhere=slot.key.match_key in held) for slot in one.profile.slots
    )
    return replace(one, profile=replace(one.profile, slots=slots), hooks=_hooks(training))


def _held(training: Training, directory: str) -> set[MatchKey]:
    """What the program itself still holds when it is needed, as its batch: only moving it shows that."""
    with penstock.offload(
        training.network, training.optimizer, policy="all", device_memory="64GiB", flash=directory
    ) as session:
        training.step()
        assert session.profile is not None
        return {slot.key.match_key for slot in session.profile.slots if slot.held_elsewhere}


def _hooks(training: Training) -> float:
    kept, plain = [], []
    with penstock.offload(training.network, training.optimizer, policy="keep") as session:
        for _ in range(WARM_UP):
            training.step()
        for _ in range(PROFILES):
            kept.append(training.step())
            with session.paused():
                plain.append(training.step())
    return max(1.0, quick(kept).whole / quick(plain).whole)


def run(
    training: Training,
    plan: Plan,
    machine: Machine,
    flash: Flash,
    *,
    device_bytes: int,
    directory: str,
    rounds: int,
) -> Rounds:
    """Train under a plan, with plain steps in between, within ``device_bytes``."""
    config = OffloadConfig.from_mapping(
        {
            "device_memory": device_bytes,
            "flash": directory,
            "flash_capacity": FLASH_BYTES,
            "policy": plan.policy,
            "codec": "none",
        },
        source="benchmark",
    )
    session = Session(
        config,
        model=training.network,
        optimizer=training.optimizer,
        machine=flash.machine(machine),
        wrap_tier=flash.wrap(),
        plan=plan,
    )
    found = Rounds(page_slack_bytes=page_slack_bytes(device_bytes))
    with session:
        for _ in range(WARM_UP):
            training.step()
        evicted = session.recorder.snapshot().counted("evicted")
        for _ in range(rounds):
            _round(training, session, found)
        found.evicted = session.recorder.snapshot().counted("evicted") - evicted
        session._stores.mover.trim(device_bytes)
        session.budget.reset_peak()
        for _ in range(PEAK_STEPS):
            training.step()
            session._stores.mover.trim(device_bytes)
        found.peak_bytes = session.budget.peak_bytes
        found.plan = session.plan
    return found


_lent = Arena(PROBE_BYTES)


@contextmanager
def _lend(nbytes: int) -> Iterator[int]:
    """The same memory every time: what is mapped anew is slow to touch."""
    block = _lent.allocate(nbytes)
    assert block is not None
    try:
        yield block.address
    finally:
        block.free()


def _round(training: Training, session: Session, found: Rounds) -> None:
    with session.paused():
        training.step()
        found.plain.append(training.step())
    tier = session._stores.tiers["flash"]
    speeds = probe.measure(
        {"flash": getattr(tier, "inner", tier)}, probe_bytes=PROBE_BYTES, lend=_lend
    )
    found.writes.append(speeds.flash_write_bytes_per_s)
    found.reads.append(speeds.flash_read_bytes_per_s)
    training.step()
    before = session.recorder.snapshot()
    found.planned.append(training.step())
    after = session.recorder.snapshot()
    found.stall_s.append((after.stall_ns - before.stall_ns) / 1e9)
    found.written_bytes, found.read_bytes = (
        after.flow(stage, "flash").nbytes - before.flow(stage, "flash").nbytes
        for stage in (Stage.WRITE, Stage.READ)
    )


def quick(times: list[Times]) -> Times:
    """Of each part, what a quarter of the steps do not take: what else a machine does only adds."""
    return Times(*(sorted(column)[len(column) // 4] for column in zip(*times, strict=True)))


def stretched(profiled: Profiled, plain: Times) -> Profile:
    """The profile, with forward and backward as long as in the plain steps."""
    profile, was, hooks = profiled.profile, profiled.times, profiled.hooks
    forward = hooks * plain.forward / was.forward
    backward = hooks * plain.backward / was.backward
    (only,) = profile.passes
    start, middle = only.start_ns, only.backward_start_ns

    def at(when: int) -> int:
        if when <= middle:
            return start + round((when - start) * forward)
        return start + round((middle - start) * forward) + round((when - middle) * backward)

    slots = tuple(
        replace(
            each,
            saved_at_ns=at(each.saved_at_ns),
            needed_at_ns=None if each.needed_at_ns is None else at(each.needed_at_ns),
        )
        for each in profile.slots
    )
    operators = tuple(
        replace(each, start_ns=at(each.start_ns), end_ns=at(each.end_ns))
        for each in profile.operators
    )
    pass_ = replace(only, backward_start_ns=at(middle), end_ns=at(only.end_ns))
    return replace(profile, slots=slots, operators=operators, passes=(pass_,))


@dataclass(frozen=True)
class Predicted:
    """A replay with the speeds of the rounds."""

    replayed: Replayed
    step_s: float
    hooks_s: float
    peak_bytes: int


def predict(profiled: Profiled, machine: Machine, flash: Flash, found: Rounds) -> Predicted:
    """Replay the plan with what the rounds found the network and flash to be."""
    assert found.plan is not None
    plain = quick(found.plain)
    here = flash.machine(
        replace(
            machine,
            flash_write_bytes_per_s=min(
                machine.flash_write_bytes_per_s, statistics.median(found.writes)
            ),
            flash_read_bytes_per_s=min(
                machine.flash_read_bytes_per_s, statistics.median(found.reads)
            ),
        )
    )
    replayed = replay(stretched(profiled, plain), found.plan, here)
    added_s = (replayed.step_ns - replayed.ideal_ns) / 1e9
    return Predicted(
        replayed,
        plain.whole * profiled.hooks + added_s,
        hooks_s=plain.whole * (profiled.hooks - 1),
        peak_bytes=replayed.peak_bytes
        + (found.page_slack_bytes if replayed.flash.read_bytes else 0),
    )


def compare(predicted: Predicted, found: Rounds) -> dict[str, Any]:
    """Figures, for a result file."""
    plain, planned, paper = quick(found.plain), quick(found.planned), predicted.replayed
    return {
        "plain_step_s": round(plain.whole, 5),
        "predicted_step_s": round(predicted.step_s, 5),
        "measured_step_s": round(planned.whole, 5),
        "step_error": round(predicted.step_s / planned.whole - 1, 4),
        "predicted_peak_bytes": predicted.peak_bytes,
        "predicted_slots_peak_bytes": paper.peak_bytes,
        "measured_peak_bytes": found.peak_bytes,
        "peak_error": round(predicted.peak_bytes / found.peak_bytes - 1, 4),
        "predicted_written_bytes": paper.flash.written_bytes,
        "measured_written_bytes": found.written_bytes,
        "predicted_read_bytes": paper.flash.read_bytes,
        "measured_read_bytes": found.read_bytes,
        "predicted_stall_s": round(paper.stall_ns / 1e9, 5),
        "measured_stall_s": round(statistics.median(found.stall_s), 5),
        "hooks_s": round(predicted.hooks_s, 5),
        "predicted_interference_s": round(paper.interference_ns / 1e9, 5),
        "predicted_recompute_s": round(paper.recompute_ns / 1e9, 5),
        "flash_write_bytes_per_s": round(statistics.median(found.writes)),
        "flash_read_bytes_per_s": round(statistics.median(found.reads)),
        "evicted": found.evicted,
        "plain_times_s": [round(one.whole, 4) for one in found.plain],
        "planned_times_s": [round(one.whole, 4) for one in found.planned],
        "plain_forward_backward_s": [round(plain.forward, 5), round(plain.backward, 5)],
        "planned_forward_backward_s": [round(planned.forward, 5), round(planned.backward, 5)],
    }


def show(what: str, one: dict[str, Any]) -> None:
    """In a line or two."""
    print(
        f"{what}: {one['measured_written_bytes'] / MIB:.0f} MiB written"
        f" ({one['predicted_written_bytes'] / MIB:.0f} predicted), plain {one['plain_step_s']:.3f} s;"
        f" step predicted {one['predicted_step_s']:.3f} s, measured {one['measured_step_s']:.3f} s"
        f" ({one['step_error']:+.1%}); stalls {one['predicted_stall_s']:.3f} and"
        f" {one['measured_stall_s']:.3f} s, interference {one['predicted_interference_s']:.3f}; peak"
        f" {one['predicted_peak_bytes'] / MIB:.0f} and {one['measured_peak_bytes'] / MIB:.0f} MiB"
        f" ({one['peak_error']:+.1%}); {one['evicted']} evicted",
        flush=True,
    )


def budgets_for(job: Job, profile: Profile, machine: Machine) -> tuple[int, Budgets]:
    """What a session is given, and what of it a plan is made for, as a session does it.

    It is the share of the job; a quarter more than is just enough, where that is more.
    """
    nothing = Budgets(0, 0, FLASH_BYTES)
    least = replay(profile, policies.get("all")(profile, machine, nothing), machine).peak_bytes
    device_bytes = max(int(profile.peak_saved_bytes * job.budget_share), least * 5 // 4)
    planned = device_bytes - page_slack_bytes(device_bytes)
    return device_bytes, Budgets(planned, 0, FLASH_BYTES)


def needed(profile: Profile, moved_bytes: int) -> float:
    """Bytes per second each way with which so much would just hide behind the network."""
    forward_ns = sum(one.backward_start_ns - one.start_ns for one in profile.passes)
    backward_ns = sum(one.end_ns - one.backward_start_ns for one in profile.passes)
    return moved_bytes * 1e9 / min(forward_ns, backward_ns)
