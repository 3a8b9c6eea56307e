"""Steps of the benchmark of weights on flash, and their figures; peers use them without Penstock."""

import json
import os
import sys
import time
from pathlib import Path

import torch

CGROUPS = Path("/sys/fs/cgroup/memory")
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


def serve(step, job, *, to=sys.stdout, **known):
    """Make one step for each line of stdin, and write its figures as a line of JSON.

    Before the first, write a line with what is known already.

    Args:
        step: Takes token ids, and returns what is compared.
        job: What this side was told.
        to: Stream that the lines go to.
    """
    write(known, to)
    for _, ids in zip(sys.stdin, all_ids(job), strict=False):
        before, begun = counters(), time.perf_counter()
        busy = disk_busy_s(job)
        outputs = step(ids)
        took = time.perf_counter() - begun
        read, written = (now - then for now, then in zip(counters(), before, strict=True))
        figures = {"step_s": took, "outputs": outputs, "read_bytes": read, "written_bytes": written}
        if busy is not None:
            figures["disk_busy"] = (disk_busy_s(job) - busy) / took
        write(figures, to)


def write(figures, to=sys.stdout):
    """Write one line of JSON."""
    to.write(json.dumps(figures) + "\n")
    to.flush()


def counters():
    """Bytes that this process has read from devices, and has written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


def disk_busy_s(job):
    """Seconds in which the disk of a job's directory has had work; None if nobody counts them."""
    number = os.stat(job["dir"]).st_dev if "dir" in job else 0
    counts = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    return int(counts.read_text().split()[9]) / 1000 if counts.exists() else None


def enter(*groups):
    """Move this process into control groups, given by their folders."""
    for group in groups:
        Path(group, "cgroup.procs").write_text("0")
