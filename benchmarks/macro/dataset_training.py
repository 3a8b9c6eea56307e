"""Training from flash with 64 MiB of loader memory, beside the same batches from memory.

Both sides train the same network from the same weights on the same batches in the same order; they take
turns, a few steps at a time, so that what else the machine does hits both. Losses must be the same bits.

    python benchmarks/macro/dataset_training.py --dir /nvme/scratch
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

import _results
from penstock.data import FlashDataset, FlashLoader
from penstock.lab import zoo

LIMIT = 1.02
TURN = 4


def text_set(folder, nbytes, length):
    tokens = np.random.default_rng(0).integers(0, 4096, nbytes // 2).astype("<u2")
    tokens.tofile(folder / "tokens.bin")
    return FlashDataset(folder / "tokens.bin", memory="64MiB", context=length, index_dir=folder)


def image_set(folder, nbytes, side):
    count = nbytes // (3 * side * side)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, side, side), np.uint8)
    np.save(folder / "pixels.npy", pixels)
    return FlashDataset(folder / "pixels.npy", memory="64MiB", index_dir=folder)


def text_step(batch):
    return batch[:, :-1], batch[:, 1:]


def image_step(batch):
    return batch.float() / 255, batch[:, 0, 0, 0].long() % 10


CASES = {
    "gpt2": (
        {"depth": 4, "width": 256, "heads": 4, "vocab_size": 4096, "sequence_length": 128},
        lambda folder, nbytes: text_set(folder, nbytes, 128),
        text_step,
    ),
    "resnet50": (
        {"image_size": 64, "num_classes": 10},
        lambda folder, nbytes: image_set(folder, nbytes, 64),
        image_step,
    ),
}


class Side:
    """A network that trains on an iterator of batches."""

    def __init__(self, name, overrides, batches, prepare):
        torch.manual_seed(0)
        self.network = zoo.build(name, **overrides)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-3, momentum=0.9)
        self.batches, self.prepare = batches, prepare
        self.losses, self.times_s = [], []

    def turn(self, steps):
        for _ in range(steps):
            started = time.perf_counter()
            inputs, targets = self.prepare(next(self.batches))
            torch.manual_seed(len(self.losses))  # of dropout
            loss = self.network(inputs, targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
            self.times_s.append(time.perf_counter() - started)


def run(options, name):
    overrides, make, prepare = CASES[name]
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        dataset = make(Path(folder), options.mib << 20)
        with FlashLoader(dataset, options.batch, seed=1) as first:
            in_memory = [batch for _, batch in zip(range(options.steps), first, strict=False)]
        with FlashLoader(dataset, options.batch, seed=1) as loader:
            memory = Side(name, overrides, iter(in_memory), prepare)
            flash = Side(name, overrides, iter(loader), prepare)
            sides = [memory, flash]
            for turn in range(options.steps // TURN):
                for side in sides[:: 1 if turn % 2 else -1]:
                    side.turn(TURN)
            stats = loader.stats()
    warm = TURN
    medians = [statistics.median(side.times_s[warm:]) for side in sides]
    same = all(torch.equal(a, b) for a, b in zip(memory.losses, flash.losses, strict=True))
    return {
        "losses_same_bits": same,
        "steps": len(flash.losses),
        "step_s_in_memory": round(medians[0], 4),
        "step_s_from_flash": round(medians[1], 4),
        "ratio_of_medians": round(medians[1] / medians[0], 4),
        "mean_ratio": round(sum(flash.times_s[warm:]) / sum(memory.times_s[warm:]), 4),
        "waited_share": round(stats["waited_s"] / sum(flash.times_s), 4),
        "held_mib": round(stats["held_bytes"] / 2**20, 1),
        "batches_ahead": stats["batches_ahead"],
        "order": loader.order.kind,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the data go")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--mib", type=int, default=512, help="of data")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, help="of each side (40; quick: 8)")
    parser.add_argument("--results", default=_results.RESULTS, help="where the result goes")
    options = parser.parse_args(arguments)
    options.steps = options.steps or (8 if options.quick else 40)
    _results.warn_if_busy()
    figures = {name: run(options, name) for name in CASES}
    for name, each in figures.items():
        print(f"{name}: {each} (limit of the ratio {LIMIT})")
    config = {"data_mib": options.mib, "batch": options.batch, "memory": "64MiB", "networks": {}}
    config["networks"] = {name: case[0] for name, case in CASES.items()}
    _results.write(
        Path(__file__).stem, figures, config, directory=options.dir, into=options.results
    )


if __name__ == "__main__":
    main()
