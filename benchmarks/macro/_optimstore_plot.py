"""The pictures of ``optimstore.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _optimstore_models import CARDS, LEAST, MOST, ROUNDING

from penstock.report.style import BUDGET_COLOUR, COLOURS, FAINT, INK, STYLE, dress, matplotlib

CARD_NAMES = {"a100-g10": "A100", "rtx-3090": "RTX 3090", "v100-nvme": "V100"}


def designs(
    found: list[dict[str, Any]],
    line: list[dict[str, Any]],
    cheapest: dict[str, Any],
    wanted: float,
    path: Path,
) -> None:
    """All designs by area and speed-up; ``line``: those that no cheaper one outruns."""
    figure_module, style, _ = matplotlib()
    with style.context(STYLE):
        figure = figure_module.Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
        axis = figure.subplots()
        for states, marker in (([4, 4, 4], "o"), ([4, 2, 2], "v")):
            some = [one for one in found if one["state_bytes"] == states]
            shift, note = (1.0, "") if marker == "o" else (1.07, " (drawn beside)")
            points = axis.scatter(
                [(one["added_area"] + 1) * shift for one in some], [one["speedup"] for one in some],
                c=[one["ssd_w"] for one in some], cmap="viridis", vmin=6, vmax=20, s=30, marker=marker,
                label=f"{sum(states)} B written for a parameter{note}", linewidths=0,
            )  # fmt: skip
        axis.step(
            [one["added_area"] + 1 for one in line], [one["speedup"] for one in line], where="post",
            color=FAINT, linewidth=1, zorder=0,
        )  # fmt: skip
        axis.axhline(wanted, color=BUDGET_COLOUR, linewidth=1, linestyle=(0, (5, 3)))
        axis.annotate(
            f"cheapest of {wanted:g} times: the element works\nwhile the array does,"
            f" {cheapest['speedup']:.2f} x at {cheapest['ssd_w']:.1f} W",
            (cheapest["added_area"] + 1, cheapest["speedup"]), xytext=(28, -62),
            textcoords="offset points", fontsize=9, color=INK,
            arrowprops={"arrowstyle": "-", "color": INK},
        )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("area of elements and additions, today's = 1 (assumed; log)", color=INK)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=9, loc="lower right")
        figure.colorbar(points, ax=axis, label="mean power of the drive, W")
        dress(
            axis,
            "Adam, 6.7 B parameters on the dies: speed-up over the host by added area",
            "times",
        )
        figure.savefig(path, metadata={"Date": None})


def scales(scaling: list[dict[str, Any]], networks: dict[str, Any], path: Path) -> None:
    """The update by channels and dies, and whole iterations by size of the network."""
    figure_module, style, _ = matplotlib()
    with style.context(STYLE):
        figure = figure_module.Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2)
        _channels_and_dies(left, scaling)
        _end_to_end(right, networks)
        figure.savefig(path, metadata={"Date": None})


def _channels_and_dies(axis: Any, scaling: list[dict[str, Any]]) -> None:
    channels = sorted({one["channels"] for one in scaling})
    for colour, count in zip(COLOURS, channels, strict=False):
        some = [one for one in scaling if one["channels"] == count]
        dies = [one["dies"] for one in some]
        for where, line, marker in (("die", "-", "o"), ("controller", (0, (4, 3)), "s")):
            axis.plot(
                dies, [one["host_s"] / one[f"{where}_s"] for one in some], linestyle=line,
                color=colour, marker=marker, markersize=5,
                label=f"{count} channels" if where == "die" else None,
            )  # fmt: skip
    axis.plot([], [], color=FAINT, linestyle="-", marker="o", markersize=5, label="on the dies")
    axis.plot(
        [], [], color=FAINT, linestyle=(0, (4, 3)), marker="s", markersize=5, label="in the controller"
    )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({one["dies"] for one in scaling}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("dies of the drive (log)", color=INK)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    dress(axis, "Update of 6.7 B parameters, over the host with the same drive", "times")


def _end_to_end(axis: Any, networks: dict[str, Any]) -> None:
    axis.axhspan(LEAST - ROUNDING, MOST + ROUNDING, color="#e4e8eb", zorder=0, linewidth=0)
    axis.text(
        0.98, (LEAST + MOST) / 2, "the paper: 2.2 to 2.5", fontsize=9, color=INK, ha="right", va="center",
        transform=axis.get_yaxis_transform(),
    )  # fmt: skip
    for colour, marker, card in zip(COLOURS, "os^", CARDS, strict=False):
        points = [
            (one["parameters"] / 1e9, one["cards"][card]["die"])
            for one in networks.values()
            if one["cards"][card] is not None
        ]
        axis.scatter(
            *zip(*points, strict=True), color=colour, marker=marker, s=34, label=CARD_NAMES[card]
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xticks([0.3, 1, 3, 10])
    axis.minorticks_off()
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("parameters, billions (log)", color=INK)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    dress(axis, "Whole iterations of networks: on the dies over the host", "times")
