"""How training slows down programs beside it, and they it: offloaded to flash, to host memory, or not.

FlashNeuron (FAST 2021, section 5) moves tensors between GPU and SSD without host memory, and shows that
programs on the CPU then run as fast beside training as beside training that offloads nothing, while
offloading to host memory takes memory bandwidth from them. Here there may be no GPU: the tensors are in
host memory already, flash takes them by DMA, and the host tier copies them with a core.

One training process with one thread has two neighbours in turn, each a process of one thread: one bound
by memory bandwidth (it copies an array larger than any cache), one by its core (it multiplies matrices
that fit in the innermost cache). Every round measures, for each neighbour and each mode of offloading,
steps per second of training and rounds per second of the neighbour while both run; before it, each of
them alone. Ratios are to the neighbour, or to the training, alone in the same round.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _memory

if __name__ == "__main__":
    _memory.keep_what_is_freed()

import numpy as np
import torch

import _results
import penstock
from penstock import zoo

NEIGHBOURS = ("memory", "core")
MODES = ("plain", "flash", "host")
COPY_BYTES = 64 << 20
TILE = 48
"""Floats on the edge of matrices that fit in the innermost cache, three of them."""
BUDGET_SHARE = 0.3


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    figures = measure(args)
    show(figures)
    if not args.quick:
        names = ("network", "batch", "image_size", "rounds", "seconds")
        config = {key: getattr(args, key) for key in names} | {"memory": _memory.KEEPS}
        path = _results.write("interference", figures, config, directory=args.dir)
        print(f"wrote {path.name}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vgg16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory to spill to")
    parser.add_argument("--quick", action="store_true", help="one short round; no result")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 0.3
    return args


def neighbour(kind: str, running: Synchronized[int], rounds: Synchronized[int]) -> None:
    """Work while ``running``, counting rounds; until it is negative."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    tile = np.ones((TILE, TILE), np.float32)
    while running.value >= 0:
        if not running.value:
            time.sleep(0.005)
            continue
        if kind == "memory":
            np.copyto(target, source)
        else:
            for _ in range(500):
                tile @ tile
        rounds.value += 1


class Neighbour:
    """A process beside this one that works when it is told to."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._running, self._rounds = context.Value("q", 0), context.Value("q", 0)
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
        self._process = context.Process(
            target=neighbour, args=(kind, self._running, self._rounds), daemon=True
        )
        self._process.start()

    def start(self) -> None:
        self._running.value = 1
        time.sleep(0.05)
        self._before, self._since = self._rounds.value, time.perf_counter()

    def stop(self) -> float:
        """Rounds per second since ``start``."""
        rate = (self._rounds.value - self._before) / (time.perf_counter() - self._since)
        self._running.value = 0
        return rate

    def close(self) -> None:
        self._running.value = -1
        self._process.join()


class Training:
    """A network under each mode of offloading, one at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.network = zoo.build(args.network, image_size=args.image_size)
        self._batch = zoo.example_batch(self.network, args.batch)
        self._optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3)
        self._directory = args.dir
        with penstock.offload(self.network, policy="keep") as session:
            self.step()
            self.saved_bytes = session.budget.peak_bytes
        self.budget_bytes = int(self.saved_bytes * BUDGET_SHARE)

    def step(self) -> None:
        self.network(self._batch.inputs, self._batch.targets).backward()
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

    def rate(self, seconds: float) -> float:
        """Steps per second."""
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            self.step()
            steps += 1
        return steps / (time.perf_counter() - start)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    training = Training(args)
    neighbours = {kind: Neighbour(kind) for kind in NEIGHBOURS}
    alone: dict[str, list[float]] = {}
    together: dict[tuple[str, str], list[tuple[float, float]]] = {}
    unhindered: dict[str, list[float]] = {}
    try:
        for turn in range(args.rounds):
            for kind, beside in neighbours.items():
                beside.start()
                time.sleep(args.seconds)
                alone.setdefault(kind, []).append(beside.stop())
            for mode in MODES if turn % 2 else reversed(MODES):
                with training.session(mode):
                    for _ in range(3):  # profile, plan, steady state
                        training.step()
                    unhindered.setdefault(mode, []).append(training.rate(args.seconds))
                    for kind, beside in neighbours.items():
                        beside.start()
                        steps = training.rate(args.seconds)
                        together.setdefault((kind, mode), []).append((steps, beside.stop()))
    finally:
        for beside in neighbours.values():
            beside.close()
    figures: dict[str, Any] = {
        "saved_bytes": training.saved_bytes,
        "budget_bytes": training.budget_bytes,
        "cores": os.cpu_count(),
        "training_alone_steps_per_s": {m: statistics.median(r) for m, r in unhindered.items()},
        "training_alone_against_plain": {
            mode: ratio(rates, unhindered["plain"]) for mode, rates in unhindered.items()
        },
    }
    for kind in NEIGHBOURS:
        figures[kind] = {
            mode: {
                "neighbour_slowdown": ratio(alone[kind], [n for _, n in together[kind, mode]]),
                "neighbour_slowdown_against_plain": ratio(
                    [n for _, n in together[kind, "plain"]], [n for _, n in together[kind, mode]]
                ),
                "training_slowdown": ratio(
                    unhindered[mode], [steps for steps, _ in together[kind, mode]]
                ),
            }
            for mode in MODES
        }
    return figures


def ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios of the rounds."""
    pairs = zip(numerators, denominators, strict=True)
    return round(statistics.median(n / d for n, d in pairs), 3)


def show(figures: dict[str, Any]) -> None:
    print("times as long as alone     neighbour  training   neighbour beside plain = 1")
    for kind in NEIGHBOURS:
        for mode in MODES:
            one = figures[kind][mode]
            print(
                f"  {kind:<6} beside {mode:<6}      {one['neighbour_slowdown']:8.2f}  "
                f"{one['training_slowdown']:8.2f}  {one['neighbour_slowdown_against_plain']:8.2f}"
            )
    against = figures["training_alone_against_plain"]
    print("training's speed with nobody beside it, of plain:", against)


if __name__ == "__main__":
    main()
