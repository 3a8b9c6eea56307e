"""Every policy on this machine, with flash slowed down to shares of the need: predicted and measured.

The need is the bandwidth, each way, with which everything beyond the budget would just hide behind the
network: what autograd saves less the budget, over the shorter of forward and backward. Flash is slowed
down to 0.25, 0.5, 1 and 2 times that (``ThrottledTier``). Each policy plans for such a machine, is
replayed, and trains for real; plain steps take turns with it (:mod:`._paired`). A policy that does not
fit says so.
"""

from __future__ import annotations

import argparse
import json
import sys
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
from prediction import add_common, machine_for

import _results
from penstock.core.units import MIB
from penstock.plan import Machine, policies
from penstock.plan.replay import replay

NAME = Path(__file__).stem
TABLE = _results.ROOT / "docs" / "throttled_table.md"
SHARES = (0.25, 0.5, 1.0, 2.0)
JOBS = {
    "resnet18": Job("resnet18", 16, {"image_size": 96}),
    "vgg16": Job("vgg16", 4, {"image_size": 96}),
}


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
        found[name] = measure(JOBS[name], machine, args)
        if not args.quick:
            store(found, machine, args)


def store(found: dict[str, Any], machine: Machine, args: argparse.Namespace) -> None:
    """After each network: the last may take long."""
    config = {
        "rounds": args.rounds,
        "shares": list(SHARES),
        "threads": torch.get_num_threads(),
        "memory": _memory.KEEPS,
        "machine": asdict(replace(machine, name="this machine")),
    }
    figures = {"networks": found}
    print(f"wrote {_results.write(NAME, figures, config, directory=args.dir).name}")
    write_table(figures)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--policies", nargs="*", choices=policies.names(), default=policies.names())
    parser.add_argument("--table", action="store_true", help="only write the table in docs again")
    add_common(parser, rounds=3)
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    return args


def measure(job: Job, machine: Machine, args: argparse.Namespace) -> dict[str, Any]:
    training = Training(job)
    for _ in range(2):
        training.step()
    profiled = _paired.profile_of(training)
    profile = profiled.profile
    device_bytes, budgets = _paired.budgets_for(job, profile, machine)
    need = _paired.needed(profile, profile.peak_saved_bytes - device_bytes)
    shares: dict[str, Any] = {}
    for share in SHARES:
        flash = Flash(need * share)
        here = flash.machine(machine)
        rows = shares[str(share)] = {}
        for policy in args.policies:
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
    return {
        "network": job.network,
        "batch": job.batch,
        "overrides": job.overrides,
        "saved_bytes": profile.peak_saved_bytes,
        "budget_bytes": device_bytes,
        "needed_bytes_per_s": round(need),
        "shares": shares,
    }


def write_table(figures: dict[str, Any]) -> None:
    """For the manual: predicted and measured, a line for each policy and share."""
    lines = [
        "---\norphan: true\n---\n",
        "<!-- Written by benchmarks/macro/throttled.py; do not edit. -->",
        "<!-- table -->",
        "",
    ]
    for one in figures["networks"].values():
        lines += [
            f"**{one['network']}**, batch {one['batch']}, budget {one['budget_bytes'] / MIB:.0f} of"
            f" {one['saved_bytes'] / MIB:.0f} MiB; the need of flash is"
            f" {one['needed_bytes_per_s'] / 1e9:.2f} GB/s",
            "",
            "| Flash | Policy | Step over plain: predicted | measured | Peak: predicted | measured |",
            "|---:|---|---:|---:|---:|---:|",
        ]
        for share, rows in one["shares"].items():
            lines += [_row(share, policy, row) for policy, row in rows.items()]
        lines.append("")
    TABLE.write_text("\n".join(lines))


def _row(share: str, policy: str, row: dict[str, Any]) -> str:
    if not row["fits"]:
        return f"| {share} | `{policy}` | does not fit | | | |"
    times = (row[f"{which}_step_s"] / row["plain_step_s"] for which in ("predicted", "measured"))
    peaks = (row[f"{which}_peak_bytes"] / MIB for which in ("predicted", "measured"))
    cells = [f"{one:.2f}" for one in times] + [f"{one:.1f} MiB" for one in peaks]
    return f"| {share} | `{policy}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
