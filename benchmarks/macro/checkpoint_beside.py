"""How much longer forward and backward take while a checkpoint is saved beside them: one engine, or two.

Training is played: each layer "computes" by sleeping, as it would on a device of its own, and saves
32 MiB, most of which is offloaded to flash. In some steps a checkpoint begins to be saved beside training
when forward begins. The sides, which take turns within a round:

* ``alone``: no checkpoint;
* ``shared``: the checkpoint goes through the engine of the process, where reads of backward overtake it;
* ``separate``: the checkpoint has an engine of its own, so that the two share the device as it pleases.

Flash is what it is (``plain``), or one emulated device behind all engines that serves one call after the
other at a given bandwidth (``throttled``). The stall is what forward and backward take longer than their
layers sleep; the update, which waits for the save where it must, comes later.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _memory

if __name__ == "__main__":
    _memory.keep_what_is_freed()

import torch

import _results
import penstock
from penstock.checkpoint import Checkpointer
from penstock.checkpoint.api import CheckpointStore
from penstock.core.units import MIB
from penstock.io.aio import default_engine
from penstock.io.engine import Engine, File
from penstock.io.threads import Syscalls, ThreadEngine
from penstock.testing.shared_engine import shared_engine_replaced

SIDES = ("alone", "separate", "shared")
LAYERS = 16
LAYER_BYTES = 32 * MIB
KEPT_LAYERS = 4
BALLAST_BYTES = 2048 * MIB
"""Bytes of the checkpoint."""
LAYER_S: Final = {"plain": 0.02, "throttled": 0.025}
"""Seconds of a layer, each way: activations take half to four fifths of the bandwidth."""
THROTTLED_BYTES_PER_S = 1.25e9
THREADS = 6
PIECE_BYTES = 4 * MIB


class SlowDevice(Syscalls):
    """Serves one call after the other, in the order in which they come, at a bandwidth."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def read(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        return self._served(super().read, file, address, nbytes, offset_bytes)

    def write(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        return self._served(super().write, file, address, nbytes, offset_bytes)

    def _served(self, call: Any, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        with self._lock:
            start = max(self._free_s, time.perf_counter())
            end = self._free_s = start + nbytes / self._bytes_per_s
        found = call(file, address, nbytes, offset_bytes)
        time.sleep(max(0.0, end - time.perf_counter()))
        return found


class Elsewhere(torch.autograd.Function):
    """Saves its output, and computes where none of this machine's cores is needed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer_s: float) -> torch.Tensor:
        time.sleep(layer_s)
        y = torch.empty_like(x)
        ctx.save_for_backward(y)
        ctx.layer_s = layer_s
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.layer_s)
        assert ctx.saved_tensors
        return grad, None


class Chain(torch.nn.Module):
    """Layers, and the ballast that makes a checkpoint long."""

    def __init__(self, layer_s: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.ballast = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(64 * MIB // 4))
            for _ in range(BALLAST_BYTES // (64 * MIB))
        )
        self._layer_s = layer_s

    def forward(self) -> torch.Tensor:
        x = self.scale.expand(LAYER_BYTES // 4)
        for _ in range(LAYERS):
            x = Elsewhere.apply(x, self._layer_s)
        return x[0]


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    figures = {flash: measure(args, flash) for flash in args.flash}
    for flash, found in figures.items():
        show(flash, found)
    if not args.quick:
        config = {
            "rounds": args.rounds,
            "layers": LAYERS,
            "layer_bytes": LAYER_BYTES,
            "layer_s": LAYER_S,
            "checkpoint_bytes": BALLAST_BYTES,
            "throttled_bytes_per_s": THROTTLED_BYTES_PER_S,
        }
        _results.write(Path(__file__).stem, figures, config, directory=args.dir)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="directory on flash")
    parser.add_argument("--flash", nargs="*", choices=LAYER_S, default=list(LAYER_S))
    parser.add_argument("--quick", action="store_true", help="two rounds; no result")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 2
    return args


def measure(args: argparse.Namespace, flash: str) -> dict[str, Any]:
    _results.warn_if_busy()
    device = SlowDevice(THROTTLED_BYTES_PER_S) if flash == "throttled" else None

    def engine() -> Engine:
        return (
            default_engine()
            if device is None
            else ThreadEngine(THREADS, PIECE_BYTES, syscalls=device)
        )

    network = Chain(LAYER_S[flash])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    stores = {"shared": CheckpointStore(), "separate": CheckpointStore(make_engine=engine)}
    sides: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with (
        nullcontext() if device is None else shared_engine_replaced(engine()),
        tempfile.TemporaryDirectory(dir=args.dir) as folder,
        penstock.offload(
            network,
            optimizer,
            device_memory=KEPT_LAYERS * LAYER_BYTES,
            flash=folder,
            flash_capacity=2 * LAYERS * LAYER_BYTES,
            codec="none",
        ),
    ):
        checkpoints = {
            side: Checkpointer(f"{folder}/{side}", keep=1, store=store)
            for side, store in stores.items()
        }
        for turn in range(-2, args.rounds):  # in the first ones plans and files are made
            for side in SIDES if turn % 2 else reversed(SIDES):
                found = step(network, checkpoints.get(side), turn + 2, optimizer)
                if turn >= 0:
                    sides[side].append(found)
        for each in checkpoints.values():
            each.close()
    return figures_of(sides)


def step(
    network: Chain,
    checkpoints: Checkpointer | None,
    number: int,
    optimizer: torch.optim.Optimizer,
) -> dict[str, float]:
    """Train one step, beside a save if there is a checkpointer: how long passes and the save took."""
    begun = time.perf_counter()
    saving = None
    if checkpoints is not None:
        state = {"network": network, "optimizer": optimizer}
        saving = checkpoints.save(number, state, wait=False)
    start = time.perf_counter()
    loss = network()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    found = {
        "forward_stall_s": middle - start - LAYERS * network._layer_s,
        "backward_stall_s": end - middle - LAYERS * network._layer_s,
        "stall_s": end - start - 2 * LAYERS * network._layer_s,
        "save_s": 0.0,
    }
    optimizer.step()
    optimizer.zero_grad()
    if saving is not None:
        saving.wait()
        found["save_s"] = time.perf_counter() - begun
    return found


def figures_of(sides: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for side, rounds in sides.items():
        figures[side] = {
            name: _results.summary([each[name] for each in rounds]) for name in rounds[0]
        }
    pairs = list(zip(sides["separate"], sides["shared"], strict=True))
    for name in ("stall_s", "save_s"):
        ratios = [shared[name] / separate[name] for separate, shared in pairs]
        figures[f"{name[:-2]}_shared_of_separate"] = _results.summary(ratios)
    return figures


def show(flash: str, figures: dict[str, Any]) -> None:
    for side in SIDES:
        found = ", ".join(f"{name} {one['median']:.3f}" for name, one in figures[side].items())
        print(f"{flash}, {side}: {found}")
    print(f"{flash}: stall of shared over separate {figures['stall_shared_of_separate']}")


if __name__ == "__main__":
    main()
