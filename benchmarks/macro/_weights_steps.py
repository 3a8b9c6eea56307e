"""Steps of the benchmark of weights on flash, and their figures; peers use them without Penstock."""

import statistics
import sys
import time
from pathlib import Path

import torch

WARM_UP = 2
SAMPLED = 997
"""Every so many logits are compared: a prime, so that they are spread over the vocabulary."""


def all_ids(job):
    """The token ids of every step, int64 of (1, tokens): the same for each side."""
    numbers = torch.Generator().manual_seed(1)
    vocabulary, count = job["vocabulary"], 1 if job["mode"] == "decode" else job["tokens"]
    while True:
        yield torch.randint(0, vocabulary, (1, count), generator=numbers)


def sampled(logits):
    """Some of the last token's logits."""
    return logits[0, -1, ::SAMPLED].float().tolist()


def measure(step, job):
    """Medians of the steps after the first two; ``step`` takes token ids and returns what is compared."""
    outputs, times, moved = [], [], []
    for number, ids in enumerate(all_ids(job)):
        if number == job["steps"] + WARM_UP:
            break
        before, begun = counters(), time.perf_counter()
        outputs.append(step(ids))
        times.append(time.perf_counter() - begun)
        moved.append([now - then for now, then in zip(counters(), before, strict=True)])
        print(f"  {job['side']} step: {times[-1]:.2f} s", file=sys.stderr)
    return {
        "step_s": statistics.median(times[WARM_UP:]),
        "times": times,
        "outputs": outputs,
        "read_bytes": statistics.median(each[0] for each in moved[WARM_UP:]),
        "written_bytes": statistics.median(each[1] for each in moved[WARM_UP:]),
    }


def counters():
    """Bytes that this process has read from devices, and has written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def enter(group):
    """Move this process into a control group, given by its folder."""
    if group:
        Path(group, "cgroup.procs").write_text("0")
