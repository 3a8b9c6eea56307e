"""The largest batch that trains inside a memory limit enforced from outside, without and with Penstock.

Every trial is a process of its own in a memory cgroup (version 1 or 2) of the stated limit, where
such a group may be made; the kernel kills it if it needs more. Elsewhere a trial fails if its peak
resident set passed the limit. A trial is two training steps (three with Penstock: profile, plan,
steady state) on real or generated batches; its last step is timed.

The largest batch is found by doubling and bisection, to within a sixteenth. Both sides run with the
same allocator settings (see ``ENVIRONMENT``), so that freed memory goes back to the system.
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
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",  # large tensors are mapped, and unmapped when they are freed
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


@dataclass(frozen=True)
class Job:
    network: str
    limit_bytes: int
    budget_bytes: int
    overrides: dict[str, Any]
    largest: int
    """Where the search stops, in multiples of what fits without Penstock."""


JOBS = {
    "resnet1001": Job("resnet1001", 1280 * MIB, 96 * MIB, {}, 24),
    "bert-large": Job("bert-large", 4096 * MIB, 160 * MIB, {"sequence_length": 128}, 24),
}


def main() -> None:
    args = parse()
    if args.trial:
        trial(json.loads(args.trial))
        return
    import _results  # noqa: PLC0415  (a trial must not pay for it)

    results = {}
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
    parser.add_argument("--factor", type=int, default=0, help="try just this multiple, no search")
    parser.add_argument("--quick", action="store_true", help="no result file")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- one trial, in a process of its own ---------------------------------------------------------------


def trial(spec: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415

    import penstock  # noqa: PLC0415
    from penstock import zoo  # noqa: PLC0415

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
            figures["saved_bytes"] = session.summary().saved_bytes_per_step
            figures["peak_saved_resident_bytes"] = session.budget.peak_bytes
    else:
        seconds = [step() for _ in range(2)]
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures |= {"step_s": seconds[-1], "peak_rss_bytes": peak_kib * 1024, "losses": losses}
    print(json.dumps(figures))


# -- the search, from outside -------------------------------------------------------------------------


def search(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    without, plain = largest(job, args, budget=0, start=1, stop=1 << 20)
    if not without:
        raise SystemExit(
            f"{job.network}: not even a batch of 1 fits {job.limit_bytes} bytes without"
        )
    if args.factor:
        batch = args.factor * without
        spilled = attempt(job, args, batch, job.budget_bytes)
        within = batch if spilled else 0
    else:
        within, spilled = largest(
            job, args, budget=job.budget_bytes, start=8 * without, stop=job.largest * without
        )
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


def largest(
    job: Job, args: argparse.Namespace, *, budget: int, start: int, stop: int
) -> tuple[int, dict[str, Any] | None]:
    """The largest batch that trains, found by doubling from ``start`` and then bisection."""
    good, best, bad = 0, None, 0
    batch = start
    while not bad and batch <= stop:
        figures = attempt(job, args, batch, budget)
        if figures:
            good, best = batch, figures
            batch = min(2 * batch, stop) if batch < stop else stop + 1
        else:
            bad = batch
    while bad and bad - good > max(1, good // 16):
        batch = (good + bad) // 2
        figures = attempt(job, args, batch, budget)
        if figures:
            good, best = batch, figures
        else:
            bad = batch
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
        done = subprocess.run(
            command,
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=join,
        )
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
