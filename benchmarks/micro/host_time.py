"""What a saved tensor costs the host on a CUDA device: processor time of enqueuing, in microseconds.

A device does a step no faster than the program's thread enqueues it. A chain of operations without
kernels saves one small tensor each, so that only what the host does takes time:

* "moved": every tensor leaves for host memory and comes back;
* "stays, small": below the floor, where tensors are only counted;
* "stays, planned": above it, in a budget, where the plan keeps them;
* "recomputed": blocks of six modules that save two tensors each, recomputed in backward: per block.

The time of the program's thread, and of backward's, is taken for forward and backward, and that of all
threads, since they share the interpreter's lock. Each is a difference to the plain run of the same
round. Peers run in the same rounds: hooks that do nothing, and ``torch.utils.checkpoint``.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
import penstock
from penstock.core.config import OffloadConfig
from penstock.plan import Action, Decision

NBYTES = 64 * 1024
LENGTH = 64
BLOCKS = 12
MODULES = 6
WARM_UP = 6
COLUMNS = {
    "forward_us": "µs in forward",
    "backward_us": "in backward",
    "all_threads_us": "in all threads",
    "elapsed_us": "elapsed",
}


def main():
    options = parse()
    if not torch.cuda.is_available():
        print("host_time: there is no CUDA device, so there is nothing to measure")
        return
    torch.set_num_threads(1)
    figures = {}
    for name, settings in {
        "moved": {"policy": "all", "codec": "none", "floor": NBYTES // 2, "device_memory": "1MiB"},
        "stays, small": {"policy": "keep", "floor": NBYTES * 2, "device_memory": "1GiB"},
        "stays, planned": {"policy": "auto", "floor": NBYTES // 2, "device_memory": "1GiB"},
    }.items():
        if options.only in name:
            chain = Chain()
            with penstock.offload(host_memory="64MiB", flash=(), **settings) as session:
                figures[name] = compare(chain, session, LENGTH, options)
    if options.only in "recomputed":
        blocks = Blocks()
        settings = {"floor": NBYTES // 2, "device_memory": "1GiB", "host_memory": "64MiB"}
        config = OffloadConfig.from_mapping({"flash": (), "recompute": True} | settings)
        plan = recomputing(blocks, config)
        with penstock.Session(config, model=blocks.network, plan=plan) as session:
            figures["recomputed"] = compare(blocks, session, BLOCKS, options)
    for name, sides in figures.items():
        for side, one in sides.items():
            if isinstance(one, dict):
                times = ", ".join(f"{one[column]:.1f} {what}" for column, what in COLUMNS.items())
                print(f"{name:<15} {side:<9} {times}")
        print(f"{name:<15} {sides['moved_per_step']} moved, {sides['recomputed']} recomputed")
    if not options.quick:
        config = {
            "tensor_bytes": NBYTES,
            "chain": LENGTH,
            "blocks": BLOCKS,
            "modules_of_a_block": MODULES,
            "rounds": options.rounds,
            "device": torch.cuda.get_device_name(),
        }
        path = _results.write("host_time", figures, config)
        print(f"wrote {path.name}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", default="", help="part of the name of what is measured")
    parser.add_argument("--quick", action="store_true", help="no result file")
    return parser.parse_args()


def recomputing(blocks, config):
    """A plan that recomputes every block, and keeps the rest."""
    with penstock.Session(replace(config, policy="keep"), model=blocks.network) as session:
        for _ in range(WARM_UP):
            blocks.step()
        plan, profile = session.plan, session.profile
    paths = tuple(f"Sequential.{number}" for number in range(BLOCKS))
    producers = {slot.key.match_key: slot.producer or "" for slot in profile.slots}

    def decided(key):
        inside = f"{producers[key.match_key]}.".startswith(tuple(f"{path}." for path in paths))
        inside &= key.module.startswith(tuple(f"{path}." for path in paths))
        return Decision(
            key, Action.RECOMPUTE if inside else Action.KEEP, "", "as the benchmark says"
        )

    decisions = tuple(decided(each.key) for each in plan.decisions)
    return replace(plan, policy="by hand", decisions=decisions, recomputed=paths, window_bytes=0)


def compare(work, session, count, options):
    """Differences of the least times to those of plain runs, divided by what there is to pay for."""
    for _ in range(WARM_UP):
        work.step()
    sides = {"plain": [], "peer": [], "penstock": []}
    before = session.recorder.snapshot()
    for _ in range(options.rounds):
        with session.paused():
            sides["plain"].append(work.step())
            with work.peer():
                sides["peer"].append(work.step())
        sides["penstock"].append(work.step())
    after = session.recorder.snapshot()
    plain = least(sides.pop("plain"))
    figures = {
        side: {
            name: round((mine - base) / count * 1e6, 2)
            for name, mine, base in zip(COLUMNS, least(rows), plain, strict=True)
        }
        for side, rows in sides.items()
    }
    figures["plain"] = {
        name: round(base / count * 1e6, 2) for name, base in zip(COLUMNS, plain, strict=True)
    }
    moved = sum(flow.count for (stage, _), flow in after.flows.items() if stage == "copy_out")
    moved -= sum(flow.count for (stage, _), flow in before.flows.items() if stage == "copy_out")
    figures["moved_per_step"] = round(moved / options.rounds, 1)
    figures["recomputed"] = len(session.plan.recomputed) if session.plan else 0
    return figures


def least(rows):
    """The least of each column: other programs only ever add to a time."""
    return [min(column) for column in zip(*rows, strict=True)]


class Work:
    """Steps whose host time is taken."""

    def step(self):
        """Processor seconds of the thread in forward, of backward's thread, of all; and seconds."""
        torch.cuda.synchronize()
        begin = clocks()
        loss = self.forward()
        middle = time.thread_time()
        self.last_hook = loss.register_hook(self.begin_backward)
        loss.backward()
        end_s = self.backward_thread_s
        torch.cuda.synchronize()
        end = clocks()
        return [middle - begin[0], end_s, end[1] - begin[1], end[2] - begin[2]]

    def begin_backward(self, _):
        """Called by the thread that runs backward: it ends with the gradient of ``self.start``."""
        self.began_s = time.thread_time()

    def end_backward(self, _):
        self.backward_thread_s = time.thread_time() - self.began_s


class Save(torch.autograd.Function):
    """Saves its input; launches nothing."""

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return torch.empty(NBYTES // 4, device=value.device)

    @staticmethod
    def backward(ctx, gradient):
        (_,) = ctx.saved_tensors
        return gradient


class Chain(Work):
    """A chain of operations that only save their inputs."""

    def __init__(self):
        self.start = torch.zeros(NBYTES // 4, device="cuda", requires_grad=True)
        self.start.register_post_accumulate_grad_hook(self.end_backward)

    def forward(self):
        value = self.start
        for _ in range(LENGTH):
            value = Save.apply(value)
        return value.sum()

    def peer(self):
        """Hooks that do nothing."""
        return torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each)


class Copying(torch.nn.Module):
    """Saves what it is given, twice, and launches two copies."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, value):
        return Copy.apply(Copy.apply(value))


class Copy(Save):
    """Saves its input; launches a copy, since what is recomputed has to have the same bits."""

    @staticmethod
    def forward(ctx, value):
        return Save.forward(ctx, value).copy_(value)


class Blocks(Work):
    """Blocks of a network, each of which saves as many tensors as a block of GPT-2."""

    def __init__(self):
        self.network = torch.nn.Sequential(
            *(torch.nn.Sequential(*(Copying() for _ in range(MODULES))) for _ in range(BLOCKS))
        ).to("cuda")
        self.start = torch.ones(NBYTES // 4, device="cuda", requires_grad=True)
        self.start.register_post_accumulate_grad_hook(self.end_backward)
        self.checkpointed = False

    def forward(self):
        if not self.checkpointed:
            return self.network(self.start).sum()
        value = self.start
        for block in self.network:
            value = checkpoint(block, value, use_reentrant=False)
        return value.sum()

    def peer(self):
        """``torch.utils.checkpoint`` around each block."""
        return Checkpointed(self)


class Checkpointed:
    def __init__(self, blocks):
        self.blocks = blocks

    def __enter__(self):
        self.blocks.checkpointed = True

    def __exit__(self, *_):
        self.blocks.checkpointed = False


def clocks():
    return time.thread_time(), time.process_time(), time.perf_counter()


if __name__ == "__main__":
    main()
