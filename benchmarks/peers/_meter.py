"""Time, bytes through the disk and memory of some steps of this process, from what the kernel says."""

import os
import statistics
import time
from pathlib import Path


def moved_bytes():
    """Read from and written to disks by this process, whatever the page cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forget_peak():
    """The kernel's highest resident size starts anew here."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024


def steps(count, before, step, *, warmup=1):
    """Medians of ``count`` iterations ``before(); step()`` after ``warmup`` of them."""
    rows = []
    for _ in range(warmup + count):
        (read, written), start = moved_bytes(), time.perf_counter()
        before()
        middle = time.perf_counter()
        step()
        end = time.perf_counter()
        read_after, written_after = moved_bytes()
        rows.append((end - middle, end - start, read_after - read, written_after - written))
    names = ("step_s", "iteration_s", "read_bytes", "written_bytes")
    columns = zip(*rows[warmup:], strict=True)
    return {name: statistics.median(column) for name, column in zip(names, columns, strict=True)}
