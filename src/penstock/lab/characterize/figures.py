"""Results as a picture: stalls, latencies, slowdowns and memory, network by network.

Needs matplotlib: ``pip install 'penstock[plot]'``.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import ConfigError
from penstock.core.units import GIB, MIB
from penstock.lab.characterize.claims import rows, times
from penstock.lab.characterize.tables import scale_words
from penstock.report.style import BUDGET_COLOUR, COLOURS, INK, STYLE, dress, matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STALLS: Final = {"torch_save": "torch.save", "sync": "ours", "async": "ours, in the background"}
_NEIGHBOUR_LABELS: Final = {
    "copies": "copies of itself",
    "cpu": "CPU",
    "memory": "memory",
    "io": "I/O",
}
_MIN_SHARE: Final = 1e-5


def plot(document: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw a document of :func:`.characterize`; the suffix of the file decides the format.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written in that format.
    """
    figure_module, style, _ = matplotlib()
    records, mix = document["networks"], document.get("mix")
    panels: list[Callable[[Axes], None]] = []
    if records:
        panels += [partial(each, records=records) for each in (_draw_stalls, _draw_latencies)]
        if all(each["colocation"] for each in records):
            panels.append(partial(_draw_colocation, records=records))
    if mix:
        panels.append(partial(_draw_mix, mix=mix))
    if records:
        panels.append(partial(_draw_memory, records=records))
    with style.context(STYLE):
        figure = figure_module.Figure(
            figsize=(10, 3.1 * len(panels) + 0.5), dpi=150, layout="constrained"
        )
        axes = figure.subplots(len(panels), 1, squeeze=False)
        for axis, draw in zip(axes[:, 0], panels, strict=True):
            draw(axis)
        title = textwrap.fill(f"The poster's networks at {scale_words(document)}", 110)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write the picture {str(path)!r}: {error}") from error


def _draw_stalls(axis: Axes, records: Any) -> None:
    found = {
        label: [100 * stage["checkpoint"][way]["stall_share"] for _, stage in rows(records)]
        for way, label in _STALLS.items()
    }
    _bars(axis, [title for title, _ in rows(records)], found)
    axis.set_yscale("log")
    for share in (1, 5):
        axis.axhline(share, color=BUDGET_COLOUR, linewidth=0.9, linestyle=(0, (5, 3)))
        axis.annotate(
            f"{share} %", (1, share), xycoords=("axes fraction", "data"), xytext=(2, 0),
            textcoords="offset points", va="center", fontsize=8, color=BUDGET_COLOUR,
        )  # fmt: skip
    dress(axis, "stall at a checkpoint every 100 steps", "% of training")


def _draw_latencies(axis: Axes, records: Any) -> None:
    found = {}
    for way, label in (("torch_save", "torch"), ("sync", "ours")):
        for name, what in (("latency_s", "until durable"), ("restore_s", "restored, cold")):
            found[f"{label}, {what}"] = [
                1e3 * stage["checkpoint"][way][name] for _, stage in rows(records)
            ]
    _bars(axis, [title for title, _ in rows(records)], found)
    axis.set_yscale("log")
    dress(axis, "latency of a checkpoint", "milliseconds")


def _draw_colocation(axis: Axes, records: Any) -> None:
    found = {
        label: [each["colocation"][kind]["slowdown"] for each in records]
        for kind, label in _NEIGHBOUR_LABELS.items()
    }
    _bars(axis, [each["title"] for each in records], found)
    axis.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
    count = records[0]["colocation"]["copies"]["count"]
    dress(axis, f"time of a step beside {count} of each, over alone", "times")


def _draw_mix(axis: Axes, mix: Any) -> None:
    jobs = mix["networks"]
    found = {"step": [times(each["step_s"]) for each in jobs]}
    for way, label in _STALLS.items():
        found[f"stall: {label}"] = [times(each["stall_s"][way]) for each in jobs]
    _bars(axis, [each["title"] for each in jobs], found)
    axis.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
    dress(axis, "these networks at the same time, over alone", "times")


def _draw_memory(axis: Axes, records: Any) -> None:
    most = max(each["dram"]["idle_bytes"] for each in records)
    scale, unit = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    found = {
        label: [each["dram"][name] / scale for each in records]
        for name, label in (("idle_bytes", "idle"), ("suspended_bytes", "suspended to flash"))
    }
    _bars(axis, [each["title"] for each in records], found)
    dress(axis, "DRAM of a job that waits", unit)


def _bars(axis: Axes, titles: Sequence[str], found: Mapping[str, Sequence[float]]) -> None:
    """Draw a group for each title with a bar for each label."""
    width = 0.8 / len(found)
    for number, (label, values) in enumerate(found.items()):
        places = [group + (number - (len(found) - 1) / 2) * width for group in range(len(titles))]
        axis.bar(
            places,
            [max(each, _MIN_SHARE) for each in values],
            0.9 * width,
            color=COLOURS[number],
            label=label,
        )
    axis.set_xticks(range(len(titles)), [title.replace(", ", ",\n") for title in titles])
    axis.margins(x=0.01, y=0.16)
    axis.legend(frameon=False, fontsize=8, ncols=len(found), loc="upper right")
