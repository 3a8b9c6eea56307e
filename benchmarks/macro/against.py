"""Every product of this tree beside another tree of Penstock, in turns, in one run.

    python benchmarks/macro/against.py --against ../other-tree
    python benchmarks/macro/against.py --against ../other-tree --products optimizer checkpoint --rounds 9

Each product is a small program on the public interface. For both trees it runs in a process of its own,
which stays alive and does one turn when it is asked to: the two take turns, every other round in reverse,
so that a machine that drifts drifts for both alike. A figure is a time; what counts is the ratio of the
times of the same round, this tree's over the other's: less than one is faster. Shown are its median and
quartiles, and the ratio of the best times of both, which others on the machine disturb least. The first
turn of each process does not count.

On a machine that others use, set ``OMP_NUM_THREADS=1``: a team of two computing threads waits for the one
that lost its core, so that a step of ``activations`` takes ten times as long as with one thread.

* ``kept``: a saved tensor that stays; one that stays, but could be moved;
* ``moved``: a step of a chain whose small storages all move to flash and back: Python's time;
* ``activations``: a step of ResNet-50, 16 images of 96 x 96, at 15 % of what it saves, and a plain step;
* ``optimizer``: a step of AdamW with exact states on flash, as they are and squeezed;
* ``gradients``: forward, backward and step of a GPT with a quarter of its gradients in memory;
* ``checkpoint``: saved into new files, over those of a retired one, loaded in place from flash;
* ``data``: an epoch in sequence, in samples of 1 MiB, and shuffled in a window, in samples of 4 KiB;
* ``suspend``: a job's memory to flash and back.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers"), str(BENCHMARKS / "micro")]

Turns = Iterator[dict[str, float]]
"""A program's times of each turn, in seconds by name."""
# ruff: noqa: PLC0415  (a side imports what its product needs, from the tree that it measures)


def kept(directory: str) -> Turns:
    import torch

    import hooks
    import penstock

    torch.set_num_threads(1)
    start = torch.randn(hooks.NBYTES // 4, requires_grad=True)
    floors = {"only counted": hooks.NBYTES * 2, "could be moved": hooks.NBYTES // 2}
    while True:
        times = {}
        for name, floor in floors.items():
            with penstock.offload(device_memory="1GiB", flash=directory, floor=floor) as session:
                for _ in range(6):
                    hooks.chain(start)
                spans = [hooks.chain(start)[1] for _ in range(15)]
                with session.paused():
                    plain = [hooks.chain(start)[1] for _ in range(15)]
            times[name] = (statistics.median(spans) - statistics.median(plain)) / hooks.LENGTH
        yield times


def moved(directory: str) -> Turns:
    import moved as micro
    import torch

    import penstock

    torch.set_num_threads(1)
    chain = micro.Chain(None)
    with penstock.offload(
        device_memory=micro.AHEAD * micro.NBYTES,
        floor=micro.FLOOR,
        policy="all",
        codec="none",
        flash=directory,
    ):
        for _ in range(micro.WARM_UP):
            chain.step()
        while True:
            steps = [chain.step() for _ in range(20)]
            thread_s, process_s, _ = (
                statistics.median(column) for column in zip(*steps, strict=True)
            )
            yield {"training thread": thread_s, "all threads": process_s}


def activations(directory: str) -> Turns:
    import torch

    import penstock
    from penstock.lab import zoo

    torch.manual_seed(0)
    network = zoo.build("resnet50", image_size=96)
    batch = zoo.example_batch(network, 16)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)

    def step() -> float:
        start = time.perf_counter()
        network(batch.inputs, batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    step()
    with penstock.offload(network, policy="keep") as session:
        step()
        saved_bytes = session.budget.peak_bytes
    with penstock.offload(
        network, optimizer, device_memory=int(0.15 * saved_bytes), flash=directory
    ) as session:
        for _ in range(4):
            step()
        while True:
            with session.paused():
                step()
                plain = min(step() for _ in range(2))
            step()
            ours = min(step() for _ in range(2))
            yield {"step": ours, "plain step": plain, "step over plain": ours / plain}


def optimizer(directory: str) -> Turns:
    import torch

    from penstock.optim import FlashAdamW

    weights = [torch.nn.Parameter(torch.randn(1 << 23)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    both = {}
    for name, squeeze in (("plain records", False), ("squeezed records", True)):
        # not adaptive: records of random numbers are at its threshold, so noise would choose
        folder = Path(directory, name)
        folder.mkdir()
        both[name] = FlashAdamW(
            weights, lr=1e-4, flash=str(folder), host_memory="128MiB", squeeze=squeeze
        )
    while True:
        times = {}
        for name, states in both.items():
            spans = []
            for _ in range(3):
                start = time.perf_counter()
                states.step()
                spans.append(time.perf_counter() - start)
            times[name] = statistics.median(spans)
        yield times


def gradients(directory: str) -> Turns:
    import _gpt
    import torch

    from penstock.optim import FlashAdamW

    torch.manual_seed(0)
    network = _gpt.GPT(30e6, 256)
    ids = torch.randint(0, _gpt.VOCABULARY, (1, 256))
    budget = sum(each.nbytes for each in network.parameters()) // 4
    states = FlashAdamW(network.parameters(), flash=directory, gradient_memory=budget)
    while True:
        spans = []
        for _ in range(3):
            start = time.perf_counter()
            network(ids).backward()
            states.step()
            network.zero_grad(set_to_none=True)
            spans.append(time.perf_counter() - start)
        yield {"step": statistics.median(spans)}


def checkpoint(directory: str) -> Turns:
    import torch

    from penstock import checkpoint as checkpoints

    torch.manual_seed(0)
    state = {f"{index}": torch.randn(1 << 22) for index in range(48)}
    state |= {f"small {index}": torch.randn(768) for index in range(200)}
    folder = Path(directory)
    with checkpoints.Checkpointer(folder / "kept", keep=1) as keeper:
        for step in range(2):
            keeper.save(step, state)
        while True:
            times = {
                "save into new files": seconds(lambda: checkpoints.save(folder / "new", state))
            }
            for file in (folder / "new").iterdir():
                with file.open() as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            times["load in place"] = seconds(lambda: checkpoints.load(folder / "new", state))
            step += 1
            times["save over a retired one"] = seconds(lambda: keeper.save(step, state))  # noqa: B023
            shutil.rmtree(folder / "new")
            yield times


def data(directory: str) -> Turns:
    import numpy as np

    from penstock.data import FlashDataset, FlashLoader

    path, loaders = Path(directory) / "rows.bin", {}
    random, nbytes = np.random.default_rng(0), 1 << 29
    with path.open("wb") as file:
        for _ in range(nbytes >> 26):
            file.write(random.integers(0, 256, 1 << 26, np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for name, size, order in (
        ("in sequence, 1 MiB", 1 << 20, "sequential"),
        ("window, 4 KiB", 1 << 12, "window"),
    ):
        dataset = FlashDataset(
            path,
            format="tokens",
            decode="raw",
            memory="64MiB",
            index_dir=directory,
            context=size,
            dtype="uint8",
            extra=0,
        )
        batch_size = max(4, min(64, (1 << 20) // size))
        loaders[name] = FlashLoader(dataset, batch_size, order=order, seed=1)
    while True:
        yield {
            name: seconds(lambda: sum(1 for _ in loader))  # noqa: B023
            for name, loader in loaders.items()
        }


def suspend(directory: str) -> Turns:
    import torch

    import penstock

    network = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(10)])
    adam = torch.optim.AdamW(network.parameters())
    inputs = torch.randn(4, 2048)
    with penstock.offload(network, adam, flash=directory) as session:
        while True:
            network(inputs).square().mean().backward()
            adam.step()
            yield {
                "suspend": seconds(lambda: penstock.suspend(session)),
                "resume": seconds(lambda: penstock.resume(session)),
            }


def seconds(work: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


PRODUCTS = {
    each.__name__: each
    for each in (kept, moved, activations, optimizer, gradients, checkpoint, data, suspend)
}


class Side:
    """One product of one tree, in a process of its own."""

    def __init__(self, product: str, tree: Path, directory: str) -> None:
        import _memory

        self.folder = tempfile.mkdtemp(prefix="penstock-against-", dir=directory)
        environment = os.environ | _memory.KEEPS | {"PYTHONPATH": str(tree / "src")}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--side", product, "--dir", self.folder],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def turn(self) -> dict[str, float]:
        """Times of the next turn."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(self.process.args)}: exit {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process, remove its files."""
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_side(product: str, directory: str) -> None:
    """Do turns as they are asked for; ends with its parent's pipe."""
    turns = PRODUCTS[product](directory)
    for _ in sys.stdin:
        print(json.dumps(next(turns)), flush=True)
    os._exit(0)


def compare(product: str, trees: dict[str, Path], rounds: int, directory: str) -> dict[str, Any]:
    """Return the medians of both trees, and the ratios of the rounds and of the best times."""
    sides = {}
    try:
        for name, tree in trees.items():
            sides[name] = Side(product, tree, directory)
            sides[name].turn()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for turn in range(rounds):
            for name in list(sides) if turn % 2 else reversed(list(sides)):
                found[name].append(sides[name].turn())
    finally:
        for side in sides.values():
            side.close()
    figures = {}
    for what in found["this"][0]:
        ours, theirs = ([one[what] for one in found[name]] for name in ("this", "other"))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        figures[what] = {
            "this": round(statistics.median(ours), 6),
            "other": round(statistics.median(theirs), 6),
            "ratio": round(statistics.median(ratios), 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "best": round(min(ours) / min(theirs), 3),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="the other tree: a folder with src/penstock")
    parser.add_argument("--products", nargs="*", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="a directory on flash")
    parser.add_argument("--into", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--side", choices=PRODUCTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.dir)
        return
    if options.against is None or not (options.against / "src" / "penstock").is_dir():
        parser.error("--against needs a folder with src/penstock")
    trees = {"this": BENCHMARKS.parent, "other": options.against.resolve()}
    figures = {}
    for product in options.products:
        start = time.monotonic()
        figures[product] = compare(product, trees, options.rounds, options.dir)
        for what, one in figures[product].items():
            low, high = one["quartiles"]
            print(
                f"{product:<12} {what:<24} {one['ratio']:6.3f} ({low:.3f} to {high:.3f})"
                f"   best {one['best']:6.3f}   {one['this']:9.5f} against {one['other']:9.5f}"
            )
        print(f"{product:<12} took {time.monotonic() - start:.0f} s", flush=True)
        if options.into:
            options.into.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
