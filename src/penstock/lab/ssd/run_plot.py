"""Pictures of a simulated drive: activity over time, energy by component, and rates by transfer size.

Needs matplotlib: ``pip install 'penstock[plot]'``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.lab.ssd.service import Measured
from penstock.lab.ssd.usage import UsageInterval
from penstock.report.style import COLOURS, INK, STYLE, dress, matplotlib, save, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_usage(
    title: str,
    moments: Sequence[UsageInterval],
    energy_j: Sequence[tuple[str, float]],
    path: str | os.PathLike[str],
    *,
    cap_w: float | None = None,
) -> None:
    """Draw the activity of channels and dies and the power over time, with the energy beneath.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format.
    """
    figure_module, style, _ = matplotlib()
    with style.context(STYLE):
        figure = figure_module.Figure(figsize=(10, 8), dpi=150, layout="constrained")
        above, below, last = figure.subplots(3, 1, height_ratios=(1.4, 1, 1.2))
        below.sharex(above)
        edges = [1e3 * moments[0].begin_s, *(1e3 * one.end_s for one in moments)]
        for colour, name in zip(COLOURS, ("channels", "dies"), strict=False):
            share = [100 * getattr(one, name) for one in moments]
            above.stairs(share, edges, color=colour, linewidth=1.2, label=name)
        above.set_ylim(0, 103)
        above.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        dress(above, f"{title}: at work", "per cent")
        below.stairs([one.watts for one in moments], edges, color=COLOURS[2], linewidth=1.2)
        if cap_w is not None:
            below.axhline(cap_w, color=INK, linewidth=1, linestyle=(0, (5, 3)))
            below.annotate(
                "cap", (edges[-1], cap_w), fontsize=9, color=INK, va="bottom", ha="right"
            )
        below.set_ylim(bottom=0)
        below.set_xlabel("milliseconds", color=INK)
        dress(below, "power of flash, channels and controller", "watts")
        _draw_energy(last, energy_j)
        save(figure, path)


def plot_service(title: str, measured: Measured, path: str | os.PathLike[str]) -> None:
    """Draw the rate of a drive by transfer size, for reads and writes.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format.
    """
    figure_module, style, _ = matplotlib()
    with style.context(STYLE):
        figure = figure_module.Figure(figsize=(8, 4.4), dpi=150, layout="constrained")
        axis = figure.subplots()
        sizes = measured.sizes_bytes
        for colour, name, times in (
            (COLOURS[0], "read", measured.read_s),
            (COLOURS[1], "written", measured.write_s),
        ):
            rates = [n / s / 1e9 for n, s in zip(measured.sizes_bytes, times, strict=True)]
            axis.plot(sizes, rates, color=colour, marker="o", markersize=3.5, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [_size(nbytes) for nbytes in sizes])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("one transfer", color=INK)
        axis.legend(frameon=False, fontsize=9)
        dress(axis, f"{title}: transfers, each alone", "GB/s")
        save(figure, path)


def _size(nbytes: int) -> str:
    scale, unit = unit_of(nbytes)
    return f"{nbytes / scale:g} {unit}"


def _draw_energy(axis: Axes, energy_j: Sequence[tuple[str, float]]) -> None:
    """Draw a bar for each component, the largest first."""
    largest = sorted((joules, name) for name, joules in energy_j if joules)[::-1]
    axis.barh(range(len(largest)), [1e3 * joules for joules, _ in largest], 0.7, color=COLOURS[3])
    axis.set_yticks(range(len(largest)), [name for _, name in largest], fontsize=8)
    axis.set_ylim(len(largest) - 0.5, -0.5)
    axis.set_xlabel("millijoules", color=INK)
    dress(axis, "energy of the drive by component", "", grid="x")
    axis.tick_params(axis="y", labelsize=8)
