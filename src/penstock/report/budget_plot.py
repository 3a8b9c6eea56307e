"""Plot of what budgets cost a step: its time by budget, and memory over time without and with one.

Needs matplotlib: ``pip install 'penstock[plot]'``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.units import format_bytes
from penstock.report.budget_table import BudgetCost, mib
from penstock.report.style import (
    BUDGET_COLOUR,
    COLOURS,
    INK,
    STYLE,
    dress,
    matplotlib,
    save,
    thinned,
    unit_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PARTS: Final = (("computing", COLOURS[2]), ("beside transfers", COLOURS[0]), ("waits", COLOURS[1]))


def plot_budgets(
    costs: Sequence[BudgetCost], path: str | os.PathLike[str], *, title: str, setting: str
) -> None:
    """Draw the budgets into a file; its suffix (``.svg``, ``.png``, ``.pdf``) decides the format.

    Args:
        costs: The step without a budget, then within each; those that do not fit are left out.
        path: Path of the file.
        title: Title of the plot.
        setting: Name of the option that sets the budget.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure_module, style, _ = matplotlib()
    fitting = [one for one in costs if one.fits]
    with style.context(STYLE):
        figure = figure_module.Figure(
            figsize=(10, 3.6 + 0.5 * len(fitting)), dpi=150, layout="constrained"
        )
        times, memory = figure.subplots(2, 1, height_ratios=[1 + 0.5 * len(fitting), 3])
        _draw_times(times, fitting, setting)
        _draw_memory(memory, fitting)
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
        save(figure, path)


def _draw_times(axis: Axes, costs: Sequence[BudgetCost], setting: str) -> None:
    """Draw a bar for each budget, divided by what the time goes to."""
    scale = 1e9 if max(one.step_ns for one in costs) >= 1e9 else 1e6
    computing = min(one.step_ns - one.stall_ns for one in costs)
    for row, one in enumerate(costs):
        parts = (computing, one.step_ns - one.stall_ns - computing, one.stall_ns)
        left = 0.0
        for (name, colour), took in zip(_PARTS, parts, strict=True):
            label = name if row == 0 else None
            axis.barh(row, took / scale, 0.6, left, color=colour, label=label)
            left += took / scale
        note = f"{one.slowdown:.2f} x" + (
            f", {format_bytes(one.written_bytes)} to flash" if one.written_bytes else ""
        )
        axis.annotate(
            note, (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9,
            color=INK,
        )  # fmt: skip
    names = [
        f"{setting} {mib(one.budget_bytes)}" if row else "no budget"
        for row, one in enumerate(costs)
    ]
    axis.set_yticks(range(len(costs)), names)
    axis.set_ylim(len(costs) - 0.4, -0.6)
    axis.set_xlim(0, 1.3 * max(one.step_ns for one in costs) / scale)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize=9, frameon=False)
    unit = "s" if scale == 1e9 else "ms"
    dress(axis, f"time of forward and backward in a step ({unit})", "", grid="x")


def _draw_memory(axis: Axes, costs: Sequence[BudgetCost]) -> None:
    """Draw saved tensors in memory over one pass, without a budget and with the smallest one."""
    shown = [costs[0], *costs[1:][-1:]]
    scale, unit = unit_of(shown[0].outcome.replayed.peak_bytes)
    for one, colour in zip(shown, (COLOURS[2], COLOURS[0]), strict=False):
        found = one.outcome.replayed
        levels = one.outcome.trace.memory["device"]
        whens = np.array([0, *(when for when, _ in levels), found.step_ns], np.float64)
        sizes = np.array([0, *(n for _, n in levels), levels[-1][1] if levels else 0], np.float64)
        times, heights = thinned(whens / 1e6, sizes / scale)
        label = "no budget" if one is costs[0] else f"within {mib(one.budget_bytes)}"
        axis.step(times, heights, where="post", color=colour, linewidth=1.3, label=label)
        axis.fill_between(times, heights, step="post", color=colour, alpha=0.12, linewidth=0)
    if len(shown) > 1:
        axis.axhline(
            shown[1].budget_bytes / scale, color=BUDGET_COLOUR, linewidth=1.2, linestyle=(0, (5, 3))
        )
    axis.legend(loc="upper right", fontsize=9, frameon=False)
    axis.set_xlabel("time (ms)", color=INK)
    dress(axis, "saved tensors in memory", unit)
