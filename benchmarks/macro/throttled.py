"""Every policy on this machine, with flash slowed down to shares of the need: predicted and measured.

The need is the bandwidth, each way, with which everything beyond the budget would just hide behind the
network: what autograd saves less the budget, over the shorter of forward and backward. Flash is slowed
down to 0.25, 0.5, 1 and 2 times that (``ThrottledTier``). Each policy plans for such a machine, is
replayed, and trains for real; plain steps take turns with it (:mod:`._paired`). A policy that does not
fit says so.
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

from penstock.core.units import MIB
from penstock.plan import Machine, policies
from penstock.plan.replay import replay

TARGET = 0.1
SHARES = (0.25, 0.5, 1.0, 2.0)
JOBS = {
    "resnet18": Job("resnet18", 16, {"image_size": 96}),
    "googlenet": Job("googlenet", 8, {"image_size": 128}),
}


def main() -> None:
    Series(
        name=Path(__file__).stem,
        networks=list(JOBS),
        measure=measure,
        page=page,
        parts=[str(share) for share in SHARES],
        rounds=3,
        config={"shares": list(SHARES), "policies": list(policies.names())},
        summary=summary,
    ).run()


def measure(
    name: str, machine: Machine, args: argparse.Namespace, earlier: dict[str, Any]
) -> dict[str, Any]:
    job = JOBS[name]
    training = Training(job)
    for _ in range(2):
        training.step()
    profiled = _paired.profile_of(training, args.dir)
    profile = profiled.profile
    device_bytes, budgets = _paired.budgets_for(job, profile, machine)
    need = _paired.needed(profile, profile.peak_saved_bytes - device_bytes)
    shares: dict[str, Any] = dict(earlier.get("shares", {}))
    for share in args.only:
        flash = Flash(need * float(share))
        here = flash.machine(machine)
        rows: dict[str, Any] = {}
        for policy in policies.names():
            plan = policies.get(policy)(profile, here, budgets)
            what = f"{job.network}, {policy}, flash at {share} of the need"
            if not (plan.feasible and replay(profile, plan, here).feasible):
                rows[policy] = {"fits": False}
                print(f"{what}: does not fit", flush=True)
                continue
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
            rows[policy] = {"fits": True, **_paired.compare(predicted, found)}
            _paired.show(what, rows[policy])
        shares[share] = {"needed_bytes_per_s": round(need), "policies": rows}
    return {
        "network": job.network,
        "batch": job.batch,
        "overrides": job.overrides,
        "saved_bytes": profile.peak_saved_bytes,
        "budget_bytes": device_bytes,
        "shares": {str(share): shares[str(share)] for share in SHARES if str(share) in shares},
    }


def summary(networks: list[dict[str, Any]]) -> dict[str, Any]:
    """How many steps and peaks are foretold within the target, of those that fit."""
    shares = (share for network in networks for share in network["shares"].values())
    rows = [row for share in shares for row in share["policies"].values() if row["fits"]]
    within = {
        f"{what}s_within_target": sum(abs(row[f"{what}_error"]) <= TARGET for row in rows)
        for what in ("step", "peak")
    }
    errors = [abs(row["step_error"]) for row in rows]
    return {
        "fitting": len(rows),
        "target": TARGET,
        **within,
        "median_step_error": round(statistics.median(errors), 4) if errors else None,
        "worst_step_error": max(errors, default=None),
    }


def page(figures: dict[str, Any]) -> list[str]:
    """Predicted and measured, a line for each policy and share."""
    lines = []
    for one in figures["networks"].values():
        needs = [share["needed_bytes_per_s"] / 1e9 for share in one["shares"].values()]
        lines += [
            f"**{one['network']}**, batch {one['batch']}, budget {one['budget_bytes'] / MIB:.0f} of"
            f" {one['saved_bytes'] / MIB:.0f} MiB; the need of flash is {min(needs):.2f} to"
            f" {max(needs):.2f} GB/s",
            "",
            "| Flash | Policy | Step over plain: predicted | measured | Peak: predicted | measured |",
            "|---:|---|---:|---:|---:|---:|",
        ]
        for share, found in one["shares"].items():
            lines += [_row(share, policy, row) for policy, row in found["policies"].items()]
        lines.append("")
    found = summary(list(figures["networks"].values()))
    return [
        *lines,
        f"Of {found['fitting']} that fit, {found['steps_within_target']} steps and"
        f" {found['peaks_within_target']} peaks are foretold within {TARGET:.0%}; the median difference"
        f" of a step is {found['median_step_error']:.1%}, the largest {found['worst_step_error']:.1%}.",
    ]


def _row(share: str, policy: str, row: dict[str, Any]) -> str:
    if not row["fits"]:
        return f"| {share} | `{policy}` | does not fit | | | |"
    times = (row[f"{which}_step_s"] / row["plain_step_s"] for which in ("predicted", "measured"))
    peaks = (row[f"{which}_peak_bytes"] / MIB for which in ("predicted", "measured"))
    cells = [f"{one:.2f}" for one in times] + [f"{one:.1f} MiB" for one in peaks]
    return f"| {share} | `{policy}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
