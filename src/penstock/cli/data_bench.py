"""The command ``penstock data bench``, which measures reading in each order, beside the device."""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.console import RenderableType

from penstock import __version__
from penstock.cli.command import add_command, size
from penstock.cli.data_files import add_data_options, open_data_set
from penstock.cli.output import print_result
from penstock.core.errors import ConfigError
from penstock.core.units import format_bandwidth, format_bytes, format_duration, parse_bytes
from penstock.data.assemble import Assembler
from penstock.data.build import Opened
from penstock.data.depth import Depth
from penstock.data.order import Epoch, Share
from penstock.data.quality import quality_of
from penstock.data.resources import LoaderResources, choose_order, lump_of
from penstock.data.stream import Stream, Tally
from penstock.observe.summary_text import add_row, grid

ORDERS: Final = ("sequential", "window", "full")
_IN_FLIGHT: Final = 4
"""Number of simultaneous groups in the measurement of the device."""
_GROUP_BYTES: Final = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speeds of reading in one order."""

    order: str
    samples_per_s: float
    bytes_per_s: float
    first_batch_s: float
    held_bytes: int
    device_bytes_per_s: float
    """Bandwidth of the engine alone for the same samples in this order, without decoding or copies."""
    ratio: float
    displacement: float
    """Displacement of the order, relative to that of a true shuffle; likewise the next two."""
    spread: float
    separation: float


def add_parser(what: Any) -> None:
    """Add ``bench`` to the subcommands of ``penstock data``."""
    made = add_command(
        what,
        "bench",
        "measure how fast a data set is read, in each order",
        _execute,
        description="Read a data set in each order for some seconds, as in training, and compare the"
        " speed\nwith that of the I/O engine alone.",
    )
    add_data_options(made)
    made.add_argument(
        "--batch",
        type=int,
        default=64,
        metavar="N",
        help="samples in a batch (default: %(default)s)",
    )
    made.add_argument(
        "--memory",
        type=size,
        default="64MiB",
        metavar="SIZE",
        help="memory of the loader (default: %(default)s)",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        metavar="N",
        help="how long to read in each order (default: %(default)g)",
    )
    made.add_argument(
        "--decode", action="store_true", help="decode samples (default: only copy their bytes)"
    )


def _execute(options: argparse.Namespace) -> int:
    if options.seconds <= 0:
        raise ConfigError(f"--seconds is {options.seconds}, but must be more than 0")
    opened = open_data_set(options)
    memory = parse_bytes(options.memory, what="--memory")
    speeds = [
        measure(opened, kind, options.batch, memory, options.seconds, decode=options.decode)
        for kind in ORDERS
    ]
    print_result(
        options.json,
        lambda: {
            "schema": 1,
            "penstock": __version__,
            "path": opened.root,
            "batch": options.batch,
            "memory_bytes": memory,
            "orders": [asdict(speed) for speed in speeds],
        },
        lambda: _text(opened, speeds),
    )
    return 0


def measure(
    opened: Opened, kind: str, batch: int, memory: int, seconds: float, *, decode: bool
) -> Speed:
    """Measure one order, with a loader and with the engine alone."""
    how = "auto" if decode else "raw"
    values = Assembler(opened.index, opened.root, how, collate=list)  # type: ignore[arg-type]
    waiting = 3 * lump_of(values, batch, memory) * batch * values.decoded_bytes()
    resources = LoaderResources(opened, memory, waiting_bytes=waiting)
    room = resources.memory.limit_bytes
    order = choose_order(kind, opened.index, room, seed=0, batch_size=batch, world=1)
    epoch = Epoch(order, opened.index.samples, 0)
    try:
        device = _device(resources, epoch, seconds)
        tally, first_s, took_s = _loader(resources, epoch, values, batch, seconds)
        held = resources.held_bytes
    finally:
        values.close()
        resources.close()
    count = min(opened.index.samples, 1 << 18)
    quality = quality_of(epoch.at(np.arange(count)), total=opened.index.samples, batch_size=batch)
    return Speed(
        order=order.kind,
        samples_per_s=tally.samples / took_s,
        bytes_per_s=tally.data_bytes / took_s,
        first_batch_s=first_s,
        held_bytes=held,
        device_bytes_per_s=device,
        ratio=tally.data_bytes / took_s / device,
        **{name: _plain(value) for name, value in asdict(quality).items()},
    )


def _loader(
    resources: LoaderResources, epoch: Epoch, values: Assembler, batch: int, seconds: float
) -> tuple[Tally, float, float]:
    tally, first_s = Tally(), 0.0
    started = time.perf_counter()
    took = 0.0
    while took < seconds:
        steps = Share(batch_size=batch).steps(epoch.samples, 0)
        lump = lump_of(values, batch, resources.memory_bytes)
        stream = Stream(
            resources.reader, epoch, steps, values, depth=Depth(), tally=tally, lump=lump
        )
        while took < seconds and stream.take() is not None:
            took = time.perf_counter() - started
            first_s = first_s or took
        stream.close()
    return tally, first_s, took


def _device(resources: LoaderResources, epoch: Epoch, seconds: float) -> float:
    """Return the bytes of samples per second that the engine delivers to memory."""
    index = resources.reader.opened.index
    mean = max(1, index.data_bytes // index.samples)
    room = resources.memory.limit_bytes // _IN_FLIGHT
    count = max(1, min(_GROUP_BYTES // mean, room // (mean + 8192)))
    if epoch.order.kind == "window":
        count = epoch.order.window_samples  # chosen so that two fit
    waiting, moved, position = deque[Any](), 0, 0
    started = time.perf_counter()
    took = 0.0
    while took < seconds:
        stop = min(position + count, epoch.samples)
        plan = resources.reader.plan(epoch.at(np.arange(position, stop)))
        while (pending := resources.reader.start(plan)) is None:
            moved += _finish(waiting.popleft())
        waiting.append(pending)
        position = 0 if stop == epoch.samples else stop
        took = time.perf_counter() - started
    while waiting:
        moved += _finish(waiting.popleft())
    return moved / (time.perf_counter() - started)


def _finish(pending: Any) -> int:
    group = pending.wait("raise")
    nbytes = int(np.maximum(group.nbytes, 0).sum())
    group.free()
    return nbytes


def _plain(value: float) -> float:
    return value if value == value else 0.0  # noqa: PLR0124  (nan: too few samples to tell)


def _text(opened: Opened, speeds: list[Speed]) -> RenderableType:
    columns = ("order", "samples/s", "loader", "device", "ratio", "first batch", "spread")
    held = format_bytes(max(each.held_bytes for each in speeds))
    table = grid(f"{opened.root}: {opened.index.format}, {held} held", columns)
    for each in speeds:
        add_row(
            table,
            each.order,
            f"{each.samples_per_s:.0f}",
            format_bandwidth(each.bytes_per_s),
            format_bandwidth(each.device_bytes_per_s),
            f"{each.ratio:.2f}",
            format_duration(each.first_batch_s),
            f"{each.spread:.2f}",
        )
    return table
