"""Step time and device memory on a GPU with activations offloaded, beside the same step without.

All modes train one network in one process, step by step in turn, and every time is a ratio to the plain
step of the same round:

* ``plain``: PyTorch alone (Penstock's session is paused);
* ``penstock``: policy ``auto`` under the stated budget, to pinned host memory or through it to flash;
* ``checkpoint``: ``torch.utils.checkpoint`` around each block;
* ``save_on_cpu``: ``torch.autograd.graph.save_on_cpu(pin_memory=True)``.

The bound is what the link and the flash, measured in this run, allow on paper: no step can be faster
than the plain one, nor than its bytes take on their slowest way in each direction. On a machine
without CUDA nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import activation_offload as peers

import _results
import penstock
from penstock import zoo
from penstock.core.units import GIB, format_bytes, parse_bytes
from penstock.observe import Stage


@dataclass(frozen=True)
class Job:
    network: str
    batch: int
    overrides: dict[str, Any]
    dtype: torch.dtype


JOBS = {
    "resnet50": Job("resnet50", 256, {"image_size": 224}, torch.float32),
    "gpt2": Job("gpt2", 24, {"sequence_length": 1024, "dropout": 0.0}, torch.bfloat16),
}


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
            results[key] = attempt(JOBS[name], place, args)
            show(key, results[key])
            record(results, args)
            give_back()
            failed |= "failed" in results[key]
    if failed:
        sys.exit("gpu_offload: not everything could be measured")


def attempt(job: Job, place: str, args: argparse.Namespace) -> dict[str, Any]:
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
    }
    into = os.environ.get("OUT") or _results.RESULTS
    path = _results.write("gpu_offload", results, config, directory=args.dir, into=into)
    print(f"wrote {path.name}")


def host_bytes() -> int:
    """As much again may be pinned by ``save_on_cpu``, in blocks of up to twice what it needs."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(32 * GIB, physical // 4)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--places", nargs="*", choices=["host", "flash"], default=["host", "flash"])
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


def measure(job: Job, place: str, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    network = zoo.build(job.network, **job.overrides).to("cuda")
    batch_size = max(2, round(job.batch * args.scale))
    batch = zoo.example_batch(network, batch_size, device="cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step() -> tuple[float, int]:
        """Seconds, and the most device memory that was allocated."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=job.dtype is torch.bfloat16):
            loss = network(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated()

    for _ in range(2):
        step()
    with penstock.offload(network, policy="keep") as session:
        step()
        saved = session.budget.peak_bytes
    settings: dict[str, Any] = {
        "device_memory": int(saved * args.budget_share),
        "host_memory": args.host_memory,
        "flash": args.dir if place == "flash" else (),
    }
    with penstock.offload(network, optimizer, **settings) as session:
        for _ in range(4):  # profile, plan, steady state
            step()
        figures = {
            "saved_bytes": saved,
            "batch": batch_size,
            **compare(network, session, step, args),
        }
    return figures


def compare(
    network: zoo.Network,
    session: penstock.Session,
    step: Callable[[], tuple[float, int]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    modes = {
        "plain": session.paused,
        "penstock": nullcontext,
        "checkpoint": lambda: peers.checkpointed(network, session),
        "save_on_cpu": lambda: peers.hooked(
            session, torch.autograd.graph.save_on_cpu(pin_memory=True)
        ),
    }
    session.budget.reset_peak()
    samples: dict[str, list[tuple[float, int]]] = {mode: [] for mode in modes}
    before = session.recorder.snapshot()
    for _ in range(args.rounds):
        for mode, context in modes.items():
            with context():
                samples[mode].append(step())
        if time.monotonic() > args.end_s:
            break
    rounds = len(samples["plain"])
    after = session.recorder.snapshot()
    figures: dict[str, Any] = {
        mode: figures_of(times, samples["plain"]) for mode, times in samples.items()
    }
    moved = {
        f"{stage}.{tier}": (flow.nbytes - before.flow(stage, tier).nbytes) // rounds
        for (stage, tier), flow in after.flows.items()
        if stage in (Stage.COPY_OUT, Stage.COPY_IN, Stage.WRITE, Stage.READ)
    }
    machine = session.planner.machine
    out, back = session._stores.mover.measure()
    figures |= {
        "rounds": rounds,
        "budget_bytes": session.budget.limit_bytes,
        "peak_charged_bytes": session.budget.peak_bytes,
        "moved_bytes_per_step": moved,
        "stall_s_per_step": (after.stall_ns - before.stall_ns) / 1e9 / rounds,
        "link_out_bytes_per_s": out,
        "link_in_bytes_per_s": back,
        "flash_write_bytes_per_s": machine.flash_write_bytes_per_s,
        "flash_read_bytes_per_s": machine.flash_read_bytes_per_s,
    }
    figures["bound_ratio"] = bound(figures)
    return figures


def figures_of(mine: list[tuple[float, int]], plain: list[tuple[float, int]]) -> dict[str, Any]:
    ratios = [one[0] / other[0] for one, other in zip(mine, plain, strict=True)]
    return {
        "step_s": statistics.median(seconds for seconds, _ in mine),
        "ratio_to_plain": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "peak_allocated_bytes": max(nbytes for _, nbytes in mine),
    }


def bound(figures: dict[str, Any]) -> float:
    """The least ratio to the plain step that link and flash allow for these bytes."""
    moved = figures["moved_bytes_per_step"]

    def seconds(stage: str, speed: str) -> float:
        nbytes = sum(size for name, size in moved.items() if name.startswith(f"{stage}."))
        return nbytes / figures[f"{speed}_bytes_per_s"]

    out_s = max(seconds("copy_out", "link_out"), seconds("write", "flash_write"))
    in_s = max(seconds("copy_in", "link_in"), seconds("read", "flash_read"))
    plain_s = figures["plain"]["step_s"]
    return max(plain_s, out_s, in_s) / plain_s


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
