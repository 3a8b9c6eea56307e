"""What a saved tensor that stays costs: its pack, its unpack and its release, in microseconds.

A chain of element-wise operations saves one tensor each. Its forward and backward are timed plain, under
hooks that do nothing (the least that PyTorch charges), and in a session where everything stays: below
the floor, where tensors are only counted; above it without a budget, where they are too; and above it in
a budget, where the plan keeps them but could be wrong, so that each remains ready to be spilled. The
rounds of all take turns; figures are medians of the differences to the plain run of the same round.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _results
import penstock

TARGET_US = 10.0
NBYTES = 8192
LENGTH = 400


def main():
    options = parse()
    torch.set_num_threads(1)
    start = torch.randn(NBYTES // 4, requires_grad=True)
    figures = {}
    for name, floor, budget in (
        ("below the floor", NBYTES * 2, "1GiB"),
        ("above it, no budget", NBYTES // 2, None),
        ("above it, in a budget that it could be spilled for", NBYTES // 2, "1GiB"),
    ):
        with penstock.offload(device_memory=budget, flash=options.dir, floor=floor) as session:
            figures[name] = compare(start, session, options.rounds)
    for name, costs in figures.items():
        print(
            f"{name}: {costs['penstock_us']:.1f} µs a tensor"
            f" (forward {costs['penstock_forward_us']:.1f}), {costs['idle_hooks_us']:.1f} µs of them"
            " for hooks that do nothing"
        )
    if not options.quick:
        config = {"tensor_bytes": NBYTES, "chain": LENGTH, "rounds": options.rounds}
        path = _results.write("hooks", figures | {"target_us": TARGET_US}, config)
        print(f"wrote {path.name}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="few rounds; no result file")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 5
    return options


def compare(start, session, rounds):
    idle = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed)
    costs = {"idle_hooks": [], "penstock": []}
    for _ in range(rounds):
        with session.paused():
            plain = chain(start)
            with idle:
                hooked = chain(start)
        ours = chain(start)
        for name, times in (("idle_hooks", hooked), ("penstock", ours)):
            costs[name].append(
                [(mine - base) / LENGTH * 1e6 for mine, base in zip(times, plain, strict=True)]
            )
    figures = {}
    for name, times in costs.items():
        forward, both = (statistics.median(column) for column in zip(*times, strict=True))
        figures |= {f"{name}_forward_us": round(forward, 2), f"{name}_us": round(both, 2)}
    return figures


def chain(start):
    """Seconds of forward, and of forward and backward with the release of every tensor."""
    begin = time.perf_counter()
    value = start
    for _ in range(LENGTH):
        value = torch.sin(value)
    forward = time.perf_counter()
    total = value.sum()
    del value
    total.backward()
    return forward - begin, time.perf_counter() - begin


if __name__ == "__main__":
    main()
