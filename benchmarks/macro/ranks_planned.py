#!/usr/bin/env python3
"""Write ``docs/ranks_table.md``: what binds a step at 8, 64 and 512 GPUs, by ``penstock plan --ranks``.

    python benchmarks/macro/ranks_planned.py           # some minutes
    python benchmarks/macro/ranks_planned.py --check   # change nothing, fail if it is stale

Nothing is measured: every figure follows from shapes and from the machine file. "all" is all memory of
the device; in the least memory most of what can rests on flash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _planned_step import request_of

import _results
from penstock.cli.step_request import StepRequest
from penstock.core.units import format_bytes, format_duration
from penstock.plan.step_plan import StepPlan

TABLE = _results.ROOT / "docs" / "ranks_table.md"
PER_NODE, SSDS, TOKENS = 8, 4, 4096
COMMON = (
    f"--machine h200 --batch 1 --weights flash --optimizer adam --format exact --ssds {SSDS}"
    " --network-rate 400GB/s --peer-rate 450GB/s --policy ranked"
)
CASES = [
    *(("6.7B", ranks, "fsdp2", ("least", "all")) for ranks in (8, 64, 512)),
    *(("6.7B", ranks, "ddp", ("least",)) for ranks in (8, 512)),
    *(("65B", ranks, "fsdp2", ("all",)) for ranks in (8, 64, 512)),
]
HEAD = """\
---
orphan: true
---

<!-- Written by benchmarks/macro/ranks_planned.py; do not edit. -->
<!-- table -->

| Parameters, divided | GPUs | Memory of a GPU | Step | Binds | T*, tokens of each \
| Written to each SSD | Flash of a node |
|---|--:|---|--:|---|--:|--:|--:|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if it is stale")
    check = parser.parse_args().check
    text = HEAD + "".join(line(row) for case in CASES for row in rows(*case))
    if check and TABLE.read_text(encoding="utf-8") != text:
        sys.exit(f"{TABLE.name} is stale: run benchmarks/macro/ranks_planned.py")
    TABLE.write_text(text, encoding="utf-8")


def line(row: tuple[str, ...]) -> str:
    """A line of the table."""
    return f"| {' | '.join(row)} |\n"


def rows(
    shape: str, ranks: int, parallel: str, which: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """The lines of one case."""
    request = requested(shape, ranks, parallel)
    name = f"{shape.replace('B', ' billion')}, {parallel}"
    for each in which:
        nbytes = request.memory_bytes if each == "all" else request.planner.least.total
        found = request.planner.plan(nbytes)
        yield name, f"{ranks}", f"{each}: {format_bytes(nbytes)}", *figures(request, found)


def requested(shape: str, ranks: int, parallel: str) -> StepRequest:
    """The request of the command."""
    words = f"{COMMON} --ranks {ranks} --nodes {max(1, ranks // PER_NODE)} --parallel {parallel}"
    return request_of((shape, "bfloat16", "full", TOKENS), words)


def figures(request: StepRequest, found: StepPlan) -> tuple[str, ...]:
    """The figures of one plan."""
    ranks = request.ranks
    flash = found.hidden_factor
    tokens = "none" if flash is None else f"{round(flash * TOKENS)}"
    return (
        format_duration(found.replayed.step_ns / 1e9),
        found.bounds.binds,
        f"{tokens}; network {round(found.network_factor * TOKENS)}",
        format_bytes(ranks.of_each_ssd(found.written_bytes)),
        format_bytes(found.disk_bytes * ranks.per_node),
    )


if __name__ == "__main__":
    main()
