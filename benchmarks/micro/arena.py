"""The arena in its steady state: page faults and time per block, beside torch's own allocator.

A training step asks for the same sizes again and again. Memory from the general allocator is new
each time for blocks this large: the kernel zeroes it page by page, on first use. The arena's is not.

    python benchmarks/micro/arena.py
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import _results
from penstock.core.units import MIB
from penstock.store.account import Account
from penstock.store.arena import Arena

SIZES = [64 * MIB, 8 * MIB, 3 * MIB + 4096, MIB, 24 * MIB, 200_000]
"""Bytes of the blocks of one step; all are held at once."""
PAGE_BYTES = 4096
CAPACITY_BYTES = 256 * MIB


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def steps_of_arena(arena, *, touch):
    """Allocate, lend to torch, perhaps write, drop."""

    def step():
        tensors = []
        for nbytes in SIZES:
            tensor = torch.from_numpy(arena.allocate(nbytes).lend(0, nbytes))
            if touch:
                tensor[::PAGE_BYTES] = 1
            tensors.append(tensor)

    return step


def steps_of_torch(*, touch):
    """The same from torch's allocator."""

    def step():
        tensors = []
        for nbytes in SIZES:
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            if touch:
                tensor[::PAGE_BYTES] = 1
            tensors.append(tensor)

    return step


def steps_of_blocks(arena):
    """Allocate and free alone, without an array."""

    def step():
        for block in [arena.allocate(nbytes) for nbytes in SIZES]:
            block.free()

    return step


def measure(step, cycles, rounds):
    """Nanoseconds and page faults per block, over ``rounds`` of ``cycles`` blocks."""
    step()
    steps = -(-cycles // len(SIZES))
    blocks = steps * len(SIZES)
    times, faults = [], []
    for _ in range(rounds):
        before, start = page_faults(), time.perf_counter_ns()
        for _ in range(steps):
            step()
        times.append((time.perf_counter_ns() - start) / blocks)
        faults.append(page_faults() - before)
    return {
        "ns_per_block": _results.summary(times, 0),
        f"page_faults_in_{blocks}_blocks": _results.summary(faults, 0),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--cycles", type=int, default=1000, help="blocks per round")
    parser.add_argument("--rounds", type=int, help="7; quick: 3")
    parser.add_argument("--results", default=_results.RESULTS, help="where the result goes")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (3 if options.quick else 7)
    _results.warn_if_busy()
    torch.set_num_threads(1)
    arena = Arena(CAPACITY_BYTES, account=Account(CAPACITY_BYTES))
    figures = {
        "arena_allocate_free": measure(steps_of_blocks(arena), options.cycles, rounds),
        "arena_to_torch": measure(steps_of_arena(arena, touch=False), options.cycles, rounds),
        "torch_empty": measure(steps_of_torch(touch=False), options.cycles, rounds),
        "arena_to_torch_touched": measure(
            steps_of_arena(arena, touch=True), options.cycles // 10, rounds
        ),
        "torch_empty_touched": measure(steps_of_torch(touch=True), options.cycles // 10, rounds),
        "arena_touched_bytes": arena.touched_bytes,
        "bytes_of_one_step": sum(SIZES),
    }
    arena.close()
    config = {
        "quick": options.quick,
        "cycles": options.cycles,
        "rounds": rounds,
        "sizes_bytes": SIZES,
        "capacity_bytes": CAPACITY_BYTES,
        "touch": f"one byte every {PAGE_BYTES}",
        "torch_threads": 1,
    }
    path = _results.write(Path(__file__).stem, figures, config, into=options.results)
    for name, figure in figures.items():
        if isinstance(figure, dict):
            faults = next(value for key, value in figure.items() if key.startswith("page_faults"))
            print(
                f"{name:24} {figure['ns_per_block']['median']:9.0f} ns per block,"
                f" {faults['median']:7.0f} page faults a round"
            )
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
