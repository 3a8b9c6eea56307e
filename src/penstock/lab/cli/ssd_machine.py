"""The command ``penstock ssd machine``: a machine file with a simulated drive, for ``penstock plan``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Final

from penstock.cli.command import add_command
from penstock.cli.machine_file import answer
from penstock.cli.paths import file_to_write, picture_to_write
from penstock.lab.cli.ssd_options import add_fields, device_of, known_devices
from penstock.lab.ssd import Device
from penstock.lab.ssd.run_plot import plot_service
from penstock.lab.ssd.service import DEPTH, REQUEST_BYTES, Measured, measure
from penstock.plan import machines
from penstock.plan.machine import Machine
from penstock.plan.service import Service

_EXAMPLES: Final = """\
examples:
  penstock ssd machine consumer-tlc --machine rtx-4090 --output with-it.toml
  penstock plan resnet50 --batch 256 --machine with-it.toml --device-memory 8GiB"""


def add_parser(what: Any) -> None:
    """Add ``machine`` to the subcommands of ``penstock ssd``."""
    made = add_command(
        what,
        "machine",
        "make a machine file with a simulated drive as its flash",
        _execute,
        description="Measure transfers of several sizes on a simulated drive, and use them as a"
        " machine's flash.\nPrints a machine file (TOML) for penstock plan.",
        examples=_EXAMPLES,
    )
    made.add_argument("device", metavar="DEVICE", help=known_devices())
    made.add_argument(
        "--machine", metavar="MACHINE", default="cpu",
        help=f"machine that gets the drive: {', '.join(Machine.presets())}, or a file (default: cpu)",
    )  # fmt: skip
    made.add_argument("--output", metavar="FILE", help="also write the machine file to this file")
    made.add_argument(
        "--plot", metavar="FILE", help="draw rate over transfer size, as .svg, .png or .pdf"
    )
    add_fields(made)


def _execute(options: argparse.Namespace) -> int:
    """Measure, print, write. Raises ConfigError for invalid options and files that cannot be written."""
    if options.output is not None:
        file_to_write(options.output, "--output")
    plot = None if options.plot is None else picture_to_write(options.plot, "--plot")
    device = device_of(options.device, options.set)
    measured = measure(device)
    machine = machine_with(machines.find(options.machine), device, measured)
    if plot is not None:
        plot_service(device.name, measured, plot)
    answer(machine, output=options.output, as_json=options.json)
    return 0


def machine_with(machine: Machine, device: Device, measured: Measured) -> Machine:
    """Return the machine with a simulated drive as its flash."""
    source = (
        f"flash: simulated, {device.name}: transfers alone, in requests of"
        f" {REQUEST_BYTES // 1024} KiB at depth {DEPTH}, on a new drive"
    )
    return replace(
        machine,
        name=f"{machine.name}, its flash {device.name}",
        flash_write_bytes_per_s=measured.write_bytes_per_s,
        flash_read_bytes_per_s=measured.read_bytes_per_s,
        flash_latency_s=measured.latency_s,
        flash_bytes=device.endurance.capacity_bytes,
        flash_shared=measured.shared,
        flash_service=Service(measured.sizes_bytes, measured.write_s, measured.read_s),
        sources=(*machine.sources, source),
    )
