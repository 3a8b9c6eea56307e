"""The largest batch that trains inside a memory limit enforced from outside, without and with Penstock.

Every trial is a process of its own in a memory cgroup (version 1 or 2) of the stated limit, where
such a group may be made; the kernel kills it if it needs more. Elsewhere a trial fails if its peak
resident set passed the limit. A trial is two training steps (three with Penstock: profile, plan,
steady state) on real or generated batches; its last step is timed.

Without Penstock the largest batch is found by doubling and bisection, to within a sixteenth; with it,
multiples of that are tried until one fails, so the ratio is a lower bound. Both sides run with the same
allocator settings (see ``ENVIRONMENT``), so that freed memory goes back to the system. A trial that
takes longer than ``TIMEOUT_S`` has failed: near its limit the kernel can thrash instead of killing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MIB = 1 << 20
GIB = 1 << 30
TIMEOUT_S = 900
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "1048576",  # larger tensors are mapped, and unmapped when freed
    "MALLOC_TRIM_THRESHOLD_": "1048576",
    "THP_MEM_ALLOC_ENABLE": "1",  # and lie in huge pages, or mapping them takes longer than the step
}


@dataclass(frozen=True)
class Job:
    network: str
    limit_bytes: int
    budget_bytes: int
    overrides: dict[str, Any]


JOBS = {
    "resnet272": Job("resnet272", 1024 * MIB, 144 * MIB, {}),
    "bert-48": Job("bert-base", 4096 * MIB, 224 * MIB, {"depth": 48, "sequence_length": 128}),
}


def main() -> None:
    args = parse()
    if args.trial:
        trial(json.loads(args.trial))
        return
    import _results  # noqa: PLC0415  (a trial must not pay for it)

    results = _results.earlier("max_batch")
    results = {name: figures for name, figures in results.items() if name in JOBS}
    for name in args.networks:
        results[name] = search(JOBS[name], args)
        print(json.dumps(results[name], indent=1), flush=True)
    config = {"environment": ENVIRONMENT, "optimizer": "SGD", "steps": "the last of 2 (with: of 3)"}
    if not args.quick:
        path = _results.write("max_batch", results, config, directory=args.dir)
        print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument(
        "--multiples",
        type=int,
        nargs="*",
        default=[14, 20],
        help="of the largest batch without, tried with Penstock until one fails",
    )
    parser.add_argument("--quick", action="store_true", help="no result file")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- one trial, in a process of its own ---------------------------------------------------------------


def trial(spec: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415

    import penstock  # noqa: PLC0415
    from penstock.lab import zoo  # noqa: PLC0415

    torch.manual_seed(0)
    network = zoo.build(spec["network"], **spec["overrides"])
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    batch = zoo.example_batch(network, spec["batch"])
    losses = []

    def step() -> float:
        start = time.perf_counter()
        loss = network(batch.inputs, batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return time.perf_counter() - start

    figures: dict[str, Any] = {}
    if spec["budget_bytes"]:
        with penstock.offload(
            network, optimizer, device_memory=spec["budget_bytes"], flash=spec["dir"]
        ) as session:
            seconds = [step() for _ in range(3)]
            figures["written_bytes_per_step"] = session.summary().ssd_written_bytes // 3
            figures["saved_bytes"] = session.summary().saved_peak_bytes
            figures["peak_saved_resident_bytes"] = session.budget.peak_bytes
    else:
        seconds = [step() for _ in range(2)]
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures |= {"step_s": seconds[-1], "peak_rss_bytes": peak_kib * 1024, "losses": losses}
    print(json.dumps(figures))


# -- the search, from outside -------------------------------------------------------------------------


def search(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    without, plain = largest_without(job, args)
    if not without:
        raise SystemExit(
            f"{job.network}: not even a batch of 1 fits {job.limit_bytes} bytes without"
        )
    within, spilled = 0, None
    for multiple in args.multiples:
        figures = attempt(job, args, multiple * without, job.budget_bytes)
        if not figures:
            break
        within, spilled = multiple * without, figures
    same = attempt(job, args, without, job.budget_bytes)
    return {
        "limit_bytes": job.limit_bytes,
        "enforced_by": "cgroup" if cgroup_root() else "peak resident set",
        "budget_bytes": job.budget_bytes,
        "batch_without": without,
        "batch_with": within,
        "ratio": within / without,
        "samples_per_s_without": without / plain["step_s"] if plain else None,
        "samples_per_s_with": within / spilled["step_s"] if spilled else None,
        "samples_per_s_with_at_batch_without": without / same["step_s"] if same else None,
        "same_losses_at_batch_without": bool(
            same and plain and same["losses"][: len(plain["losses"])] == plain["losses"]
        ),
        "without": plain,
        "with": spilled,
    }


def largest_without(job: Job, args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """The largest batch that trains without Penstock, found by doubling and then bisection."""
    good, best, bad, batch = 0, None, 0, 1
    while not bad or bad - good > max(1, good // 16):
        figures = attempt(job, args, batch, budget=0)
        if figures:
            good, best = batch, figures
        else:
            bad = batch
        batch = (good + bad) // 2 if bad else 2 * batch
    return good, best


def attempt(job: Job, args: argparse.Namespace, batch: int, budget: int) -> dict[str, Any] | None:
    spec = {
        "network": job.network,
        "overrides": job.overrides,
        "batch": batch,
        "budget_bytes": budget,
        "dir": args.dir,
    }
    command = [sys.executable, __file__, "--trial", json.dumps(spec)]
    with memory_limit(job.limit_bytes) as join:
        try:
            done = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                capture_output=True,
                text=True,
                check=False,
                preexec_fn=join,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as late:
            done = subprocess.CompletedProcess(command, -9, "", str(late.stderr or "too slow"))
    figures = json.loads(done.stdout) if done.returncode == 0 else None
    if figures and figures["peak_rss_bytes"] > job.limit_bytes:
        figures = None
    verdict = f"{figures['step_s']:.1f} s" if figures else last_line(done)
    side = "with" if budget else "without"
    print(f"{job.network}, batch {batch}, {side}: {verdict}", file=sys.stderr, flush=True)
    return figures


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return f"failed ({lines[-1][:200] if lines else f'killed, status {done.returncode}'})"


def cgroup_root() -> Path | None:
    """Where a memory cgroup may be made: version 1's hierarchy, or version 2's if it is writable."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"penstock-probe-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        usable = (group / limit).exists()
        group.rmdir()
        if usable:
            return root
    return None


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Any]:
    """A function for a child to call, which puts it into a memory cgroup of ``limit_bytes``."""
    root = cgroup_root()
    if root is None:
        yield None
        return
    group = root / f"penstock-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(str(limit_bytes))
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        for _ in range(50):  # a killed child takes a moment to leave
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


if __name__ == "__main__":
    main()
