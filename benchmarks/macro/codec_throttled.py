"""Step time with codecs and without, where flash has a quarter of the bandwidth that a step needs.

1. The plain step is timed: its forward and its backward.
2. A session without codecs, on this machine's flash, tells what a step writes and reads under a budget
   of half of what autograd saves. The bandwidth needed is ``max(written / forward, read / backward)``.
3. Flash is slowed down to a quarter of that, each way (``ThrottledTier``). Sessions with ``codec="none"``
   and ``codec="auto"`` take turns, every other round in reverse, each from the same weights. A session's
   first steps are not timed: profile, sample, plan, and some in the steady state.

Every run, plain ones too, must have the same losses and end with the same weights, bit for bit. The
bound is what the bytes allow on paper: a forward no faster than the plain one or its writes, a backward
no faster than the plain one or its reads.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _activations
import _memory
import _results
import penstock
from penstock.lab import zoo
from penstock.store import ThrottledTier

NAME = Path(__file__).stem
TARGET = 1.5
BUDGET_SHARE = 0.5
SLOWER = 4
CODECS = ("none", "auto")
Times = tuple[float, float, float]
"""Seconds of forward, backward, and the whole step with the optimizer."""


@dataclass(frozen=True)
class Job:
    network: str
    batch: int
    overrides: dict[str, Any]


JOBS = {
    "vgg16": Job("vgg16", 16, {"image_size": 128}),
    "resnet50": Job("resnet50", 16, {"image_size": 160}),
}


@dataclass
class Run:
    """What some steps from the same weights gave."""

    losses: list[float] = field(default_factory=list)
    times: list[Times] = field(default_factory=list)
    """Of the timed steps."""
    weights: str = ""
    moved: dict[str, Any] = field(default_factory=dict)
    """Bytes of a timed step, on average."""
    encoded_slots: int = 0
    """Of the plan, in the end."""

    @property
    def medians(self) -> Times:
        forward, backward, whole = (
            statistics.median(column) for column in zip(*self.times, strict=True)
        )
        return forward, backward, whole


def main() -> None:
    args = parse()
    _results.warn_if_busy()
    results = _results.earlier(NAME)
    for name in args.networks:
        results[name] = measure(JOBS[name], args)
        show(name, results[name])
    if not args.quick:
        config = {
            "rounds": args.rounds,
            "warm_up_steps": args.warm_up,
            "timed_steps": args.steps,
            "budget_share": BUDGET_SHARE,
            "flash_slower_than_needed": SLOWER,
            "target_speedup": TARGET,
            "threads": torch.get_num_threads(),
            "optimizer": "SGD",
            "environment": _memory.KEEPS,
        }
        path = _results.write(NAME, results, config, directory=args.dir)
        print(f"wrote {path.name}")
    different = [name for name in args.networks if not all(results[name]["same"].values())]
    if different:
        raise SystemExit(f"not the same bits: {different}; see 'same' in the figures")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=4, help="sessions of each kind")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of a session before timing")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a session")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--quick", action="store_true", help="one round, small batch; no result")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps = 1, 2
    return args


def measure(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(job, args)
    plain = bench.run(None)
    budget = int(bench.saved_bytes() * BUDGET_SHARE)
    raw = bench.run(bench.session("none", budget))
    forward_s, backward_s, _ = plain.medians
    needed = max(raw.moved["written_bytes"] / forward_s, raw.moved["read_bytes"] / backward_s)
    given = int(needed / SLOWER)
    runs: dict[str, list[Run]] = {codec: [] for codec in CODECS}
    for turn in range(args.rounds):
        for codec in CODECS if turn % 2 else reversed(CODECS):
            runs[codec].append(bench.run(bench.session(codec, budget, given)))
    return {
        "network": job.network,
        "batch": bench.batch_size,
        "overrides": job.overrides,
        "saved_bytes": bench.saved_bytes(),
        "budget_bytes": budget,
        "needed_bytes_per_s": round(needed),
        "given_bytes_per_s": given,
        "plain": times_of([plain]),
        "unthrottled_none": times_of([raw]) | raw.moved,
        **{codec: one_codec(runs[codec], plain, given) for codec in CODECS},
        **speedup(runs),
        "same": {
            what: same(plain, [raw, *runs["none"], *runs["auto"]], what)
            for what in ("losses", "weights")
        },
    }


class Bench:
    """One network, its batch, and the weights that every run begins with."""

    def __init__(self, job: Job, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.network = zoo.build(job.network, **job.overrides)
        self.batch_size = 4 if args.quick else job.batch
        self.batch = zoo.example_batch(self.network, self.batch_size)
        self._state = copy.deepcopy(self.network.state_dict())
        self._args = args
        self._saved_bytes = 0

    def saved_bytes(self) -> int:
        """What autograd holds at the end of a forward."""
        if not self._saved_bytes:
            with penstock.offload(self.network, policy="keep") as session:
                self.network(self.batch.inputs, self.batch.targets).backward()
                self._saved_bytes = session.budget.peak_bytes
        return self._saved_bytes

    def session(self, codec: str, budget: int, bytes_per_s: int = 0) -> penstock.Session:
        slow = partial(ThrottledTier, write_bytes_per_s=bytes_per_s, read_bytes_per_s=bytes_per_s)
        config = penstock.OffloadConfig(device_memory=budget, flash=self._args.dir, codec=codec)
        return penstock.Session(config, model=self.network, wrap_tier=slow if bytes_per_s else None)

    def run(self, session: penstock.Session | None) -> Run:
        """Some steps unmeasured and some timed, from the same weights; without a session, plain."""
        torch.manual_seed(1)  # of dropout
        self.network.load_state_dict(self._state)
        self.network.zero_grad()
        optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)
        run = Run()
        with session or nullcontext():
            for _ in range(self._args.warm_up):
                self._step(optimizer, run)
            run.times.clear()
            before = session.recorder.snapshot() if session else None
            for _ in range(self._args.steps):
                self._step(optimizer, run)
            if session:
                after = session.recorder.snapshot()
                run.moved = _activations.moved(before, after, self._args.steps)
                run.encoded_slots = sum(bool(one.codec) for one in session.plan.decisions)
        run.weights = _activations.digest(self.network)
        return run

    def _step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        start = time.perf_counter()
        loss = self.network(self.batch.inputs, self.batch.targets)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        run.times.append((forward - start, backward - forward, end - start))
        run.losses.append(loss.item())


def same(plain: Run, others: list[Run], what: str) -> bool:
    return all(getattr(other, what) == getattr(plain, what) for other in others)


# -- figures ------------------------------------------------------------------------------------------


def times_of(runs: list[Run]) -> dict[str, Any]:
    columns = zip(*(times for run in runs for times in run.times), strict=True)
    names = ("forward_s", "backward_s", "step_s")
    return {
        name: _results.summary(list(column)) for name, column in zip(names, columns, strict=True)
    }


def one_codec(runs: list[Run], plain: Run, bytes_per_s: int) -> dict[str, Any]:
    moved = runs[-1].moved
    return times_of(runs) | {
        "written_bytes_per_step": moved["written_bytes"],
        "read_bytes_per_step": moved["read_bytes"],
        "codecs_per_step": moved["codecs"],
        "encoded_slots": runs[-1].encoded_slots,
        "bound_s": round(bound_s(plain, moved, bytes_per_s), 3),
    }


def bound_s(plain: Run, moved: dict[str, Any], bytes_per_s: int) -> float:
    """What a step takes at least with these bytes at this bandwidth, if the plain one is as it was."""
    forward, backward, whole = plain.medians
    out_s, back_s = (moved[f"{way}_bytes"] / bytes_per_s for way in ("written", "read"))
    return max(forward, out_s) + max(backward, back_s) + whole - forward - backward


def speedup(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """How many times as fast a step is with codecs as without."""
    medians = {codec: [run.medians[2] for run in runs[codec]] for codec in CODECS}
    whole = {codec: [times[2] for run in runs[codec] for times in run.times] for codec in CODECS}
    rounds = [none / auto for none, auto in zip(medians["none"], medians["auto"], strict=True)]
    ratio = statistics.median(whole["none"]) / statistics.median(whole["auto"])
    return {
        "speedup": round(ratio, 3),
        "speedup_of_each_round": [round(one, 3) for one in rounds],
        "target_reached": ratio >= TARGET,
    }


def show(name: str, figures: dict[str, Any]) -> None:
    mib = 1 << 20
    print(
        f"{name}, batch {figures['batch']}: autograd saves {figures['saved_bytes'] / mib:.0f} MiB,"
        f" budget {figures['budget_bytes'] / mib:.0f} MiB; a step needs"
        f" {figures['needed_bytes_per_s'] / 1e9:.2f} GB/s of flash and has"
        f" {figures['given_bytes_per_s'] / 1e9:.2f}; plain {figures['plain']['step_s']['median']} s"
    )
    for codec in CODECS:
        one = figures[codec]
        made = ", ".join(
            f"{each} {row['source_bytes'] / mib:.0f} to {row['frame_bytes'] / mib:.0f} MiB"
            for each, row in one["codecs_per_step"].items()
        )
        print(
            f"  {codec}: {one['step_s']['median']:7.3f} s ({one['bound_s']:.3f} on paper),"
            f" {one['written_bytes_per_step'] / mib:.0f} MiB written,"
            f" {one['read_bytes_per_step'] / mib:.0f} read   {made}"
        )
    rounds = ", ".join(f"{one:.2f}" for one in figures["speedup_of_each_round"])
    print(f"  {figures['speedup']:.2f} x as fast with codecs ({rounds}); target {TARGET}")
    print(f"  same as plain: {figures['same']}")


if __name__ == "__main__":
    _memory.keep_what_is_freed()
    main()
