"""Plot of one step of a plan: memory over time, by tier, and the busy times of each channel.

Needs matplotlib: ``pip install 'penstock[plot]'``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from penstock.core.units import format_bytes
from penstock.observe.summary_text import percent
from penstock.plan.replay.result import Interval, Level
from penstock.report.outcome import PolicyOutcome
from penstock.report.style import (
    BUDGET_COLOUR,
    COLOURS,
    INK,
    STYLE,
    dress,
    matplotlib,
    thinned,
    unit_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEMORIES: Final = ("device", "host", "flash")
_CHANNELS: Final = {
    "compute": ("compute", COLOURS[2]),
    "link_out": ("link, out", COLOURS[1]),
    "link_in": ("link, back", COLOURS[0]),
    "flash_write": ("flash, written", COLOURS[1]),
    "flash_read": ("flash, read", COLOURS[0]),
    "codec": ("codecs", COLOURS[3]),
}
"""Label and colour of each channel, from the top down."""

_Held: TypeAlias = tuple[str, Sequence[Level], int]
"""Tuple of a memory, its levels, and its budget."""


def plot_plan(one: PolicyOutcome, path: str | os.PathLike[str], *, title: str) -> None:
    """Draw one step into a file; its suffix (``.svg``, ``.png``, ``.pdf``) decides the format.

    Args:
        one: The plan and its replay.
        path: Path of the file.
        title: Title of the plot.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    figure_module, style, effects = matplotlib()
    halo = effects.withStroke(linewidth=3, foreground="white")
    memories = list(_held(one))
    heights = [*(2.4 if name == "device" else 1.4 for name, _, _ in memories), 2.0]
    with style.context(STYLE):
        figure = figure_module.Figure(
            figsize=(10, 1.2 + sum(heights)), dpi=150, layout="constrained"
        )
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
        length_s = one.replayed.step_ns / 1e9
        scale, unit = (1.0, "s") if length_s >= 1 else (1e3, "ms")
        for axis, held, colour in zip(axes[:, 0], memories, COLOURS, strict=False):
            _draw_memory(axis, held, one, per_ns=scale / 1e9, colour=colour, halo=halo)
        _draw_channels(axes[-1, 0], one, scale / 1e9)
        axes[-1, 0].set_xlabel(f"time in the step ({unit})", color=INK)
        axes[-1, 0].set_xlim(0, length_s * scale or 1.0)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
        figure.savefig(path)


def _held(one: PolicyOutcome) -> Iterator[_Held]:
    """Yield the memory of the device, and of the tiers in use."""
    budgets = one.plan.budgets
    sizes = (budgets.device_bytes, budgets.host_bytes, budgets.flash_bytes)
    for name, budget in zip(_MEMORIES, sizes, strict=True):
        levels = one.trace.memory[name]
        if name == "device" or any(nbytes for _, nbytes in levels):
            yield name, levels, budget


def _draw_memory(
    axis: Axes, held: _Held, one: PolicyOutcome, *, per_ns: float, colour: str, halo: Any
) -> None:
    name, levels, budget = held
    whens = np.array([0, *(when for when, _ in levels), one.replayed.step_ns], np.float64)
    sizes = np.array([0, *(n for _, n in levels), levels[-1][1] if levels else 0], np.float64)
    peak = int(sizes.max())
    near = name == "device" or peak > budget / 2  # a budget far above would flatten the curve
    scale, unit = unit_of(max(peak, budget if near else 0))
    times, heights = thinned(whens * per_ns, sizes / scale)
    axis.step(times, heights, where="post", color=colour, linewidth=1.3)
    axis.fill_between(times, heights, step="post", color=colour, alpha=0.12, linewidth=0)
    text = (
        f"{name} memory: peak {format_bytes(peak)}, average {format_bytes(one.average_bytes(name))}"
    )
    dress(axis, f"{text}, budget {format_bytes(budget)}", unit)
    if near and budget:
        axis.axhline(budget / scale, color=BUDGET_COLOUR, linewidth=1.2, linestyle=(0, (5, 3)))
        axis.annotate(
            "budget", (1, budget / scale), xycoords=("axes fraction", "data"), xytext=(-2, 3),
            textcoords="offset points", ha="right", fontsize=9, color=BUDGET_COLOUR,
            path_effects=[halo],
        )  # fmt: skip
    top = max(peak, budget if near else 0) or 1
    axis.set_ylim(0, 1.15 * top / scale)


def _draw_channels(axis: Axes, one: PolicyOutcome, per_ns: float) -> None:
    labels = []
    used = {name: look for name, look in _CHANNELS.items() if one.trace.busy[name]}
    for row, (name, (label, colour)) in enumerate(used.items()):
        spans = one.trace.busy[name]
        bars = [(start * per_ns, (end - start) * per_ns) for start, end in spans]
        axis.broken_barh(bars, (row - 0.35, 0.7), color=colour, linewidth=0)
        labels.append(f"{label}, {percent(_busy(spans) / one.replayed.step_ns)}")
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    dress(axis, "busy", "", grid="x")


def _busy(spans: Sequence[Interval]) -> int:
    return sum(end - start for start, end in spans)
