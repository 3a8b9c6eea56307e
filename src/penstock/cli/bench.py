"""The command ``penstock bench``, which measures the speed of this machine."""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict, replace
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli import bandwidth, bench_machine
from penstock.cli.bandwidth import Measurement
from penstock.cli.command import add_command, new_parser, size
from penstock.cli.output import print_result
from penstock.cli.paths import file_to_write, spill_directory, write_file
from penstock.cli.progress import progress
from penstock.core.units import format_bandwidth, format_bytes, format_duration, parse_bytes
from penstock.plan.machine import Machine
from penstock.report.table import Row, side_by_side

_EXAMPLES: Final = """\
examples:
  penstock bench io --dir /nvme/spill
  penstock bench io --dir /nvme0/spill --dir /nvme1/spill --seconds 30 --save machine.json
  penstock bench machine --flash /nvme/spill --output here.toml"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``penstock bench``."""
    made = new_parser(
        "bench",
        "Measure the bandwidth and the speed of this machine.",
        examples=_EXAMPLES,
    )
    what = made.add_subparsers(metavar="WHAT", required=True)
    disk = add_command(
        what,
        "io",
        "measure read, overwrite and mixed bandwidth of directories",
        _execute_io,
        description="Measure read, overwrite and mixed bandwidth of Penstock's engine and, alternately,"
        " of plain\nsystem calls (threads with preadv and pwritev) on the same files and memory. The\n"
        "result is the ratio.",
        examples=_EXAMPLES,
    )
    disk.add_argument(
        "--dir", metavar="DIR", action="append", help="directory to measure; several are measured"
        " together (default: the current one)"
    )  # fmt: skip
    disk.add_argument(
        "--size", metavar="SIZE", type=size, default=bandwidth.FILE_BYTES,
        help="size of the files, all together; they are removed at the end (default: 1GiB)",
    )  # fmt: skip
    disk.add_argument(
        "--seconds", metavar="N", type=float, default=10.0, help="how long to measure (default: 10)"
    )
    disk.add_argument(
        "--save", metavar="FILE", help="write the result to FILE, for penstock plan --machine"
    )
    bench_machine.add_parser(what)
    return made


def _execute_io(options: argparse.Namespace) -> int:
    """Measure directories, and print and save the result.

    Raises:
        ConfigError: A size or time is invalid, or the machine file cannot be written.
        TransferError: A directory cannot be written to, or is full.
    """
    file_bytes = parse_bytes(options.size, what="--size")
    directories = [spill_directory(each) for each in options.dir or ["."]]
    if options.save is not None:
        file_to_write(options.save, "--save")
    with progress(f"measuring {', '.join(directories)}") as tell:
        measured = bandwidth.measure(
            directories, file_bytes=file_bytes, seconds=options.seconds, progress=tell
        )
    machine = machine_of(measured)
    if options.save is not None:
        write_file(options.save, machine.to_json() + "\n", "--save")
    print_result(options.json, lambda: document(measured, machine), lambda: table(measured))
    return 0


def machine_of(measured: Measurement) -> Machine:
    """Return a machine for plans, with bandwidths of the engine and of copies in host memory."""
    return replace(
        bench_machine.host_machine(),
        name=platform.node() or "this machine",
        flash_write_bytes_per_s=measured.rate("overwrite").engine_bytes_per_s,
        flash_read_bytes_per_s=measured.rate("read").engine_bytes_per_s,
        flash_latency_s=measured.latency_s,
    )


def document(measured: Measurement, machine: Machine) -> dict[str, Any]:
    """Return the JSON document of ``penstock bench io``."""
    return {"schema": 1, **asdict(measured), "machine": asdict(machine)}


def table(measured: Measurement) -> RenderableType:
    """Return a table of both sides and their ratio."""
    rows = [
        Row(
            rate.kind,
            (format_bandwidth(rate.plain_bytes_per_s), format_bandwidth(rate.engine_bytes_per_s)),
            f"{rate.ratio:.2f} x",
        )
        for rate in measured.rates
    ]
    how = f"direct, granule {measured.granule_bytes} B" if measured.direct else "buffered"
    caption = (
        f"medians of {measured.rates[0].rounds} alternating rounds of"
        f" {format_bytes(measured.pass_bytes)};"
        f" {measured.threads} threads, pieces of {format_bytes(measured.piece_bytes)}, {how};"
        f" a 4 KiB read takes {format_duration(measured.latency_s)}"
    )
    both = side_by_side(", ".join(measured.directories), ("plain calls", "penstock"), rows)
    return Group(both, Text(), Text(caption))
