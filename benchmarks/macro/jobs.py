"""Three co-located jobs, each needing 60 % of a budget of memory: managed, against the alternatives.

Each job trains a stack of linear layers with AdamW, in a process of its own. Three ways, in one run:

- one after the other, plain Python: what the budget allows without a manager;
- managed: `penstock.jobs` lets one compute while the others sleep on flash;
- all at once, plain Python: what they take if nobody keeps a budget.

Of each: seconds until all have ended, and the most memory that all processes held together, looked at
from outside ten times a second. Memory comes in huge pages in all of them, and the C library keeps what
is freed. The sums of all weights must be the same in all three. Paging by the operating
system is a fourth way where there is swap and a cgroup can be given a limit; the result says if not.

    python benchmarks/macro/jobs.py --dir /nvme/scratch
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _memory
import _results
from penstock.core.units import GIB, MIB
from penstock.jobs import Description, Manager
from penstock.jobs.processes import held_bytes

WIDTH, BATCH = 2048, 128
LAYER_BYTES = 16 * WIDTH * WIDTH
"""Weights, gradients and two moments of a layer, in float32."""
SHARE, TARGET = 0.6, 1.10
ROOM_BYTES = 256 * MIB
"""For what Penstock itself holds, beside what the plain job was measured to hold."""
SCRIPT = f"""
import sys, torch
seed, depth, steps = map(int, sys.argv[1:])
torch.manual_seed(seed)
model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(depth)))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
features = torch.randn({BATCH}, {WIDTH})
for step in range(steps):
    optimizer.zero_grad(set_to_none=False)
    model(features).square().mean().backward()
    optimizer.step()
print("sum", sum(float(each.detach().double().sum()) for each in model.parameters()), flush=True)
"""
JOBS = ("first", "second", "third")


def main() -> None:
    options = parse()
    _results.warn_if_busy()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        rig = Rig(Path(folder), options)
        figures["one after the other"] = rig.plain(together=False)
        rig.plan(figures["one after the other"]["peak_bytes"])
        figures["managed"] = rig.managed(prefetch=True)
        if options.unfetched:
            figures["managed, nothing ahead"] = rig.managed(prefetch=False)
        if not options.quick:
            figures["all at once"] = rig.plain(together=True)
        figures["budget_bytes"], figures["need_bytes"] = rig.budget_bytes, rig.need_bytes
    figures["paging"] = paging()
    ways = {name: each for name, each in figures.items() if isinstance(each, dict)}
    assert len({tuple(each["sums"]) for each in ways.values()}) == 1, "sums differ"
    figures["managed_to_one_after_the_other"] = (
        figures["managed"]["seconds"] / figures["one after the other"]["seconds"]
    )
    show(figures, ways)
    if not options.quick:
        config = {
            "width": WIDTH,
            "batch": BATCH,
            "depth": options.depth,
            "steps": options.steps,
            "slice_s": options.slice,
            "share": SHARE,
            "target": TARGET,
        }
        path = _results.write(Path(__file__).stem, figures, config, directory=options.dir)
        print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--steps", type=int, default=34)
    parser.add_argument("--slice", type=float, default=12.0, help="seconds")
    parser.add_argument(
        "--unfetched", action="store_true", help="also with nothing ahead of its turn"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps; no result file")
    options = parser.parse_args()
    if options.quick:
        options.depth, options.steps, options.slice = 6, 12, 1.0
    return options


class Rig:
    """The jobs, and ways to run them."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self.need_bytes = self.budget_bytes = 0
        (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
        (folder / "spill").mkdir()

    def words(self, number: int) -> list[str]:
        return [str(number), str(self.options.depth), str(self.options.steps)]

    def plan(self, peak_bytes: int) -> None:
        self.need_bytes = peak_bytes + ROOM_BYTES
        self.budget_bytes = int(self.need_bytes / SHARE)

    def plain(self, *, together: bool) -> dict[str, Any]:
        """Plain Python, without Penstock."""
        peak, sums, begun = 0, [], time.perf_counter()
        waiting = list(range(len(JOBS)))
        running: list[subprocess.Popen[str]] = []
        done: list[subprocess.Popen[str]] = []
        while waiting or running:
            while waiting and (together or not running):
                command = [sys.executable, "train.py", *self.words(waiting.pop(0))]
                running.append(
                    subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
                )
            peak = max(peak, sum(held_bytes(each.pid) for each in running))
            done += [each for each in running if each.poll() is not None]
            running = [each for each in running if each.returncode is None]
            time.sleep(0.1)
        seconds = time.perf_counter() - begun
        for each in sorted(done, key=lambda one: int(one.args[2])):  # type: ignore[index]
            assert each.returncode == 0, each.args
            sums.append(each.communicate()[0].strip())
        return {"seconds": seconds, "peak_bytes": peak, "sums": sums}

    def managed(self, *, prefetch: bool) -> dict[str, Any]:
        state = self.folder / f"state-{prefetch}"
        machine = {
            "memory": self.budget_bytes,
            "flash": "spill",
            "slice": self.options.slice,
            "prefetch": prefetch,
        }
        jobs = [
            {"name": name, "script": "train.py", "args": self.words(i), "memory": self.need_bytes}
            for i, name in enumerate(JOBS)
        ]
        document = {"machine": machine, "job": jobs}
        description = Description.from_json(document, source="benchmark", base=str(self.folder))
        peak = Peak()
        begun = time.perf_counter()
        with Manager(description, state=str(state), tell=told(begun)) as manager:
            good = manager.run(peak)
            seconds = time.perf_counter() - begun
            status = manager.status()
        assert good, status
        sums = [line_of(Path(each["log"])) for each in status["jobs"]]
        kept = ("name", "sleeps", "moved_bytes", "moving_s", "awake_s", "held_bytes")
        return {
            "seconds": seconds,
            "peak_bytes": peak.nbytes,
            "sums": sums,
            "jobs": [{key: each[key] for key in kept} for each in status["jobs"]],
        }


class Peak:
    """The most that all jobs of a manager held together, ten times a second."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._looked = 0.0

    def __call__(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._looked < 0.1:
            return
        self._looked = now
        pids = [each["pid"] for each in status["jobs"] if each["pid"]]
        self.nbytes = max(self.nbytes, sum(map(held_bytes, pids)))


def told(begun: float) -> Callable[[str], None]:
    return lambda line: print(f"  {time.perf_counter() - begun:6.1f} s {line}", flush=True)


def line_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("sum "))


def paging() -> str:
    swaps = Path("/proc/swaps").read_text(encoding="utf-8").splitlines()[1:]
    if not swaps:
        return "not measured: this machine has no swap"
    root = Path("/sys/fs/cgroup/cgroup.controllers")
    if not root.exists() or not os.access("/sys/fs/cgroup", os.W_OK):
        return "not measured: there is swap, but no cgroup may be given a limit"
    return (
        "not measured: there is swap and a cgroup could be limited, which this script does not do"
    )


def show(figures: dict[str, Any], ways: dict[str, Any]) -> None:
    budget = figures["budget_bytes"]
    print(f"budget {budget / GIB:.2f} GiB, each job {figures['need_bytes'] / budget:.0%} of it")
    for name, each in ways.items():
        share = each["peak_bytes"] / budget
        print(f"{name:24} {each['seconds']:6.1f} s, most memory {share:.0%} of the budget")
    ratio = figures["managed_to_one_after_the_other"]
    print(f"managed / one after the other: {ratio:.3f} (wanted {TARGET}); {figures['paging']}")


if __name__ == "__main__":
    _memory.keep_what_is_freed()
    main()
