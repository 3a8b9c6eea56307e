"""What a replay says that a step will cost, beside what it costs: step time, peak memory, bytes.

For each network of the zoo, small enough for this machine, two policies (`auto`, and `all`, which moves
everything) train with flash as it is and slowed down to a share of what the plan needs. Plain steps,
steps under the plan, and transfers to measure flash take turns (:mod:`._paired`), and the replay is asked
with what these found. By how much computing is slower while bytes move is measured before, as ``penstock
bench machine`` does it, with one network for all: nothing is fitted to the network that is predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _memory

if __name__ == "__main__":
    _memory.keep_what_is_freed()

import _paired
import torch
from _paired import Flash, Job, Training

import _results
from penstock.cli import bench_machine
from penstock.core.units import GIB
from penstock.plan import Machine, policies

NAME = Path(__file__).stem
TARGET = 0.1
TABLE = _results.ROOT / "docs" / "prediction_table.md"
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


def main() -> None:
    args = parse()
    if args.table:
        write_table(json.loads((_results.RESULTS / f"{NAME}.json").read_text())["figures"])
        return
    _results.warn_if_busy()
    machine = machine_for(args)
    earlier = _results.RESULTS / f"{NAME}.json"
    found = json.loads(earlier.read_text())["figures"]["networks"] if earlier.exists() else {}
    for name in args.networks:
        found[name] = predict(JOBS[name], machine, args)
        if not args.quick:
            store(found, machine, args)
    print(summary([found[name] for name in args.networks]))


def store(found: dict[str, Any], machine: Machine, args: argparse.Namespace) -> None:
    """After each network: the last may take long."""
    figures = {"networks": found, "target": TARGET, **summary(list(found.values()))}
    config = {
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "memory": _memory.KEEPS,
        "machine": asdict(replace(machine, name="this machine")),
    }
    _results.write(NAME, figures, config, directory=args.dir)
    write_table(figures)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--table", action="store_true", help="only write the table in docs again")
    add_common(parser, rounds=6)
    args = parser.parse_args()
    if args.quick:
        args.rounds = 2
    return args


def add_common(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """Options that every benchmark of predictions has."""
    parser.add_argument("--rounds", type=int, default=rounds, help="plain and planned, in turns")
    parser.add_argument("--machine", help="machine file; measured if not given")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--quick", action="store_true", help="few rounds; no result")


def machine_for(args: argparse.Namespace) -> Machine:
    """The file's, or measured now."""
    if args.machine:
        return Machine.load(args.machine)
    return bench_machine.measure(args.dir, seconds=10.0, file_bytes=GIB)


def predict(job: Job, machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    training = Training(job)
    for _ in range(2):
        training.step()
    profiled = _paired.profile_of(training)
    profile = profiled.profile
    device_bytes, budgets = _paired.budgets_for(job, profile, machine)
    cases: dict[str, Any] = {}
    for policy, share in CASES:
        plan = policies.get(policy)(profile, machine, budgets)
        flash = Flash()
        if share is not None:
            flash = Flash(_paired.needed(profile, plan.offloaded_bytes) * share)
            plan = policies.get(policy)(profile, flash.machine(machine), budgets)
        found = _paired.run(
            training,
            plan,
            machine,
            flash,
            device_bytes=device_bytes,
            directory=args.dir,
            rounds=args.rounds,
        )
        predicted = _paired.predict(profiled, machine, flash, found)
        name = policy if share is None else f"{policy}, flash at {share} of the need"
        cases[name] = _paired.compare(predicted, found)
        _paired.show(f"{job.network}, {name}", cases[name])
    return {
        "network": job.network,
        "batch": job.batch,
        "overrides": job.overrides,
        "budget_bytes": device_bytes,
        "cases": cases,
    }


def summary(networks: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst and median errors, without their signs."""
    cases = [one for network in networks for one in network["cases"].values()]
    steps, peaks = ([abs(one[name]) for one in cases] for name in ("step_error", "peak_error"))
    return {
        "cases": len(cases),
        "worst_step_error": max(steps),
        "median_step_error": round(statistics.median(steps), 4),
        "steps_within_target": sum(error <= TARGET for error in steps),
        "worst_peak_error": max(peaks),
        "median_peak_error": round(statistics.median(peaks), 4),
        "peaks_within_target": sum(error <= TARGET for error in peaks),
    }


def write_table(figures: dict[str, Any]) -> None:
    """For the manual: a line for each case, and how many are within the target."""
    lines = [
        "---\norphan: true\n---\n",
        "<!-- Written by benchmarks/macro/prediction.py; do not edit. -->",
        "<!-- table -->",
        "",
        "| Network | Policy and flash | Plain step | Predicted | Measured | Difference | Peak |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, network in figures["networks"].items():
        lines += [
            f"| {name}, batch {network['batch']} | {case} | {one['plain_step_s'] * 1e3:.0f} ms |"
            f" {one['predicted_step_s'] * 1e3:.0f} ms | {one['measured_step_s'] * 1e3:.0f} ms |"
            f" {one['step_error']:+.1%} | {one['peak_error']:+.1%} |"
            for case, one in network["cases"].items()
        ]
    steps, peaks = (f"{figures[f'{what}_within_target']}" for what in ("steps", "peaks"))
    target = f"{figures['target']:.0%}"
    lines += [
        "",
        f"{steps} of {figures['cases']} steps are within {target}, the median difference is"
        f" {figures['median_step_error']:.1%}, the largest {figures['worst_step_error']:.1%}. Of the"
        f" peaks {peaks} are within {target}, the largest difference is"
        f" {figures['worst_peak_error']:.1%}.",
        "",
    ]
    TABLE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
