"""How training slows down programs beside it, and they it: offloaded to flash, to host memory, or not.

FlashNeuron (FAST 2021, section 5) moves tensors between GPU and SSD without host memory, and shows that
programs on the CPU then run as fast beside training as beside training that offloads nothing, while
offloading to host memory takes memory bandwidth from them. Here there may be no GPU: the tensors are in
host memory already, flash takes them by DMA, and the host tier copies them with a core.

So training is played: each layer "computes" by sleeping, as it would on a device of its own, and saves
32 MiB, nearly all of which moves. What training takes of memory is then what offloading takes, and no
more. Its neighbour, a process of one thread, is bound by memory bandwidth (it copies an array larger than
any cache) or by its core (it multiplies matrices that fit in the innermost cache).

Every round measures, for each neighbour and each mode of offloading, what training moves, and rounds of
the neighbour by the clock and by the processor time that it got: the second leaves out that the scheduler
gives its core to threads of the training, and shows what memory is to blame for. ``copies`` is no
training but a process that copies memory all the time, as much as a core can: if that did not slow the
neighbour down, nothing could be shown here. Ratios are to the neighbour alone in the same round, and to
the neighbour beside training that moves nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _memory

if __name__ == "__main__":
    _memory.keep_what_is_freed()

import numpy as np
import torch

import _results
import penstock
from penstock.observe.events import Stage

NEIGHBOURS = ("memory", "core")
MODES = ("plain", "flash", "host")
COPIES = "copies"
MOVES: Final = (Stage.WRITE, Stage.READ)
COPY_BYTES = 64 << 20
LAYERS = 16
LAYER_BYTES = 32 << 20
LAYER_S = 0.01
"""What a layer takes, each way: 3.4 GB/s out, and as much back."""
TILE = 48
"""Floats on the edge of matrices that fit in the innermost cache, three of them."""
BUDGET_SHARE = 0.2
"""Of what is saved; the rest moves, in every step."""


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    figures = measure(args)
    show(figures)
    if not args.quick:
        config = {key: getattr(args, key) for key in ("rounds", "seconds")}
        config |= {
            "layers": LAYERS,
            "layer_bytes": LAYER_BYTES,
            "layer_s": LAYER_S,
            "memory": _memory.KEEPS,
        }
        path = _results.write("interference", figures, config, directory=args.dir)
        print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--quick", action="store_true", help="one short round; no result")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 0.3
    return args


def neighbour(
    kind: str,
    running: Synchronized[int],
    rounds: Synchronized[int],
    processor_s: Synchronized[float],
) -> None:
    """Work while ``running``, counting rounds and processor time; until it is negative."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    tile = np.ones((TILE, TILE), np.float32)
    while running.value >= 0:
        if not running.value:
            time.sleep(0.005)
            continue
        start = time.process_time()
        if kind == "core":
            for _ in range(500):
                tile @ tile
        else:
            np.copyto(target, source)
        processor_s.value += time.process_time() - start
        rounds.value += 1


class Speed(NamedTuple):
    """Rounds per second, by the clock and by the processor time that a process got."""

    clock: float
    processor: float


class Neighbour:
    """A process beside this one that works when it is told to."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._running, self._rounds = context.Value("q", 0), context.Value("q", 0)
        self._processor_s = context.Value("d", 0.0)
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
        shared = (self._running, self._rounds, self._processor_s)
        self._process = context.Process(target=neighbour, args=(kind, *shared), daemon=True)
        self._process.start()

    def start(self) -> None:
        self._running.value = 1
        self._wait_for_a_round()  # it may still be importing what it needs
        self._before = self._rounds.value, self._processor_s.value
        self._since = time.perf_counter()

    def stop(self) -> Speed:
        """How fast it has been since ``start``."""
        self._wait_for_a_round()
        rounds = self._rounds.value - self._before[0]
        processor_s = self._processor_s.value - self._before[1]
        seconds = time.perf_counter() - self._since
        self._running.value = 0
        return Speed(rounds / seconds, rounds / processor_s)

    def _wait_for_a_round(self) -> None:
        rounds = self._rounds.value
        while self._rounds.value == rounds:
            time.sleep(0.001)

    def during(self, seconds: float) -> Speed:
        """How fast it is for so long."""
        self.start()
        time.sleep(seconds)
        return self.stop()

    def close(self) -> None:
        self._running.value = -1
        self._process.join()


class Elsewhere(torch.autograd.Function):
    """Saves its output, and computes where neither this machine's cores nor its memory are needed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(LAYER_S)
        y = torch.empty_like(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(LAYER_S)
        assert ctx.saved_tensors
        return grad


class Chain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale.expand(x.shape)
        for _ in range(LAYERS):
            x = Elsewhere.apply(x)
        return x[0]


class Training:
    """The chain under each mode of offloading, one at a time."""

    def __init__(self, directory: str) -> None:
        self.network = Chain()
        self._input = torch.ones(LAYER_BYTES // 4)
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=0.0)
        self._directory = directory
        with penstock.offload(self.network, policy="keep") as session:
            self.step()
            self.saved_bytes = session.budget.peak_bytes
        self.budget_bytes = int(self.saved_bytes * BUDGET_SHARE)

    def step(self) -> None:
        self.network(self._input).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def session(self, mode: str) -> Any:
        """Raw bytes in every mode, so that what differs is where they go."""
        if mode == "plain":
            return penstock.offload(self.network, self._optimizer, policy="keep")
        where = (
            {"flash": self._directory} if mode == "flash" else {"host_memory": 2 * self.saved_bytes}
        )
        return penstock.offload(
            self.network, self._optimizer, device_memory=self.budget_bytes, codec="none", **where
        )

    def run(self, seconds: float) -> float:
        """Steps per second."""
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            self.step()
            steps += 1
        return steps / (time.perf_counter() - start)


def moved_bytes(session: Any) -> int:
    """Written to tiers and read from them, so far."""
    totals = session.recorder.snapshot()
    return sum(
        flow.nbytes for (stage, tier), flow in totals.flows.items() if tier and stage in MOVES
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    training = Training(args.dir)
    neighbours = {kind: Neighbour(kind) for kind in (*NEIGHBOURS, COPIES)}
    alone: dict[str, list[Speed]] = {kind: [] for kind in NEIGHBOURS}
    beside: dict[tuple[str, str], list[Speed]] = {}
    moved: dict[str, list[float]] = {mode: [] for mode in MODES}
    unhindered: dict[str, list[float]] = {mode: [] for mode in MODES}
    hindered: dict[tuple[str, str], list[float]] = {}
    try:
        for turn in range(args.rounds):
            for kind in NEIGHBOURS:
                alone[kind].append(neighbours[kind].during(args.seconds))
                neighbours[COPIES].start()
                found = neighbours[kind].during(args.seconds)
                neighbours[COPIES].stop()
                beside.setdefault((kind, COPIES), []).append(found)
            for mode in MODES if turn % 2 else reversed(MODES):
                with training.session(mode) as session:
                    for _ in range(3):  # profile, plan, steady state
                        training.step()
                    unhindered[mode].append(training.run(args.seconds))
                    for kind in NEIGHBOURS:
                        before, start = moved_bytes(session), time.perf_counter()
                        neighbours[kind].start()
                        steps = training.run(args.seconds)
                        beside.setdefault((kind, mode), []).append(neighbours[kind].stop())
                        hindered.setdefault((kind, mode), []).append(steps)
                        if kind == "memory":
                            bytes_per_s = moved_bytes(session) - before
                            moved[mode].append(bytes_per_s / (time.perf_counter() - start))
    finally:
        for each in neighbours.values():
            each.close()
    figures: dict[str, Any] = {
        "saved_bytes": training.saved_bytes,
        "budget_bytes": training.budget_bytes,
        "cores": os.cpu_count(),
        "moved_bytes_per_s": {mode: round(statistics.median(each)) for mode, each in moved.items()},
        "training_alone_against_plain": {
            mode: ratio(rates, unhindered["plain"]) for mode, rates in unhindered.items()
        },
    }
    figures["copied_bytes_per_s"] = round(
        COPY_BYTES * statistics.median(each.clock for each in alone["memory"])
    )
    for kind in NEIGHBOURS:
        figures[kind] = {}
        for mode in (COPIES, *MODES):
            found = beside[kind, mode]
            one = figures[kind][mode] = slower(alone[kind], found)
            if mode != COPIES:
                one["beside_plain"] = slower(beside[kind, "plain"], found)
                one["training"] = ratio(unhindered[mode], hindered[kind, mode])
    return figures


def slower(alone: list[Speed], beside: list[Speed]) -> dict[str, Any]:
    """How many times as long the neighbour takes."""
    return {
        "clock": ratio([each.clock for each in alone], [each.clock for each in beside]),
        "processor": ratio([each.processor for each in alone], [each.processor for each in beside]),
    }


def ratio(numerators: list[float], denominators: list[float]) -> dict[str, float]:
    """The median of the ratios of the rounds, and the least and most of them."""
    found = [n / d for n, d in zip(numerators, denominators, strict=True)]
    figures = {"median": statistics.median(found), "least": min(found), "most": max(found)}
    return {name: round(figure, 3) for name, figure in figures.items()}


def show(figures: dict[str, Any]) -> None:
    moved = {mode: f"{each / 1e9:.2f} GB/s" for mode, each in figures["moved_bytes_per_s"].items()}
    print("training moves:", moved)
    print(f"the neighbour alone copies {figures['copied_bytes_per_s'] / 1e9:.1f} GB/s")
    print("times as long as alone: by the clock; by processor time; as beside plain; training")
    for kind in NEIGHBOURS:
        for mode, one in figures[kind].items():
            parts = [one["clock"], one["processor"]]
            if mode != COPIES:
                parts += [one["beside_plain"]["processor"], one["training"]]
            print(f"  {kind:<6} beside {mode:<6}  ", ";  ".join(map(text, parts)))
    alone = figures["training_alone_against_plain"]
    print(
        "training's speed with nobody beside it, of plain:", {m: text(r) for m, r in alone.items()}
    )


def text(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['least']:.2f} to {found['most']:.2f})"


if __name__ == "__main__":
    main()
