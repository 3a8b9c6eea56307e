"""Saves a model whose weights rest on flash, and prints what that took of memory.

    python weights_memory_program.py DIRECTORY WAY STATE

See ``test_weights_memory.py``. Prints one JSON object.
"""

import json
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import penstock
from penstock import checkpoint, weights
from penstock.core.units import MIB

WIDTH, DEPTH = 2048, 24
WEIGHT_BYTES = 4 * WIDTH * WIDTH
"""Of each of the weights, 16 MiB."""


def anonymous_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise KeyError


class Peak:
    """The most anonymous memory, beyond what there is at the start, as a thread sees it."""

    def __enter__(self):
        self.before = self.most = anonymous_bytes()
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.end.wait(0.002):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_):
        self.end.set()
        self.thread.join()
        self.growth = max(self.most, anonymous_bytes()) - self.before


def model_of(depth=DEPTH):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)))


def save(model, way, path):
    if way == "state_dict":
        state = model.state_dict()
        return lambda: state
    if way == "torch.save":
        torch.save(model.state_dict(), path)
        return lambda: torch.load(path, mmap=True)
    if way == "weights.save":
        weights.save(model, path)
        return lambda: load_file(path / "model.safetensors")
    if way == "checkpoint.save":
        checkpoint.save(path, {"model": model})
        return lambda: checkpoint.load(path)["model"]
    with checkpoint.Checkpointer(path) as checkpoints:
        checkpoints.save(1, {"model": model}, wait=False)
        checkpoints.wait()
        [saved] = checkpoints.checkpoints()
    return lambda: checkpoint.load(saved.path)["model"]


def main(directory, way, state):
    torch.set_num_threads(1)
    little = model_of(1)  # libraries and pools are there then
    save(little, way, Path(directory, "little"))()
    with penstock.built_on_flash(directory):
        model = model_of()
    session = nullcontext()
    if state == "session":
        session = penstock.offload(
            model, weights="flash", weights_memory="48MiB", flash=directory, device_memory="64MiB"
        )
    with session:
        if state == "session":
            with torch.no_grad():
                model(torch.ones(1, WIDTH))
        with Peak() as peak:
            load = save(model, way, Path(directory, "saved"))
        found = load()
        expected = model_of().state_dict()
        same = found.keys() == expected.keys() and all(
            torch.equal(found[name], each) for name, each in expected.items()
        )
    print(json.dumps({"growth_mib": peak.growth / MIB, "same": same}))


if __name__ == "__main__":
    main(*sys.argv[1:])
