"""The command ``penstock ssd weight-update``: an optimizer's step on host, controller or dies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.command import add_command
from penstock.cli.output import print_result
from penstock.cli.paths import picture_to_write
from penstock.core.errors import ConfigError
from penstock.core.units import format_bytes, format_duration
from penstock.lab.cli.ssd_options import add_fields, count, device_of, known_devices, list_of
from penstock.lab.ssd import Device, Gradient, Placement, Step, Update
from penstock.lab.ssd.description import nearest
from penstock.lab.ssd.energy import Boundary
from penstock.lab.ssd.optimizers import OPTIMIZERS
from penstock.lab.ssd.plot import plot_steps
from penstock.lab.ssd.simulation import SimulationEngine, simulate
from penstock.observe.summary_text import percent
from penstock.report.table import Row, side_by_side

_HOW: Final = {
    SimulationEngine.CLOSED: "in closed form",
    SimulationEngine.TIMELINE: "every operation on its timeline",
    SimulationEngine.EVENTS: "event by event",
}
_EXAMPLES: Final = """\
examples:
  penstock ssd weight-update --device optimstore --parameters 6.7e9 --optimizer adam \\
      --placement host,controller,die
  penstock ssd weight-update --device optimstore --parameters 1e9 --optimizer momentum \\
      --set geometry.chips_per_channel=8 --plot update.svg"""


def add_parser(what: Any) -> None:
    """Add ``weight-update`` to the subcommands of ``penstock ssd``."""
    made = add_command(
        what,
        "weight-update",
        "predict time, energy and wear of an optimizer's step, by where it runs",
        _execute,
        description="Predict the time, energy and wear of a weight update: on the host, in the SSD's"
        "\ncontroller, on its flash dies, or split between these two.",
        examples=_EXAMPLES,
    )
    add_update(made)
    made.add_argument("--plot", metavar="FILE", help="draw the step, as .svg, .png or .pdf")


def add_update(made: argparse.ArgumentParser) -> None:
    """Add the options for the update, the device and the engine."""
    made.add_argument("--device", required=True, metavar="DEVICE", help=known_devices())
    made.add_argument(
        "--parameters", required=True, metavar="N", help="number of parameters, such as 6.7e9"
    )
    made.add_argument(
        "--optimizer",
        metavar="NAME",
        default="adam",
        help=f"{', '.join(OPTIMIZERS)} (default: adam)",
    )
    made.add_argument(
        "--placement", metavar="LIST", default="host,controller,die",
        help="any of host, controller, die, split; the others are compared with the first (default:"
        " %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--state-bytes", metavar="LIST", default="",
        help="bytes of each state of a parameter, the weight first (default: 4 each)",
    )  # fmt: skip
    made.add_argument(
        "--gradient-bytes",
        metavar="N",
        type=int,
        default=4,
        help="bytes of a gradient (default: 4)",
    )
    made.add_argument(
        "--weight-bytes",
        metavar="N",
        type=int,
        default=2,
        help="bytes of a weight that goes back to the host (default: 2)",
    )
    made.add_argument(
        "--gradient", choices=tuple(map(str, Gradient)), default="register",
        help="place where gradients wait in the drive (default: register)",
    )  # fmt: skip
    made.add_argument(
        "--write-amplification",
        metavar="X",
        type=float,
        default=1.0,
        help="write amplification of the drive (default: 1)",
    )
    made.add_argument(
        "--engine", choices=("closed", "timeline", "events"), default="closed",
        help="closed: formulas; timeline: every operation, fast; events: the reference, for small"
        " models (default: closed)",
    )  # fmt: skip
    add_fields(made)


def _execute(options: argparse.Namespace) -> int:
    """Compute, draw, print.

    Raises:
        ConfigError: An option is invalid, or the picture cannot be written.
    """
    device, update = device_of(options.device, options.set), update_of(options)
    engine = SimulationEngine(options.engine)
    plot = None if options.plot is None else picture_to_write(options.plot, "--plot")
    done = [simulate(device, update, each, engine) for each in placements_of(options.placement)]
    if plot is not None:
        plot_steps(device, update, done, plot)
    print_result(
        options.json,
        lambda: document(device, update, done, engine),
        lambda: text(device, update, done, engine),
    )
    return 0


def update_of(options: argparse.Namespace) -> Update:
    """Return the update that the options describe. Raises ConfigError."""
    sizes = list_of(options.state_bytes)
    if not all(size.isdigit() for size in sizes):
        raise ConfigError(f"--state-bytes is {options.state_bytes!r}, not whole numbers like 4,2,2")
    return Update(
        parameters=count(options.parameters, "--parameters"),
        optimizer=options.optimizer,
        state_bytes=tuple(int(size) for size in sizes),
        gradient_bytes=options.gradient_bytes,
        weight_bytes=options.weight_bytes,
        gradient=Gradient(options.gradient),
        write_amplification=options.write_amplification,
    )


def placements_of(listed: str) -> tuple[Placement, ...]:
    """Parse placements between commas. Raises ConfigError."""
    known, found = [str(each) for each in Placement], list_of(listed)
    for word in found:
        if word not in known:
            raise ConfigError(
                f"--placement: unknown {word!r}{nearest(word, known)}; use {', '.join(known)}"
            )
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"--placement is {listed!r}; name each placement once")
    return tuple(Placement(word) for word in found)


def document(
    device: Device, update: Update, done: Sequence[Step], engine: SimulationEngine
) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "schema": 1,
        "penstock": __version__,
        "engine": engine,
        "device": asdict(device),
        "update": {**asdict(update), "state_bytes": update.sizes, "passes": update.rule.passes},
        "room": room(device, update),
        "placements": [placed(one, done[0]) for one in done],
    }


def room(device: Device, update: Update) -> dict[str, Any]:
    """Return a JSON object that says if the states fit the drive."""
    needed = update.parameters * update.states_bytes
    there = device.user_pages * device.geometry.page_bytes
    return {"states_bytes": needed, "drive_bytes": there, "fits": needed <= there}


def placed(one: Step, first: Step) -> dict[str, Any]:
    """Return a JSON object of one placement, compared with the first."""
    return {
        "placement": one.placement,
        "time_s": one.time_s,
        "speedup": first.time_s / one.time_s,
        "bound_by": one.bound_by,
        "busy_s": dict(one.busy_s),
        "units_on_die": one.on_die,
        "moved_bytes": asdict(one.moved),
        "energy_j": {
            boundary: {
                "total": one.ledger.joules(boundary),
                "gain": first.ledger.joules(boundary) / one.ledger.joules(boundary),
                "components": one.ledger.within(boundary),
            }
            for boundary in Boundary
        },
        "ssd_w": one.ledger.ssd_w,
        "ssd_dynamic_w": one.ledger.ssd_dynamic_w,
        "wear": asdict(one.wear),
    }


def text(
    device: Device, update: Update, done: Sequence[Step], engine: SimulationEngine
) -> RenderableType:
    """Render a table for the terminal."""
    first = done[0]
    rows = [
        _row("time of a step", done, lambda one: format_duration(one.time_s)),
        _row("speed-up", done, lambda one: f"{first.time_s / one.time_s:.2f} x"),
        _row("works longest", done, lambda one: one.bound_by),
        _row("channels busy", done, lambda one: percent(one.use("channel"))),
        _row("dies busy", done, lambda one: percent(one.use("die"))),
        *(_energy_row(done, boundary) for boundary in Boundary),
        _row("mean power of the SSD", done, lambda one: f"{one.ledger.ssd_w:.1f} W"),
        _row("written in a step", done, lambda one: f"{one.wear.written_bytes / 1e9:.1f} GB"),
        _row("steps to wear-out", done, lambda one: f"{one.wear.steps_rated:.3g}"),
        _row("  with retention credit", done, lambda one: f"{one.wear.steps_credited:.3g}"),
        _row("days to wear-out", done, lambda one: f"{one.wear.days_rated:.3g}"),
        _row("  with retention credit", done, lambda one: f"{one.wear.days_credited:.3g}"),
    ]
    title = f"{update.optimizer}, {update.parameters:.4g} parameters, on {device.name}"
    note = (
        f"{len(update.sizes)} states of {update.states_bytes} B a parameter,"
        f" {len(update.rule.passes)} passes; {_HOW[engine]}. What is inferred or assumed of a device is"
        " said in its file."
    )
    its = room(device, update)
    if not its["fits"]:
        note += (
            f"\n\nThe drive is too small: these states take {format_bytes(its['states_bytes'])}, it holds"
            f" {format_bytes(its['drive_bytes'])}. The figures are of one that holds them and is else the"
            " same."
        )
    return Group(side_by_side(title, [one.placement for one in done], rows), Text(), Text(note))


def _row(label: str, done: Sequence[Step], of: Any) -> Row:
    return Row(label, tuple(of(one) for one in done))


def _energy_row(done: Sequence[Step], boundary: Boundary) -> Row:
    whole = done[0].ledger.joules(boundary)

    def energy(one: Step) -> str:
        joules = one.ledger.joules(boundary)
        return f"{joules:.4g} J ({whole / joules:.2f} x)"

    return _row(f"energy: {boundary}", done, energy)
