"""Plot of memory over time: the memory of a run, its budget, and its steps.

Runs are drawn one below the other on equal axes, so that sizes and times can be compared. Needs
matplotlib: ``pip install 'penstock[plot]'``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.core.units import format_bytes
from penstock.observe.events import Event, Level, Span, Stage
from penstock.observe.recorder import Recorder
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
    from matplotlib.figure import Figure

MAX_SHADED_STEPS: Final = 60
"""Maximum number of steps that are shaded: finer stripes would be noise."""
_SHADE: Final = "#e8ecf0"


@dataclass(frozen=True, kw_only=True)
class MemorySeries:
    """Samples of one memory's level in one run. A level holds until the next sample."""

    run: str
    """Name of the run: curves of one run share a panel and its steps."""
    memory: str
    """Name of the memory in the legend: ``"device"``, ``"rss"``, ..."""
    t_ns: Sequence[int]
    """Time of each sample; must not decrease."""
    nbytes: Sequence[int]
    steps_ns: Sequence[tuple[int, int]] = ()
    """Beginning and end of each step, on the same clock."""

    def __post_init__(self) -> None:
        if len(self.t_ns) != len(self.nbytes) or not self.t_ns:
            raise ConfigError(
                f"series {self.run!r}, {self.memory!r}: {len(self.t_ns)} times and"
                f" {len(self.nbytes)} levels; the numbers must be equal and not 0"
            )

    @classmethod
    def of(cls, source: Recorder | Iterable[Event], memory: str, *, run: str) -> MemorySeries:
        """Build from the samples of ``memory`` that a recorder, or a log, has kept.

        Raises:
            ConfigError: There are no such samples.
        """
        events = source.events() if isinstance(source, Recorder) else list(source)
        levels = [e for e in events if isinstance(e, Level) and e.memory == memory]
        steps = [e for e in events if isinstance(e, Span) and e.stage == Stage.STEP]
        return cls(
            run=run,
            memory=memory,
            t_ns=[level.t_ns for level in levels],
            nbytes=[level.nbytes for level in levels],
            steps_ns=[(step.start_ns, step.end_ns) for step in steps],
        )

    @property
    def peak_bytes(self) -> int:
        """The highest level."""
        return max(self.nbytes)


def plot_memory(
    series: Sequence[MemorySeries],
    path: str | os.PathLike[str],
    *,
    budget_bytes: int | None = None,
    title: str = "Memory over time",
) -> None:
    """Draw the series into a file; its suffix (``.png``, ``.svg``, ``.pdf``) decides the format.

    Args:
        series: One or more series. Those with the same ``run`` share a panel.
        path: Path of the file.
        budget_bytes: Budget, drawn as a line across all panels.
        title: Title of the plot.

    Raises:
        ConfigError: There is no series, or matplotlib is not installed.
        OSError: The file cannot be written.
    """
    if not series:
        raise ConfigError("plot_memory: series is empty; pass at least one")
    figure_module, style, effects = matplotlib()
    halo = effects.withStroke(linewidth=3, foreground="white")
    look = _Look.of(series, budget_bytes, halo)
    panels = [[s for s in series if s.run == r] for r in look.spans]
    with style.context(STYLE):
        figure = figure_module.Figure(
            figsize=(10, 1.3 + 2.9 * len(panels)), dpi=150, layout="constrained"
        )
        axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, look)
            _draw_budget(axis, budget_bytes, look.scale)
            dress(axis, panel[0].run, f"resident ({look.unit})")
        axes[-1].set_xlabel("time (s)", color=INK)
        axes[-1].set_xlim(0, max(look.length_s(run) for run in look.spans) or 1.0)
        axes[-1].set_ylim(0, 1.15 * look.top_bytes / look.scale)  # room for the labels of peaks
        _legend(figure, axes, title)
        figure.savefig(path)


@dataclass(frozen=True, kw_only=True)
class _Look:
    """Settings that all panels share."""

    top_bytes: int
    scale: int
    """Bytes per unit of the axis."""
    unit: str
    spans: dict[str, tuple[int, int]]
    """Beginning of the first series and end of the last one, by run."""
    colours: dict[str, str]
    """Colours by memory."""
    halo: Any
    """Path effect that keeps text readable over a curve."""

    @classmethod
    def of(cls, series: Sequence[MemorySeries], budget_bytes: int | None, halo: object) -> _Look:
        top_bytes = max([budget_bytes or 0, *(one.peak_bytes for one in series)]) or 1
        scale, unit = unit_of(top_bytes)
        memories = dict.fromkeys(one.memory for one in series)
        return cls(
            top_bytes=top_bytes,
            scale=scale,
            unit=unit,
            spans=_run_spans(series),
            colours=dict(zip(memories, cycle(COLOURS), strict=False)),
            halo=halo,
        )

    def seconds(self, run: str, t_ns: int) -> float:
        """Return the time since the run began."""
        return (t_ns - self.spans[run][0]) / 1e9

    def length_s(self, run: str) -> float:
        """Return the length of a run."""
        return self.seconds(run, self.spans[run][1])


def _run_spans(series: Sequence[MemorySeries]) -> dict[str, tuple[int, int]]:
    moments: dict[str, list[int]] = {}
    for one in series:
        known = moments.setdefault(one.run, [])
        known += [one.t_ns[0], one.t_ns[-1], *(t_ns for step in one.steps_ns for t_ns in step)]
    return {run: (min(known), max(known)) for run, known in moments.items()}


def _draw_panel(axis: Axes, panel: Sequence[MemorySeries], look: _Look) -> None:
    _shade_steps(axis, panel, look)
    for one in panel:
        t_s, levels = _curve(one, look)
        levels = levels / look.scale
        colour = look.colours[one.memory]
        axis.step(t_s, levels, where="post", color=colour, linewidth=1.3, label=one.memory)
        axis.fill_between(t_s, levels, step="post", color=colour, alpha=0.12, linewidth=0)
        _label_peak(axis, one, look)


def _shade_steps(axis: Axes, panel: Sequence[MemorySeries], look: _Look) -> None:
    one = max(panel, key=lambda one: len(one.steps_ns))
    if len(one.steps_ns) > MAX_SHADED_STEPS:
        return
    for start_ns, end_ns in one.steps_ns[::2]:
        axis.axvspan(
            look.seconds(one.run, start_ns),
            look.seconds(one.run, end_ns),
            color=_SHADE,
            linewidth=0,
            label="every other step",
        )


def _label_peak(axis: Axes, one: MemorySeries, look: _Look) -> None:
    at = max(range(len(one.nbytes)), key=one.nbytes.__getitem__)
    t_s = look.seconds(one.run, one.t_ns[at])
    place = t_s / (look.length_s(one.run) or 1.0)
    axis.annotate(
        f"peak {format_bytes(one.peak_bytes)}",
        (t_s, one.peak_bytes / look.scale),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if place < 0.1 else "right" if place > 0.9 else "center",
        color=look.colours[one.memory],
        fontsize=9,
        fontweight="bold",
        path_effects=[look.halo],
    )


def _draw_budget(axis: Axes, budget_bytes: int | None, scale: int) -> None:
    if budget_bytes is not None:
        axis.axhline(
            budget_bytes / scale,
            color=BUDGET_COLOUR,
            linewidth=1.2,
            linestyle=(0, (5, 3)),
            label=f"budget, {format_bytes(budget_bytes)}",
        )


def _legend(figure: Figure, axes: Sequence[Axes], title: str) -> None:
    """Draw one legend below the axes, so that it never covers data or the title."""
    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        labelcolor=INK,
    )


def _curve(
    one: MemorySeries, look: _Look
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return times in seconds and levels in bytes, thinned if there are many."""
    start_ns, end_ns = look.spans[one.run]
    t_s = (np.append(np.asarray(one.t_ns, dtype=np.int64), end_ns) - start_ns) / 1e9
    levels = np.append(np.asarray(one.nbytes, dtype=np.float64), one.nbytes[-1])
    return thinned(t_s, levels)
