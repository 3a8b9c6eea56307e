"""The picture of ``papers.py``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import _papers_flash
import _papers_g10
import _papers_vdnn

PAPER, OURS, AUTO = "#b0b7be", "#0b6e99", "#d9730d"
PARTS = {
    "ideal_s": ("computing", "#4d6461"),
    "slower_algorithms_s": ("slower convolutions", "#6940a5"),
    "recompute_s": ("computing again", "#dfab01"),
    "waits_s": ("waiting", "#ad1a72"),
}


def plot(figures: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415  (an extra)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    _averages(axes[0][0], figures["vdnn"]["averages"])
    _step_times(axes[0][1], figures["vdnn"]["vgg16-256"])
    _throughputs(axes[1][0], figures["flashneuron"]["networks"])
    _shares(axes[1][1], figures["g10"])
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _averages(axis: Any, averages: dict[str, Any]) -> None:
    best = [row["policies"][row["best"]] for row in averages.values()]
    bars = {
        "vDNN, the paper": ([100 * _papers_vdnn.AVERAGES[name] for name in averages], PAPER),
        "ours, by layer": ([100 * one["managed_down_by_layer"] for one in best], OURS),
        "ours, by time": ([100 * one["managed_down_by_time"] for one in best], "#7fb5cc"),
    }
    _grouped(axis, list(averages), bars)
    axis.set(
        title="Average memory of the managed pool below the static baseline",
        ylabel="%",
        ylim=(0, 125),
    )


def _step_times(axis: Any, vgg: dict[str, Any]) -> None:
    rows = vgg["policies"]
    names = [name for name, row in rows.items() if row["feasible"]]
    ticks = [textwrap.fill(name, 18, break_on_hyphens=False) for name in names]
    left = [0.0] * len(names)
    for part, (label, colour) in PARTS.items():
        values = [rows[name][part] for name in names]
        axis.barh(ticks, values, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    ideal = next(iter(rows.values()))["ideal_s"]
    label = f"the paper's loss, {_papers_vdnn.LOSS:.0%}"
    axis.axvline(ideal / (1 - _papers_vdnn.LOSS), color="black", linestyle=":", label=label)
    axis.set(title="VGG-16, batch 256, in 12 GB: policies that fit", xlabel="s a step")
    axis.tick_params(axis="y", labelsize=9)
    axis.invert_yaxis()
    axis.legend(fontsize=8, frameon=False, loc="lower right")


def _throughputs(axis: Any, networks: dict[str, Any]) -> None:
    def best(row: dict[str, Any], which: str) -> float:
        run = row["by_machine"][which]["compressed"]["best"]
        return 100 * run["samples_per_s"] / row["memory_only"]["samples_per_s"]

    labels = [f"{name}\n{_batches(row)}" for name, row in networks.items()]
    bars = {
        "FlashNeuron, the paper's mean": ([100 * (1 + _papers_flash.GAIN)] * len(labels), PAPER),
        "flashneuron, one SSD": ([best(row, "one SSD") for row in networks.values()], "#7fb5cc"),
        "two SSDs": ([best(row, "two SSDs") for row in networks.values()], OURS),
    }
    _grouped(axis, labels, bars, columns=2)
    axis.axhline(100, color="black", linewidth=0.8)
    axis.set(
        title="Samples/s on a V100 at the best batch", ylabel="% of memory only", ylim=(0, 190)
    )


def _batches(row: dict[str, Any]) -> str:
    batches = (
        row["by_machine"][which]["compressed"]["best"]["batch"] for which in _papers_flash.MACHINES
    )
    return f"{', '.join(map(str, batches))}\nfor {row['memory_only']['batch']}"


def _shares(axis: Any, networks: dict[str, Any]) -> None:
    def share(policy: str) -> list[float]:
        runs = (row["artifact"]["policies"][policy] for row in networks.values())
        return [100 * run["share_of_ideal"] for run in runs]

    known = [_papers_g10.G10[name] for name in networks]
    bars = {
        "FlashNeuron, by G10": ([100 * one.flashneuron for one in known], PAPER),
        "flashneuron": (share("flashneuron"), OURS),
        "G10": ([100 * one.g10 for one in known], "#d5d9dd"),
        "lifetime": (share("lifetime"), "#7fb5cc"),
        "auto": (share("auto"), AUTO),
    }
    labels = [f"{name}\nbatch {one.batch}" for name, one in zip(networks, known, strict=True)]
    _grouped(axis, labels, bars, columns=3)
    axis.set(title="G10's kernels and tensors: share of ideal", ylabel="%", ylim=(0, 140))


def _grouped(
    axis: Any,
    labels: list[str],
    bars: dict[str, tuple[list[float], str]],
    *,
    columns: int | None = None,
) -> None:
    width = 0.8 / len(bars)
    for place, (label, (values, colour)) in enumerate(bars.items()):
        at = [i + (place - (len(bars) - 1) / 2) * width for i in range(len(labels))]
        drawn = axis.bar(at, values, width, color=colour, label=label)
        axis.bar_label(drawn, fmt="%.0f", fontsize=8, padding=2)
    axis.set_xticks(range(len(labels)), labels, fontsize=9)
    axis.legend(fontsize=8, frameon=False, loc="upper left", ncols=columns or len(bars))
