"""Step time and device memory on a GPU with activations offloaded, beside the same step without.

As in :mod:`penstock.testing.gpu.steps` all modes train one network in one process, step by step in turn,
and every time is a ratio to the plain step of the same round:

* ``plain``: PyTorch alone (Penstock's session is paused);
* ``penstock``: policy ``auto`` under the stated budget, to pinned host memory or through it to flash;
* ``checkpoint``: ``torch.utils.checkpoint`` around each block;
* ``save_on_cpu``: ``torch.autograd.graph.save_on_cpu(pin_memory=True)``, whose first step pins memory.

On a machine without CUDA nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import activation_offload as peers

import _results
import penstock
from penstock.core.units import GIB, format_bytes, parse_bytes
from penstock.lab import zoo
from penstock.testing.gpu import steps

PEERS = ("checkpoint", "save_on_cpu")


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        print("gpu_offload: there is no CUDA device, so there is nothing to measure")
        return
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    failed = False
    for place in args.places:
        for name in args.networks:
            key = f"{name}, {place}"
            results[key] = attempt(steps.JOBS[name], place, args)
            show(key, results[key])
            record(results, args)
            give_back()
            failed |= "failed" in results[key]
    if failed:
        sys.exit("gpu_offload: not everything could be measured")


def attempt(job: steps.TrainingJob, place: str, args: argparse.Namespace) -> dict[str, Any]:
    """Figures, or why there are none; the others are measured all the same."""
    if time.monotonic() > args.end_s:
        return {"refused": "there was no time left"}
    try:
        return measure(job, place, args)
    except penstock.PenstockError as error:  # no disk to spill to, too little memory
        return {"refused": str(error)}
    except Exception as error:  # noqa: BLE001  (a driver or a kernel may fail in any way)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def give_back() -> None:
    """The next network begins with an empty device, and without what ``save_on_cpu`` has pinned."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()


def record(results: dict[str, Any], args: argparse.Namespace) -> None:
    """After each network, so that what was measured is not lost with the next."""
    config = {
        "rounds": args.rounds,
        "budget_share": args.budget_share,
        "host_memory_bytes": args.host_memory,
        "scale": args.scale,
        "recompute": args.recompute,
    }
    into = os.environ.get("OUT") or _results.RESULTS
    path = _results.write(args.name, results, config, directory=args.dir, into=into)
    print(f"wrote {path.name}")


def host_bytes() -> int:
    """As much again may be pinned by ``save_on_cpu``, in blocks of up to twice what it needs."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(32 * GIB, physical // 4)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=steps.JOBS, default=list(steps.JOBS))
    parser.add_argument("--places", nargs="*", choices=["host", "flash"], default=["host", "flash"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--recompute", action="store_true", help="the setting of the session")
    parser.add_argument("--name", default="gpu_offload", help="of the result file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the batch sizes")
    parser.add_argument("--budget-share", type=float, default=0.5, help="of what autograd saves")
    parser.add_argument(
        "--host-memory", default=host_bytes(), help="pinned, in bytes or with a unit"
    )
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for everything")
    parser.add_argument(
        "--dir", default=os.environ.get("PENSTOCK_TEST_DIR", "/var/tmp"), help="to spill to"
    )
    args = parser.parse_args()
    args.host_memory = parse_bytes(args.host_memory, what="--host-memory")
    args.end_s = time.monotonic() + args.limit
    return args


def measure(job: steps.TrainingJob, place: str, args: argparse.Namespace) -> dict[str, Any]:
    def rivals(network: zoo.Network, session: penstock.Session) -> steps.Modes:
        contexts = {
            "checkpoint": lambda: peers.checkpointed(network, session),
            "save_on_cpu": lambda: peers.hooked(
                session, torch.autograd.graph.save_on_cpu(pin_memory=True)
            ),
        }
        return {name: contexts[name] for name in args.peers}

    return steps.measure(
        steps.NetworkTraining(job, max(2, round(job.batch * args.scale))),
        budget_share=args.budget_share,
        host_memory=args.host_memory,
        flash=args.dir if place == "flash" else (),
        rounds=args.rounds,
        end_s=args.end_s,
        settings={"recompute": args.recompute},
        more_modes=rivals,
    )


def show(key: str, figures: dict[str, Any]) -> None:
    reason = figures.get("refused") or figures.get("failed")
    if reason is not None:
        print(f"{key}: {reason}")
        return
    print(
        f"{key}, batch {figures['batch']}: autograd saves {format_bytes(figures['saved_bytes'])},"
        f" budget {format_bytes(figures['budget_bytes'])}, bound {figures['bound_ratio']:.3f}"
    )
    for mode, one in figures.items():
        if isinstance(one, dict) and "step_s" in one:
            print(
                f"  {mode:<12} {one['step_s']:8.3f} s   {one['ratio_to_plain']:6.3f} x plain"
                f"   ({one['ratio_min']:.3f} to {one['ratio_max']:.3f})"
                f"   peak {format_bytes(one['peak_allocated_bytes'])}"
            )


if __name__ == "__main__":
    main()
