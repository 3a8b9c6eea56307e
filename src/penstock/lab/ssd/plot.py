"""Pictures of weight updates: time by resource, gains, and the effect of more dies.

Needs matplotlib: ``pip install 'penstock[plot]'``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock.core.errors import ConfigError
from penstock.lab.ssd import Device, Placement, Step, Update, step, with_field
from penstock.lab.ssd.energy import Boundary
from penstock.report.style import COLOURS, FAINT, INK, STYLE, dress, matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOUR: Final = dict(zip(Placement, COLOURS, strict=False))
_MAX_LINES: Final = 16
_DASHES: Final = ("-", "--", ":", "-.")
_DIES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


SweepPoint: TypeAlias = tuple[Sequence[tuple[str, Any]], Sequence[Step]]
"""((field, value) of a sweep point, a step for each placement)."""


def plot_steps(
    device: Device, update: Update, done: Sequence[Step], path: str | os.PathLike[str]
) -> None:
    """Draw placements side by side; the suffix of the file decides the format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format.
    """
    figure_module, style, _ = matplotlib()
    with style.context(STYLE):
        figure = figure_module.Figure(figsize=(10, 10), dpi=150, layout="constrained")
        grid = figure.add_gridspec(3, 2, height_ratios=(1.25, 1, 0.8))
        _draw_resources(figure.add_subplot(grid[0, :]), done)
        _draw_gains(figure.add_subplot(grid[1, 0]), done)
        _draw_dies(figure.add_subplot(grid[1, 1]), device, update, done)
        _draw_energy(figure.add_subplot(grid[2, :]), done)
        title = f"{update.optimizer}, {update.parameters:.4g} parameters, on {device.name}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        save(figure, path)


def _draw_resources(axis: Axes, done: Sequence[Step]) -> None:
    """Draw a bar for each resource, and a line for the step, which no bar exceeds."""
    labels: list[str] = []
    for one in done:
        first = len(labels)
        for name, busy in one.busy_s:
            if not busy:
                continue
            axis.barh(len(labels), busy, 0.72, color=_COLOUR[one.placement])
            labels.append(f"{one.placement}: {name}")
        axis.vlines(one.time_s, first - 0.5, len(labels) - 0.5, color=INK, linewidth=1.4)
        axis.annotate(
            f"{one.time_s:.3g} s", (one.time_s, (first + len(labels) - 1) / 2), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=9, color=INK,
        )  # fmt: skip
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlim(0, 1.1 * max(one.time_s for one in done))
    axis.set_xlabel("seconds", color=INK)
    dress(axis, "what works how long in a step; the line is the step's time", "", grid="x")
    axis.tick_params(axis="y", labelsize=8)


def _draw_gains(axis: Axes, done: Sequence[Step]) -> None:
    """Draw speed and energy relative to the first placement."""
    first = done[0]
    groups = ["speed", *(f"energy,\n{boundary}" for boundary in Boundary)]
    width = 0.8 / len(done)
    for number, one in enumerate(done):
        gains = [first.time_s / one.time_s]
        gains += [first.ledger.joules(each) / one.ledger.joules(each) for each in Boundary]
        places = [group + (number - (len(done) - 1) / 2) * width for group in range(len(gains))]
        axis.bar(places, gains, 0.92 * width, color=_COLOUR[one.placement], label=one.placement)
        for place, gain in zip(places, gains, strict=True):
            axis.annotate(
                f"{gain:.1f}", (place, gain), xytext=(0, 2), textcoords="offset points",
                ha="center", fontsize=7.5, color=INK,
            )  # fmt: skip
    axis.set_xticks(range(len(groups)), groups)
    axis.margins(y=0.14)
    axis.legend(frameon=False, fontsize=8, ncols=2)
    dress(axis, f"gain over {first.placement}", "times")


def _draw_energy(axis: Axes, done: Sequence[Step]) -> None:
    """Draw a bar of the drive's components for each placement; the host's part would dwarf them."""
    ledgers = [one.ledger.within(Boundary.SSD) for one in done]
    names = list(dict.fromkeys(name for each in ledgers for name in each))
    ends = [0.0] * len(done)
    colours = [*COLOURS, *(f"{colour}80" for colour in COLOURS)]
    for name, colour in zip(names, itertools.cycle(colours), strict=False):
        joules = [each.get(name, 0.0) for each in ledgers]
        axis.barh(range(len(done)), joules, 0.6, left=ends, color=colour, label=name)
        ends = [end + more for end, more in zip(ends, joules, strict=True)]
    axis.set_yticks(range(len(done)), [one.placement for one in done])
    axis.set_ylim(len(done) - 0.5, -0.5)
    axis.set_xlabel("joules", color=INK)
    axis.set_xlim(0, 1.55 * max(ends))
    axis.legend(frameon=False, fontsize=8, loc="center right")
    dress(axis, "energy of the drive in a step, by component", "", grid="x")


def _draw_dies(axis: Axes, device: Device, update: Update, done: Sequence[Step]) -> None:
    """Draw the roofline of a unit: more dies help until the channel is full."""
    for one in done:
        times = [step(_with_dies(device, dies), update, one.placement).time_s for dies in _DIES]
        axis.plot(
            _DIES,
            times,
            color=_COLOUR[one.placement],
            marker="o",
            markersize=3,
            label=one.placement,
        )
    here = device.geometry.dies_per_channel
    axis.axvline(here, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axis.annotate(
        "as it is", (here, 1), xycoords=("data", "axes fraction"), xytext=(3, -9),
        textcoords="offset points", fontsize=8, color=INK,
    )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(_DIES, [str(dies) if dies.bit_count() == 1 else "" for dies in _DIES])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("dies on a channel", color=INK)
    dress(axis, "time of a step by dies on a channel", "seconds")


def _with_dies(device: Device, dies: int) -> Device:
    """Return a device with this many chips of one die, which work at the same time on every device."""
    one = with_field(device, "geometry.dies_per_chip", 1)
    return with_field(one, "geometry.chips_per_channel", dies)


def check_lines(count: int) -> None:
    """Raise ConfigError if a picture cannot show ``count`` distinguishable lines."""
    if count > _MAX_LINES:
        raise ConfigError(
            f"--plot: {count} lines are too many to distinguish; sweep for at most {_MAX_LINES}"
        )


def plot_sweep(
    device: Device, update: Update, points: Sequence[SweepPoint], path: str | os.PathLike[str]
) -> None:
    """Draw time over the first field, with a line for each placement and value of the other fields.

    Raises:
        ConfigError: matplotlib is not installed, the file cannot be written in that format, or there are
            too many lines to distinguish.
    """
    lines: dict[str, list[tuple[str, float, Placement]]] = {}
    for fields, steps in points:
        rest = "".join(f", {name.partition('.')[2]} {value}" for name, value in fields[1:])
        for one in steps:
            label = f"{one.placement}{rest}"
            lines.setdefault(label, []).append((str(fields[0][1]), one.time_s, one.placement))
    check_lines(len(lines))
    figure_module, style, _ = matplotlib()
    with style.context(STYLE):
        figure = figure_module.Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
        axis = figure.subplots()
        for number, (label, line) in enumerate(lines.items()):
            axis.plot(
                [value for value, _, _ in line], [time_s for _, time_s, _ in line], marker="o",
                markersize=3.5, color=_COLOUR[line[0][2]], label=label,
                linestyle=_DASHES[number // len(points[0][1]) % 4],
            )  # fmt: skip
        axis.set_ylim(bottom=0)
        axis.set_xlabel(points[0][0][0][0], color=INK)
        axis.legend(frameon=False, fontsize=8, ncols=2)
        title = f"{update.optimizer}, {update.parameters:.4g} parameters, on {device.name}"
        dress(axis, title, "seconds")
        save(figure, path)
