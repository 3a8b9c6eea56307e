"""What a replay says that a step will cost, beside what it costs: step time, peak memory, bytes.

For each network of the zoo, small enough for this machine, two policies (`auto`, and `all`, which moves
everything) train with flash as it is and slowed down to a share of what the plan needs. Plain steps,
steps under the plan, and transfers to measure flash take turns (:mod:`._paired`), and the replay is asked
with what these found. By how much computing is slower while bytes move is measured before, as ``penstock
bench machine`` does it, with one network for all: nothing is fitted to the network that is predicted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import _memory

if __name__ == "__main__":
    _memory.keep_what_is_freed()

import _paired
from _paired import Flash, Job, Training
from _series import Series

from penstock.plan import Machine, policies

TARGET = 0.1
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
CASES: dict[str, tuple[str, float | None]] = {
    "auto": ("auto", None),
    "auto, flash at 0.5 of the need": ("auto", 0.5),
    "all": ("all", None),
    "all, flash at 1.0 of the need": ("all", 1.0),
}
"""(policy, bandwidth of flash as a share of what the plan needs; None: as it is)."""


def main() -> None:
    Series(
        name=Path(__file__).stem,
        networks=list(JOBS),
        measure=predict,
        page=page,
        parts=list(CASES),
        rounds=5,
        config={"target": TARGET},
        summary=summary,
    ).run()


def predict(
    name: str, machine: Machine, args: argparse.Namespace, earlier: dict[str, Any]
) -> dict[str, Any]:
    job = JOBS[name]
    training = Training(job)
    for _ in range(2):
        training.step()
    profiled = _paired.profile_of(training, args.dir)
    profile = profiled.profile
    device_bytes, budgets = _paired.budgets_for(job, profile, machine)
    cases: dict[str, Any] = dict(earlier.get("cases", {}))
    for case in args.only:
        policy, share = CASES[case]
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
        cases[case] = _paired.compare(predicted, found)
        _paired.show(f"{job.network}, {case}", cases[case])
    return {
        "network": job.network,
        "batch": job.batch,
        "overrides": job.overrides,
        "budget_bytes": device_bytes,
        "cases": {case: cases[case] for case in CASES if case in cases},
    }


def summary(networks: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst and median errors, without their signs."""
    cases = [one for network in networks for one in network["cases"].values()]
    steps, peaks = ([abs(one[name]) for one in cases] for name in ("step_error", "peak_error"))
    return {
        "cases": len(cases),
        "target": TARGET,
        "worst_step_error": max(steps),
        "median_step_error": round(statistics.median(steps), 4),
        "steps_within_target": sum(error <= TARGET for error in steps),
        "worst_peak_error": max(peaks),
        "median_peak_error": round(statistics.median(peaks), 4),
        "peaks_within_target": sum(error <= TARGET for error in peaks),
    }


def page(figures: dict[str, Any]) -> list[str]:
    """A line for each case, and how many are within the target."""
    lines = [
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
    return [
        *lines,
        "",
        f"{steps} of {figures['cases']} steps are within {target}, the median difference is"
        f" {figures['median_step_error']:.1%}, the largest {figures['worst_step_error']:.1%}. Of the"
        f" peaks {peaks} are within {target}, the largest difference is"
        f" {figures['worst_peak_error']:.1%}.",
    ]


if __name__ == "__main__":
    main()
