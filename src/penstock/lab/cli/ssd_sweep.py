"""The command ``penstock ssd sweep``: a weight update on many devices."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.command import add_command
from penstock.cli.output import print_result
from penstock.cli.paths import picture_to_write
from penstock.core.errors import ConfigError
from penstock.core.units import format_duration
from penstock.lab.cli import ssd_update
from penstock.lab.cli.ssd_options import device_of, toml_value
from penstock.lab.ssd import Device, Placement, Step, Update, with_field
from penstock.lab.ssd.plot import check_lines, plot_sweep
from penstock.lab.ssd.simulation import SimulationEngine, simulate
from penstock.observe.summary_text import add_row, grid

_MAX_DEVICES: Final = 100_000
"""Limit for the number of devices; more are a mistake."""
_EXAMPLES: Final = """\
examples:
  penstock ssd sweep --device optimstore --parameters 6.7e9 \\
      --field geometry.chips_per_channel=2,4,8,16
  penstock ssd sweep --device optimstore --parameters 6.7e9 --field unit.divider=1,2,4 \\
      --field unit.double_buffered=false,true --placement die --plot sweep.svg"""


@dataclass(frozen=True, slots=True)
class Point:
    """One device of a sweep."""

    fields: tuple[tuple[str, Any], ...]
    """(``table.field``, value) of the swept fields."""
    room: dict[str, Any]
    """JSON object that says if the states fit."""
    steps: tuple[Step, ...]


def add_parser(what: Any) -> None:
    """Add ``sweep`` to the subcommands of ``penstock ssd``."""
    made = add_command(
        what,
        "sweep",
        "predict a weight update for several values of any fields of a device",
        _execute,
        description="Predict a weight update on every device that the values make.",
        examples=_EXAMPLES,
    )
    made.add_argument(
        "--field", metavar="TABLE.FIELD=VALUES", action="append", required=True,
        help="field of the device and its values, separated by commas; repeat it for every combination",
    )  # fmt: skip
    ssd_update.add_update(made)
    made.add_argument(
        "--plot", metavar="FILE", help="draw time over the first field, as .svg, .png or .pdf"
    )


def _execute(options: argparse.Namespace) -> int:
    """Simulate, draw, print. Raises ConfigError for invalid values, with the field."""
    device, update = device_of(options.device, options.set), ssd_update.update_of(options)
    placements = ssd_update.placements_of(options.placement)
    fields = [_field(text) for text in options.field]
    plot = None if options.plot is None else picture_to_write(options.plot, "--plot")
    if plot is not None:
        lines = math.prod(len(values) for _, values in fields[1:])
        check_lines(len(placements) * lines)
    points = list(sweep(device, update, placements, fields, SimulationEngine(options.engine)))
    if plot is not None:
        plot_sweep(device, update, [(point.fields, point.steps) for point in points], plot)
    print_result(
        options.json, lambda: document(device, update, points), lambda: text(device, update, points)
    )
    return 0


def sweep(
    device: Device,
    update: Update,
    placements: Sequence[Placement],
    fields: Sequence[tuple[str, Sequence[Any]]],
    engine: SimulationEngine,
) -> Iterator[Point]:
    """Yield every combination of values, with the last field varying fastest.

    Raises:
        ConfigError: There are too many devices, or a field or value is invalid.
    """
    count = 1
    for _, values in fields:
        count *= len(values)
    if count > _MAX_DEVICES:
        raise ConfigError(f"--field makes {count} devices; at most {_MAX_DEVICES} are possible")
    names = [name for name, _ in fields]
    for name, values in fields:
        twice = next((value for at, value in enumerate(values) if value in values[:at]), None)
        if twice is not None:
            raise ConfigError(f"--field {name} has {twice!r} more than once")
        if names.count(name) > 1:
            raise ConfigError(
                f"--field names {name} more than once; list all its values in one option"
            )
    for values in itertools.product(*(values for _, values in fields)):
        chosen = tuple(zip(names, values, strict=True))
        made = device
        for name, value in chosen:
            made = with_field(made, name, value)
        room = ssd_update.room(made, update)
        yield Point(
            chosen, room, tuple(simulate(made, update, each, engine) for each in placements)
        )


def _field(text: str) -> tuple[str, list[Any]]:
    path, sign, values = text.partition("=")
    if not sign or not values.strip():
        raise ConfigError(f"--field {text!r} has no values; write it like geometry.channels=4,8,16")
    listed = toml_value(f"[{values}]")
    if isinstance(listed, str):  # words without quotes, as of ftl.allocation
        listed = [toml_value(word) for word in values.split(",")]
    return path.strip(), listed


def document(device: Device, update: Update, points: Sequence[Point]) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "schema": 1,
        "penstock": __version__,
        "device": asdict(device),
        "update": asdict(update),
        "points": [
            {
                "fields": dict(point.fields),
                "room": point.room,
                "placements": [ssd_update.placed(one, point.steps[0]) for one in point.steps],
            }
            for point in points
        ],
    }


def text(device: Device, update: Update, points: Sequence[Point]) -> RenderableType:
    """Render a table with a line for each device."""
    names = [name for name, _ in points[0].fields]
    placements = [one.placement for one in points[0].steps]
    title = f"{update.optimizer}, {update.parameters:.4g} parameters, on {device.name}"
    table = grid(title, (*names, *placements, *(f"gain, {each}" for each in placements[1:])))
    for point in points:
        first = point.steps[0].time_s
        add_row(
            table,
            *(str(value) for _, value in point.fields),
            *(format_duration(one.time_s) for one in point.steps),
            *(f"{first / one.time_s:.2f} x" for one in point.steps[1:]),
        )
    note = f"{len(points)} devices"
    small = sum(not point.room["fits"] for point in points)
    if small:
        note += f", of which {small} are too small for the states; their figures are as if they were not"
    return Group(table, Text(), Text(note))
