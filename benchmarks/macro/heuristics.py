"""Steps with one heuristic of the planner switched off, in turns with steps that have them all.

Each workload is a network under a budget. In a round, every side is a session of its own that begins from
the same weights: one with everything on, one more of these (the *control*: its ratio is the noise), and
one for each heuristic that could matter there, which this script switches off from outside by a patch.
The order rotates. A ratio is a side's time over that of the session with everything on, of the same
round; above 1, the heuristic saves time. Where a workload is about a steady state the time is the median
of the last steps, where it is about the beginning it is the sum of all.

All sides of a workload must have the same losses and end with the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _activations
import _memory
import _results
import penstock
from penstock.hooks import proofs, recipe_notes
from penstock.lab import zoo
from penstock.observe import Stage
from penstock.plan import Action, Decision, Machine
from penstock.runtime.active_orders import ActiveOrders
from penstock.runtime.orders import DefaultRule
from penstock.store import ThrottledTier

NAME: Final = Path(__file__).stem
TARGET: Final = 1.02
"""A heuristic stays if its median ratio is at least this somewhere."""
SLOWER: Final = 4
"""Times by which throttled flash is slower than a step needs."""
ON: Final = "on"
CONTROL: Final = "control"
STARTED: Final = 5
"""Steps before those of a steady state."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a method; a mock would keep what it is called with alive."""


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _kept(rule: DefaultRule, key: Any, **state: Any) -> Decision:
    return Decision(key, Action.KEEP, "", "not in the plan")


OFF: Final[dict[str, Callable[[], list[Any]]]] = {
    "shortage": lambda: [
        mock.patch.object(ActiveOrders, "fallback_encoding", _nothing),
    ],
    "guesses": lambda: [mock.patch.object(DefaultRule, "decide", _kept)],
    "crowded sampling": lambda: [mock.patch.object(DefaultRule, "crowds", _no)],
    "sign proofs": lambda: [mock.patch.object(proofs, "KINDS", {})],
    "recipes": lambda: [mock.patch.object(recipe_notes, "_write_recipe", _nothing)],
    "heap restore": lambda: [mock.patch.dict(os.environ, PENSTOCK_RESTORE_INTO="arena")],
}
"""What switches each heuristic off."""


@dataclass(frozen=True)
class Workload:
    """A network in training, and what it may use."""

    network: str
    batches: tuple[tuple[int, dict[str, Any]], ...]
    """(batch size, image size or sequence length) of the steps, in turn."""
    off: tuple[str, ...]
    """The heuristics that could matter."""
    steps: int
    steady: bool = True
    """The median of the steps after the first ones counts; else the sum of all."""
    budget_share: float = 0.5
    """Of what autograd saves in the largest batch."""
    slower: int = 0
    """Flash is throttled to what a step needs over this."""
    host_share: float = 0.0
    """Host memory in place of flash, of what autograd saves."""
    flash_share: float = 0.0
    """Capacity of flash, of what autograd saves; 0: enough."""
    overrides: dict[str, Any] = field(default_factory=dict)
    policy: str = "auto"
    """``recompute`` offloads nothing once there is a plan."""
    real: bool = False
    """Learn from photographs, with a learning rate at which sparsity changes."""


def _sizes(batch: int, *sizes: int) -> tuple[tuple[int, dict[str, Any]], ...]:
    return tuple((batch, {"image_size": size}) for size in sizes)


STEADY: Final = ("recipes", "sign proofs", "heap restore")
TIGHT: Final = (
    "shortage",
    "guesses",
    "crowded sampling",
)
WORKLOADS: Final = {
    "resnet50-plain": Workload("resnet50", _sizes(16, 160), STEADY, 9, budget_share=0.15),
    "vgg16-plain": Workload("vgg16", _sizes(16, 128), STEADY, 9, budget_share=0.4),
    "gpt2-plain": Workload(
        "gpt2",
        ((2, {"sequence_length": 128}),),
        STEADY,
        9,
        budget_share=0.5,  # slots below the floor take a third
        overrides={"dropout": 0.0},
    ),
    "vgg16-throttled": Workload("vgg16", _sizes(8, 128), STEADY, 9, slower=SLOWER),
    "resnet50-throttled": Workload("resnet50", _sizes(8, 160), STEADY, 9, slower=SLOWER),
    "resnet50-recompute": Workload("resnet50", _sizes(8, 160), ("recipes",), 9, policy="recompute"),
    "gpt2-recompute": Workload(
        "gpt2",
        ((2, {"sequence_length": 128}),),
        ("recipes",),
        9,
        policy="recompute",
        overrides={"dropout": 0.0},
    ),
    "resnet18-learning": Workload(
        "resnet18", _sizes(16, 96), ("shortage",), 40, slower=SLOWER, real=True
    ),
    "resnet18-first-steps": Workload(
        "resnet18", _sizes(16, 160), ("guesses", "crowded sampling"), 3, steady=False
    ),
    "resnet18-shapes": Workload(
        "resnet18",
        _sizes(16, 96, 128, 160, 112, 144, 128, 96, 160),
        ("guesses", "crowded sampling"),
        12,
        steady=False,
        budget_share=0.3,
    ),
    "resnet18-host-full": Workload(
        "resnet18", _sizes(16, 128), TIGHT, 8, steady=False, budget_share=0.5, host_share=0.4
    ),
    "resnet18-host-short": Workload(
        "resnet18", _sizes(16, 128), TIGHT, 8, steady=False, budget_share=0.5, host_share=0.55
    ),
    "resnet18-flash-full": Workload(
        "resnet18", _sizes(16, 128), TIGHT, 8, steady=False, budget_share=0.5, flash_share=0.4
    ),
    "resnet18-full-learning": Workload(
        "resnet18", _sizes(16, 96), TIGHT, 32, budget_share=0.5, host_share=0.4, real=True
    ),
}


@dataclass
class Run:
    """The steps of one session."""

    times: list[float]
    bits: tuple[object, ...]
    """Losses, and a checksum of the weights."""
    facts: dict[str, Any]


def main() -> None:
    args = parse()
    if args.table:
        print(table(_results.earlier(NAME)))
        return
    _results.warn_if_busy()
    results = _results.earlier(NAME)
    for name in args.workloads:
        results[name] = measure(name, args)
        if not args.quick:
            config = {
                "target_ratio": TARGET,
                "flash_slower_than_needed": SLOWER,
                "steps_before_a_steady_state": STARTED,
                "threads": torch.get_num_threads(),
                "environment": _memory.KEEPS,
            }
            print("wrote", _results.write(NAME, results, config, directory=args.dir).name)
    different = [name for name in args.workloads if not results[name]["same_bits"]]
    if different:
        raise SystemExit(f"not the same bits: {different}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--off", nargs="*", choices=OFF, help="only these heuristics")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=240, help="no round begins after these")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--table", action="store_true", help="print the last result as Markdown")
    parser.add_argument("--quick", action="store_true", help="one round; no result")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    return args


# -- measuring ----------------------------------------------------------------------------------------


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    workload = WORKLOADS[name]
    off = [each for each in workload.off if args.off is None or each in args.off]
    sides = [ON, CONTROL, *off]
    begun = time.monotonic()
    bench = Bench(workload, args)
    bench.run(ON)  # codecs are compiled, flash is measured
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    for turn in range(args.rounds):
        if turn and time.monotonic() - begun > args.seconds:
            break
        first = turn * 2 % len(sides)
        for side in sides[first:] + sides[:first]:
            runs[side].append(bench.run(side))
    figures = bench.figures() | {
        "same_bits": all(run.bits == runs[ON][0].bits for each in runs.values() for run in each),
        ON: {"step_s": _results.summary([bench.time_of(run) for run in runs[ON]], 4)}
        | runs[ON][-1].facts,
        "off": {
            side: compared(bench, runs[ON], runs[side]) | runs[side][-1].facts for side in sides[1:]
        },
    }
    show(name, figures)
    return figures


def compared(bench: Bench, on: list[Run], off: list[Run]) -> dict[str, Any]:
    ratios = [bench.time_of(one) / bench.time_of(other) for one, other in zip(off, on, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "ratio": round(statistics.median(ratios), 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "rounds": len(ratios),
    }


class Bench:
    """One workload: its network, its batches, and the weights that every session begins with."""

    def __init__(self, workload: Workload, args: argparse.Namespace) -> None:
        self.workload = workload
        torch.manual_seed(0)
        first = workload.batches[0][1]
        self._network = zoo.build(workload.network, **first, **workload.overrides)
        self._batches = list(self._make_batches())
        self._state = {name: tensor.clone() for name, tensor in self._network.state_dict().items()}
        self._dir = args.dir
        self._machine: Machine | None = None
        self._rate = 0
        self._saved_bytes = max(self._saved(index) for index in range(len(workload.batches)))
        self._budget = int(self._saved_bytes * workload.budget_share)
        if workload.slower:
            self._rate = self._needed() // workload.slower

    def _make_batches(self) -> Iterator[Any]:
        workload = self.workload
        if not workload.real:
            for batch, sizes in workload.batches:
                yield zoo.example_batch(self._network, batch, **sizes)
            return
        trainee = _activations.Trainee(
            workload.network, batch_size=workload.batches[0][0], **workload.batches[0][1]
        )
        for _ in range(16):
            yield trainee.data.batch(
                trainee.config, trainee.batch_size, generator=trainee.generator
            )

    def _saved(self, index: int) -> int:
        with penstock.offload(self._network, policy="keep") as session:
            self._network(*self._batches[index]).backward()
            return session.budget.peak_bytes

    def _needed(self) -> int:
        """Bytes per second of flash that would hide what goes behind the network."""
        optimizer = torch.optim.SGD(self._network.parameters(), lr=0.0)
        with self._session(codec="none") as session:
            for _ in range(3):
                self._step(optimizer, 0)
            before = session.recorder.snapshot()
            times = [self._step(optimizer, 0) for _ in range(2)]
            moved = _activations.moved(before, session.recorder.snapshot(), 2)
        self._machine = None  # of flash that is not throttled
        forward, backward = (min(column) for column in list(zip(*times, strict=True))[:2])
        return int(max(moved["written_bytes"] / forward, moved["read_bytes"] / backward))

    def _session(self, **settings: Any) -> penstock.Session:
        workload = self.workload
        limits: dict[str, Any] = {"device_memory": self._budget, "policy": workload.policy}
        if workload.host_share:
            limits["host_memory"] = int(self._saved_bytes * workload.host_share)
        else:
            limits["flash"] = self._dir
        if workload.flash_share:
            limits["flash_capacity"] = int(self._saved_bytes * workload.flash_share)
        slow = partial(ThrottledTier, write_bytes_per_s=self._rate, read_bytes_per_s=self._rate)
        return penstock.Session(
            penstock.OffloadConfig(**limits, **settings),
            model=self._network,
            machine=self._machine,
            wrap_tier=slow if self._rate else None,
        )

    def run(self, side: str) -> Run:
        """Train in a session of its own."""
        torch.manual_seed(1)
        self._network.load_state_dict(self._state)
        self._network.zero_grad()
        real = self.workload.real
        optimizer = torch.optim.SGD(
            self._network.parameters(), lr=0.02 if real else 1e-3, momentum=0.9 if real else 0.0
        )
        losses, times = [], []
        with switched_off(side), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with self._session() as session:
                for number in range(self.workload.steps):
                    *_, whole, loss = self._step(optimizer, number)
                    times.append(whole)
                    losses.append(loss)
                self._machine = self._machine or session._machine
                facts = facts_of(session, self.workload.steps)
        facts["warnings"] = len(caught)
        bits = (*losses, checksum(self._network))
        return Run(times, bits, facts)

    def _step(self, optimizer: torch.optim.Optimizer, number: int) -> tuple[float, ...]:
        batch = self._batches[number % len(self._batches)]
        start = time.perf_counter()
        loss = self._network(*batch)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return forward - start, backward - forward, end - start, loss.item()

    def time_of(self, run: Run) -> float:
        """What counts of a run."""
        return statistics.median(run.times[STARTED:]) if self.workload.steady else sum(run.times)

    def figures(self) -> dict[str, Any]:
        workload = self.workload
        return {
            "network": workload.network,
            "batches": [[batch, sizes] for batch, sizes in workload.batches],
            "steps": workload.steps,
            "time": "median of the steady state" if workload.steady else "sum of all steps",
            "saved_bytes": self._saved_bytes,
            "budget_bytes": self._budget,
            "host_bytes": int(self._saved_bytes * workload.host_share),
            "flash_capacity": int(self._saved_bytes * workload.flash_share),
            "flash_bytes_per_s": self._rate,
        }


@contextmanager
def switched_off(side: str) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in OFF.get(side, list)():
            stack.enter_context(patch)
        yield


def facts_of(session: penstock.Session, steps: int) -> dict[str, Any]:
    """Figures that tell whether a heuristic took part, and whether the budget was kept."""
    totals = session.recorder.snapshot()
    counters = totals.counters
    plan = session.plan
    assert plan is not None
    return {
        "recipes": sum("->" in path for path in plan.recomputed),
        "modules_recomputed": sum("->" not in path for path in plan.recomputed),
        "slots_encoded": sum(bool(each.codec) for each in plan.decisions),
        "slots_of_signs": sum(each.codec == "positive" for each in plan.decisions),
        "slots_raw": sum(
            each.action is Action.OFFLOAD and not each.codec for each in plan.decisions
        ),
        "plans": session.planner.replans,
        "shortages": counters.get("shortage", 0),
        "over_budget": counters.get("budget.overflow", 0),
        "refused_by_full_tiers": sum(
            count for name, count in counters.items() if name.startswith("spill.full")
        ),
        "peak_over_budget_bytes": max(0, session.budget.peak_bytes - session.budget.limit_bytes),
        "written_bytes": sum(totals.flow(Stage.WRITE, tier).nbytes for tier in ("flash", "host"))
        // steps,
    }


def checksum(network: torch.nn.Module) -> int:
    found = 0
    for tensor in network.state_dict().values():
        found = zlib.crc32(tensor.detach().contiguous().view(-1).numpy(), found)
    return found


# -- showing ------------------------------------------------------------------------------------------


def show(name: str, figures: dict[str, Any]) -> None:
    on = figures[ON]
    print(f"{name}: {on}; same bits: {figures['same_bits']}")
    for side, one in figures["off"].items():
        low, high = one["quartiles"]
        print(
            f"  without {side:<25} {one['ratio']:.3f} ({low:.3f} to {high:.3f}, {one['rounds']} rounds)"
            f"  {difference(on, one)}",
            flush=True,
        )


def difference(on: dict[str, Any], off: dict[str, Any]) -> str:
    """What else is not as it was."""
    return ", ".join(
        f"{name} {on[name]} -> {off[name]}" for name in on if name in off and on[name] != off[name]
    )


def table(figures: dict[str, Any]) -> str:
    """Markdown: a row for each heuristic and workload."""
    lines = [
        "| Switched off | Workload | Time without / with | Nothing switched off |",
        "|---|---|---|---|",
    ]
    sides = dict.fromkeys(side for one in figures.values() for side in one["off"])
    for side in sides:
        if side == CONTROL:
            continue
        for name, one in figures.items():
            if side in one["off"]:
                cells = cell(one["off"][side]), cell(one["off"][CONTROL])
                lines.append(f"| {side} | `{name}` | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def cell(one: dict[str, Any]) -> str:
    low, high = one["quartiles"]
    return f"{one['ratio']:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    _memory.keep_what_is_freed()
    main()
