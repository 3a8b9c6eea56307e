"""Cost of one storage that is moved out and back: processor time, not waiting.

A chain of element-wise operations saves storages just above the floor, and a policy moves every one, to
host memory or to flash. The processor time of forward and backward is taken for the training thread and
for the process (all threads: what engines and completions take), plain and in a session, in turns; a
figure is the median of the differences, divided by the storages. Copies and checksums of the bytes are in
it, which for so few bytes are little.

"warm" is the chain alone. "cold" sweeps over much memory after every operation, forward and backward, as
a network's own work does: what the interpreter needs is then no longer in the processor's caches.
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
from penstock.observe.recorder import Stage

TARGET_MS = 0.4
NBYTES = 72 * 1024
FLOOR = 64 * 1024
LENGTH = 64
WARM_UP = 6
SWEPT_BYTES = 48 << 20
AHEAD = 16
"""Storages that the budget has room for."""


def main():
    options = parse()
    torch.set_num_threads(1)
    figures = {}
    for name, tiers, swept in (
        ("host, warm", {"host_memory": 2 * LENGTH * NBYTES}, None),
        ("flash, warm", {"flash": options.dir}, None),
        ("flash, cold", {"flash": options.dir}, torch.zeros(SWEPT_BYTES // 4)),
    ):
        chain = Chain(swept)
        with penstock.offload(
            device_memory=AHEAD * NBYTES, floor=FLOOR, policy="all", codec="none", **tiers
        ) as session:
            figures[name] = compare(chain, session, options.rounds)
        one = figures[name]
        print(
            f"{name}: {one['training_thread_ms']:.3f} ms of the training thread a storage,"
            f" {one['all_threads_ms']:.3f} of all threads, {one['elapsed_ms']:.3f} elapsed"
            f" ({one['moved_share']:.0%} of the storages moved)",
            flush=True,
        )
    if not options.quick:
        config = {
            "storage_bytes": NBYTES,
            "floor_bytes": FLOOR,
            "chain": LENGTH,
            "budget_bytes": AHEAD * NBYTES,
            "swept_bytes": SWEPT_BYTES,
            "rounds": options.rounds,
        }
        path = _results.write("moved", figures | {"target_ms": TARGET_MS}, config)
        print(f"wrote {path.name}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="few rounds; no result file")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 5
    return options


def compare(chain, session, rounds):
    for _ in range(WARM_UP):
        chain.step()
    costs = []
    before = moved_bytes(session)
    for _ in range(rounds):
        with session.paused():
            plain = chain.step()
        ours = chain.step()
        costs.append([(mine - base) / LENGTH * 1e3 for mine, base in zip(ours, plain, strict=True)])
    moved = (moved_bytes(session) - before) / NBYTES
    columns = list(zip(*costs, strict=True))
    names = ("training_thread_ms", "all_threads_ms", "elapsed_ms")
    figures = {
        name: round(statistics.median(column), 4)
        for name, column in zip(names, columns, strict=True)
    }
    figures |= {
        f"{name}_quartiles": [round(value, 4) for value in statistics.quantiles(column, n=4)[::2]]
        for name, column in zip(names, columns, strict=True)
    }
    return figures | {"moved_share": round(moved / rounds / LENGTH, 3)}


def moved_bytes(session):
    totals = session.recorder.snapshot()
    return sum(totals.flow(Stage.WRITE, tier).nbytes for tier in ("host", "flash"))


class Chain:
    """Forward and backward of a chain of operations, with or without other work in between."""

    def __init__(self, swept):
        self.start = torch.randn(NBYTES // 4, requires_grad=True)
        self.swept = swept

    def step(self):
        """Processor seconds of this thread and of all, and seconds."""
        begin = clocks()
        value = self.start
        for _ in range(LENGTH):
            value = torch.sin(value)
            if self.swept is not None:
                value.register_hook(self.sweep)
                self.sweep()
        total = value.sum()
        del value
        total.backward()
        return [end - at for at, end in zip(begin, clocks(), strict=True)]

    def sweep(self, *_):
        self.swept.add_(1.0)


def clocks():
    return time.thread_time(), time.process_time(), time.perf_counter()


if __name__ == "__main__":
    main()
