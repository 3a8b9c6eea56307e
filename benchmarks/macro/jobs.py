"""Three co-located jobs, each needing 60 % of a budget of memory: managed, against the alternatives.

Each job trains a stack of linear layers with AdamW, in a process of its own. Five ways, in one run:

- one after the other, plain Python: what the budget allows without a manager;
- managed: `penstock.jobs` lets one compute while the others sleep on flash;
- managed, the kernel keeping the budget by a control group, where that is permitted;
- all at once, plain Python: what they take if nobody keeps a budget;
- paged, with `--swap`: all at once, plain Python, in a control group that has the budget and may swap to
  a file beside the jobs, made for it and removed. It is ended after `--paging-limit` seconds. This takes
  root.

Of each: seconds until all have ended, and the most memory that all processes held together, looked at
from outside ten times a second. Memory comes in huge pages in all of them, and the C library keeps what
is freed. The sums of all weights must be the same in all that have ended.

    python benchmarks/macro/jobs.py --dir /nvme/scratch --swap
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _memory
import _results
from penstock.core.errors import ConfigError, JobError
from penstock.core.units import GIB, MIB
from penstock.jobs import Description, Manager
from penstock.jobs.cgroups import Cgroup, own_place
from penstock.jobs.job_cgroups import JobCgroups
from penstock.jobs.processes import held_bytes

WIDTH, BATCH = 2048, 128
LAYER_BYTES = 16 * WIDTH * WIDTH
"""Weights, gradients and two moments of a layer, in float32."""
SHARE, TARGET = 0.6, 1.10
SWAP_TIMES = 4
"""Swap, in needs of a job: all three fit there."""
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
    print("step", step, flush=True)
print("sum", sum(float(each.detach().double().sum()) for each in model.parameters()), flush=True)
"""
JOBS = ("first", "second", "third")


def main() -> None:
    options = parse()
    _results.warn_if_busy()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # tidies up
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        rig = Rig(Path(folder), options)
        figures["one after the other"] = rig.plain(together=False)
        rig.plan(figures["one after the other"]["peak_bytes"])
        figures["managed"] = rig.managed()
        figures["managed, kept by the kernel"] = rig.managed_in_group()
        if options.also_slice:
            figures[f"managed, slices of {options.also_slice}"] = rig.managed(options.also_slice)
        if options.unfetched:
            figures["managed, nothing ahead"] = rig.managed(prefetch=False)
        if not options.quick:
            figures["all at once"] = rig.plain(together=True)
        figures["paged"] = rig.paged() if options.swap else "not measured: --swap was not given"
        figures["budget_bytes"], figures["need_bytes"] = rig.budget_bytes, rig.need_bytes
    ways = {name: each for name, each in figures.items() if isinstance(each, dict)}
    assert len({tuple(each["sums"]) for each in ways.values() if each["sums"]}) == 1, "sums differ"
    alone_s = figures["one after the other"]["seconds"]
    for each in ways.values():
        each["to_one_after_the_other"] = each["seconds"] / alone_s
    show(figures, ways)
    if not options.quick:
        config = {
            "width": WIDTH,
            "batch": BATCH,
            "depth": options.depth,
            "steps": options.steps,
            "slice": options.slice,
            "paging_limit_s": options.paging_limit,
            "share": SHARE,
            "target": TARGET,
        }
        path = _results.write(Path(__file__).stem, figures, config, directory=options.dir)
        print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slice", default="auto", help="as in jobs.toml")
    parser.add_argument("--also-slice", help="managed once more, with such slices")
    parser.add_argument(
        "--unfetched", action="store_true", help="also with nothing ahead of its turn"
    )
    parser.add_argument("--swap", action="store_true", help="also with a swap file; takes root")
    parser.add_argument("--paging-limit", type=float, default=130.0, help="seconds")
    parser.add_argument("--quick", action="store_true", help="a few steps; no result file")
    options = parser.parse_args()
    if options.quick:
        options.depth, options.steps, options.slice = 6, 12, "1 s"
        options.paging_limit = 15.0
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

    def plain(
        self, *, together: bool, group: Cgroup | None = None, limit_s: float = float("inf")
    ) -> dict[str, Any]:
        """Plain Python, without Penstock; in a control group, and for so long, if that is said."""
        peak, begun = 0, time.perf_counter()
        waiting = list(range(len(JOBS)))
        running: list[subprocess.Popen[bytes]] = []
        logs = [self.folder / f"plain-{number}.log" for number in waiting]
        try:
            while (waiting or running) and time.perf_counter() - begun < limit_s:
                while waiting and (together or not running):
                    number = waiting.pop(0)
                    command = [sys.executable, "train.py", *self.words(number)]
                    if group is not None:
                        command = group.inside(command)
                    with logs[number].open("w") as log:
                        running.append(subprocess.Popen(command, cwd=self.folder, stdout=log))
                peak = max(peak, sum(held_bytes(each.pid) for each in running))
                if any(each.poll() for each in running):
                    assert group is not None, "a job has failed"
                    break  # for want of memory
                running = [each for each in running if each.returncode is None]
                time.sleep(0.1)
            seconds, ended = time.perf_counter() - begun, not running
        finally:
            for each in running:
                each.kill()
            codes = [each.wait() for each in running]
        steps = [log.read_text(encoding="utf-8").count("step ") for log in logs]
        sums = [line_of(log) for log in logs] if ended else []
        return {
            "seconds": seconds,
            "peak_bytes": peak,
            "sums": sums,
            "ended": ended,
            "steps": steps,
            "codes_of_those_that_did_not_end": codes,
        }

    def paged(self) -> dict[str, Any] | str:
        """All at once in a group that has the budget and may swap; or why not."""
        try:
            place = own_place()
            made = JobCgroups(place, state=str(self.folder), budget_bytes=self.budget_bytes)
        except JobError as error:
            return f"not measured: {error}"
        try:
            with swap_file(self.folder / "swap", SWAP_TIMES * self.need_bytes):
                Cgroup.at(made.path).limit(self.budget_bytes, swap=True)
                group = Cgroup.make(made.path, "paged", place.version)
                before = swapped_bytes()
                try:
                    figures = self.plain(
                        together=True, group=group, limit_s=self.options.paging_limit
                    )
                finally:
                    group.kill()
                after = swapped_bytes()
        except (OSError, subprocess.CalledProcessError) as error:
            return f"not measured: no swap file can be used: {error}"
        finally:
            made.close(wait=True)
        figures["swapped_in_bytes"], figures["swapped_out_bytes"] = (
            now - then for now, then in zip(after, before, strict=True)
        )
        return figures

    def managed_in_group(self) -> dict[str, Any] | str:
        """Managed, the kernel keeping the budget; or why not."""
        try:
            return self.managed(enforce="cgroup")
        except ConfigError as error:
            return f"not measured: {error}"

    def managed(
        self, slices: str = "", *, prefetch: bool = True, enforce: str = "polling"
    ) -> dict[str, Any]:
        state = self.folder / f"state-{slices}-{prefetch}-{enforce}"
        machine = {
            "memory": self.budget_bytes,
            "flash": "spill",
            "slice": slices or self.options.slice,
            "prefetch": prefetch,
            "enforce": enforce,
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
            "kernel_peak_bytes": peak.kernel_bytes,
            "sums": sums,
            "ended": True,
            "jobs": [{key: each[key] for key in kept} for each in status["jobs"]],
        }


class Peak:
    """The most that all jobs of a manager held together, ten times a second."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.kernel_bytes: int | None = None
        """As counted by the kernel for the group, the page cache of its files included."""
        self._looked = 0.0

    def __call__(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._looked < 0.1:
            return
        self._looked = now
        pids = [each["pid"] for each in status["jobs"] if each["pid"]]
        self.nbytes = max(self.nbytes, sum(map(held_bytes, pids)))
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            with suppress(OSError):
                self.kernel_bytes = int(Path(status["machine"]["kept_by"], name).read_text())


def told(begun: float) -> Callable[[str], None]:
    return lambda line: print(f"  {time.perf_counter() - begun:6.1f} s {line}", flush=True)


def line_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("sum "))


@contextmanager
def swap_file(path: Path, nbytes: int) -> Iterator[None]:
    """A swap file that is used within, and gone after it, whatever happens."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes // mmap.PAGESIZE * mmap.PAGESIZE)
        subprocess.run(["mkswap", str(path)], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["swapon", str(path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["swapoff", str(path)], check=True)
    finally:
        os.close(fd)
        path.unlink()


def swapped_bytes() -> tuple[int, int]:
    """In and out, of the whole machine, since it was started."""
    lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    fields = dict(line.split() for line in lines)
    return tuple(int(fields[name]) * mmap.PAGESIZE for name in ("pswpin", "pswpout"))  # type: ignore[return-value]


def show(figures: dict[str, Any], ways: dict[str, Any]) -> None:
    budget = figures["budget_bytes"]
    print(f"budget {budget / GIB:.2f} GiB, each job {figures['need_bytes'] / budget:.0%} of it")
    for name, each in ways.items():
        share = each["peak_bytes"] / budget
        done = "" if each["ended"] else f", ended there after {each['steps']} steps"
        if each.get("kernel_peak_bytes"):
            done += f", {each['kernel_peak_bytes'] / budget:.0%} with page cache"
        ratio = each["to_one_after_the_other"]
        print(
            f"{name:28} {each['seconds']:6.1f} s, {ratio:.3f} times, most memory {share:.0%}{done}"
        )
    for name, text in figures.items():
        if isinstance(text, str):
            print(f"{name}: {text}")
    print(f"wanted, managed: {TARGET} times")


if __name__ == "__main__":
    _memory.keep_what_is_freed()
    main()
