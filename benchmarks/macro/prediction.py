"""What a replay says that a step will cost, beside what it costs: step time and peak memory.

For each network of the zoo, small enough for this machine, after some steps to warm up:

1. Sessions that keep everything take a profile each; the one of median time counts.
2. A plan is made from that profile for a budget, and replayed on this machine as ``penstock bench
   machine`` measures it, with flash as it is and slowed down to a share of what the step needs
   (``ThrottledTier``). The predicted step is the plain one and what the replay adds to it.
3. A session trains under that plan. The median of some steps, and the most that
   was taken from the budget meanwhile, are compared with the prediction.

Plain steps and steps of the session take turns, and the prediction is made for the plain step of the same
turns: a drifting machine drifts for both. Each is timed after one of its kind that is not, for what the
other has left in memory is gone then. Pages that restored tensors have left idle, which count until
somebody needs them, are given back before each step: else the peak is the budget, whatever a step needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as `penstock run` does

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
import penstock
from penstock import zoo
from penstock.api import Session
from penstock.cli import bench_machine
from penstock.core.config import OffloadConfig
from penstock.core.units import GIB, MIB
from penstock.plan import Budgets, Machine, Plan, Profile, policies
from penstock.plan.replay import Replayed, replay
from penstock.tier import ThrottledTier

NAME = Path(__file__).stem
TARGET = 0.1
FLASH_BYTES = 8 * GIB
PROFILES = 5
PROFILED_STEPS = 3
"""Of every session, before any is timed: profile, plan, and the steady state."""


@dataclass(frozen=True)
class Job:
    network: str
    batch: int
    overrides: dict[str, Any] = field(default_factory=dict)
    budget_share: float = 0.5
    """Of what autograd saves; more, if that cannot be."""


JOBS = {
    "alexnet": Job("alexnet", 16),
    "vgg16": Job("vgg16", 8, {"image_size": 128}),
    "googlenet": Job("googlenet", 8, {"image_size": 128}),
    "resnet18": Job("resnet18", 16, {"image_size": 128}),
    "resnet50": Job("resnet50", 8, {"image_size": 128}, 0.3),
    "densenet121": Job("densenet121", 8, {"image_size": 128}, 0.3),
    "gpt2": Job("gpt2", 2, {"sequence_length": 128, "dropout": 0.0}, 0.4),
    "bert-base": Job("bert-base", 4, {"sequence_length": 128}, 0.4),
}
CASES = (("auto", None), ("auto", 0.5), ("all", None), ("all", 1.0))
"""(policy, bandwidth of flash as a share of what the plan needs; None: as it is)."""


@dataclass
class Training:
    """A network in training, one step at a time."""

    job: Job

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.network = zoo.build(self.job.network, **self.job.overrides)
        self.batch = zoo.example_batch(self.network, self.job.batch)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-4)

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.network(self.batch.inputs, self.batch.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def main() -> None:
    args = parse()
    _results.warn_if_busy()
    if args.machine:
        machine = Machine.load(args.machine)
    else:
        machine = bench_machine.measure(args.dir, seconds=10.0, file_bytes=GIB)
    earlier = _results.RESULTS / f"{NAME}.json"
    found = json.loads(earlier.read_text())["figures"]["networks"] if earlier.exists() else {}
    for name in args.networks:
        found[name] = predict(JOBS[name], machine, args)
        show(name, found[name])
        sys.stdout.flush()
    errors = [abs(one["step_error"]) for cases in found.values() for one in cases.values()]
    print(f"worst step error {max(errors):.1%}, median {statistics.median(errors):.1%}")
    if not args.quick:
        figures = {"networks": found, "target": TARGET, "worst_step_error": max(errors)}
        config = {
            "steps": args.steps,
            "threads": torch.get_num_threads(),
            "machine": asdict(replace(machine, name="this machine")),
        }
        path = _results.write(NAME, figures, config, directory=args.dir)
        print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--machine", help="machine file; measured if not given")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--quick", action="store_true", help="two steps each; no result")
    args = parser.parse_args()
    if args.quick:
        args.steps = 2
    return args


def predict(job: Job, machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    training = Training(job)
    for _ in range(2):
        training.step()
    profile = profile_of(training)
    budget = max(int(profile.peak_saved_bytes * job.budget_share), least(profile, machine))
    cases = {}
    for policy, share in CASES:
        plan = policies.get(policy)(profile, machine, Budgets(budget, 0, FLASH_BYTES))
        case = machine if share is None else slower(machine, needed(profile, plan), share)
        plan = policies.get(policy)(profile, case, Budgets(budget, 0, FLASH_BYTES))
        predicted = replay(profile, plan, case)
        wrap = None if share is None else throttle(case)
        measured = train(training, plan, case, wrap=wrap, args=args)
        name = policy if share is None else f"{policy}, flash at {share} of the need"
        cases[name] = compare(job, budget, predicted, measured)
    return cases


def profile_of(training: Training) -> Profile:
    """Of a step that keeps everything, of median time."""
    found = []
    for _ in range(PROFILES):
        with penstock.offload(training.network, training.optimizer, policy="keep") as session:
            training.step()
            found.append(session.profile)
    return sorted(found, key=lambda one: one.passes[-1].end_ns - one.passes[0].start_ns)[
        PROFILES // 2
    ]


def least(profile: Profile, machine: Machine) -> int:
    """A budget that is just enough, and a quarter more: some tensors are a large part of everything."""
    everything = policies.get("all")(profile, machine, Budgets(0, 0, FLASH_BYTES))
    return replay(profile, everything, machine).peak_bytes * 5 // 4


def needed(profile: Profile, plan: Plan) -> float:
    """Bytes per second each way with which what the plan moves would just hide behind the network."""
    moved = plan.offloaded_bytes
    forward_ns = sum(one.backward_start_ns - one.start_ns for one in profile.passes)
    backward_ns = sum(one.end_ns - one.backward_start_ns for one in profile.passes)
    return moved * 1e9 / min(forward_ns, backward_ns)


def slower(machine: Machine, need_bytes_per_s: float, share: float) -> Machine:
    """The machine with flash at a share of the need; it disturbs computing the less, the slower it is."""
    rate = float(round(need_bytes_per_s * share))
    return replace(
        machine,
        interference=machine.interference * min(1.0, rate / machine.flash_read_bytes_per_s),
        flash_write_bytes_per_s=min(machine.flash_write_bytes_per_s, rate),
        flash_read_bytes_per_s=min(machine.flash_read_bytes_per_s, rate),
        flash_shared=False,
    )


def throttle(machine: Machine) -> Any:
    return partial(
        ThrottledTier,
        write_bytes_per_s=int(machine.flash_write_bytes_per_s),
        read_bytes_per_s=int(machine.flash_read_bytes_per_s),
    )


def train(
    training: Training, plan: Plan, machine: Machine, *, wrap: Any, args: argparse.Namespace
) -> dict[str, Any]:
    config = OffloadConfig.from_mapping(
        {
            "device_memory": plan.budgets.device_bytes,
            "flash": args.dir,
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
        machine=machine,
        wrap_tier=wrap,
        plan=plan,
    )
    plain, offloaded = [], []
    with session:
        for _ in range(PROFILED_STEPS):
            training.step()
        session._stores.mover.trim(plan.budgets.device_bytes)
        session.budget.reset_peak()
        before = session.recorder.snapshot()
        for _ in range(args.steps):
            with session.paused():
                training.step()
                plain.append(training.step())
            for times in ([], offloaded):
                session._stores.mover.trim(plan.budgets.device_bytes)
                times.append(training.step())
        after = session.recorder.snapshot()
        return {
            "plain_s": statistics.median(plain),
            "step_s": statistics.median(offloaded),
            "times_s": offloaded,
            "peak_bytes": session.budget.peak_bytes,
            "stall_s": (after.stall_ns - before.stall_ns) / 1e9 / (2 * args.steps),
            "offloaded_bytes": session.plan.offloaded_bytes,
        }


def compare(job: Job, budget: int, predicted: Replayed, measured: dict[str, Any]) -> dict[str, Any]:
    step_s = measured["plain_s"] + (predicted.step_ns - predicted.ideal_ns) / 1e9
    return {
        "network": job.network,
        "batch": job.batch,
        "overrides": job.overrides,
        "budget_bytes": budget,
        "offloaded_bytes": measured["offloaded_bytes"],
        "plain_step_s": measured["plain_s"],
        "predicted_step_s": step_s,
        "measured_step_s": measured["step_s"],
        "step_error": step_s / measured["step_s"] - 1,
        "predicted_peak_bytes": predicted.peak_bytes,
        "measured_peak_bytes": measured["peak_bytes"],
        "peak_error": predicted.peak_bytes / measured["peak_bytes"] - 1,
        "predicted": {
            "stall_s": predicted.stall_ns / 1e9,
            "budget_s": predicted.budget_ns / 1e9,
            "demand_s": predicted.demand_ns / 1e9,
            "late_s": predicted.late_ns / 1e9,
            "interference_s": predicted.interference_ns / 1e9,
            "ideal_s": predicted.ideal_ns / 1e9,
        },
        "measured_stall_s": measured["stall_s"],
        "measured_step_times_s": [round(each, 4) for each in measured["times_s"]],
    }


def show(name: str, cases: dict[str, Any]) -> None:
    for case, one in cases.items():
        print(
            f"{name}, {case}: {one['offloaded_bytes'] / MIB:.0f} MiB offloaded, plain"
            f" {one['plain_step_s']:.3f} s; step predicted {one['predicted_step_s']:.3f} s, measured"
            f" {one['measured_step_s']:.3f} s ({one['step_error']:+.1%}); stalls"
            f" {one['predicted']['stall_s']:.3f} and {one['measured_stall_s']:.3f} s; peak"
            f" {one['predicted_peak_bytes'] / MIB:.0f} and {one['measured_peak_bytes'] / MIB:.0f} MiB"
            f" ({one['peak_error']:+.1%})"
        )


if __name__ == "__main__":
    main()
