"""The numbers that a page about runs draws, as plain values of a bounded size.

Times are seconds from the beginning of the run's log, sizes are bytes. What happens over time is given
for equal parts of the run: the highest level in each, the mean rate in each, the share of each that was
waited. So a page is as large for a long run as for a short one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock import __version__
from penstock.core.errors import ConfigError
from penstock.observe.clients import ON_FLASH, is_once
from penstock.observe.counters import SAVED_TENSORS
from penstock.observe.events import Stage
from penstock.observe.job_summary import rank_line
from penstock.observe.totals import StepTotals
from penstock.report.run_events import Intervals, RunEvents, Samples
from penstock.report.run_file import LOG, FinishedRun, read_run
from penstock.report.slot_bars import pass_bars

PARTS: Final = 240
"""Number of equal parts of a run's time."""
MOST_BARS: Final = 240
"""Maximum number of bars for steps; each stands for several steps if there are more."""

_Array = npt.NDArray[np.float64]


def page_data(paths: Sequence[str | os.PathLike[str]]) -> tuple[dict[str, Any], list[FinishedRun]]:
    """Read event logs, of one run or of the ranks of a job.

    Returns:
        The numbers of the page, and the finished runs.

    Raises:
        ConfigError: A file is no event log, or cannot be read as one.
    """
    runs, found = [], []
    for path in paths:
        events = RunEvents()
        run = read_run(path, observer=events)
        if run.kind != LOG:
            raise ConfigError(
                f"{os.fspath(path)} is a summary, which has no events to draw; name the event log of the"
                " run (`penstock run --event-log FILE`, or event_log=...)"
            )
        runs.append(run)
        found.append(_run_data(Path(path).name, run, events))
    return {"version": __version__, "runs": found}, runs


def _run_data(name: str, run: FinishedRun, events: RunEvents) -> dict[str, Any]:
    edges = _edges(events)
    line = rank_line(run.summary)
    return {
        "name": name,
        "label": name if run.summary.rank is None else f"rank {run.summary.rank}, {name}",
        "complete": run.complete,
        "lost_events": run.lost_events,
        "missing_files": run.missing_files,
        "missing_steps": run.missing_steps,
        "summary": run.summary.to_json(),
        "stalled_s": line.stalled_s,
        "length_s": (events.end_ns - events.start_ns) / 1e9,
        "part_s": float(edges[1] - edges[0]) / 1e9,
        "steps": _steps(events.steps, events.start_ns),
        "memories": _memories(run, events, edges),
        "owners": _owners(run, events, edges),
        "process": _process(events, edges),
        "lanes": _lanes(events, edges),
        "stalls": _stalls(events, edges),
        "written": _written(events, edges),
        "marks": _marks(events),
        "pass": pass_bars(events),
    }


def _edges(events: RunEvents) -> npt.NDArray[np.int64]:
    """Return the ends of the parts, in nanoseconds of the log's clock."""
    length_ns = max(PARTS, events.end_ns - events.start_ns)
    return events.start_ns + (np.arange(PARTS + 1) * length_ns) // PARTS


# -- memory -------------------------------------------------------------------------------------------


def _memories(
    run: FinishedRun, events: RunEvents, edges: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """Return the highest level of each memory in each part."""
    budgets = {line.memory: line.budget_bytes for line in run.summary.memory}
    order = {line.memory: place for place, line in enumerate(run.summary.memory)}
    names = sorted(events.levels, key=lambda name: (order.get(name, len(order)), name))
    return [
        {
            "memory": name,
            "budget_bytes": budgets.get(name),
            "peak_bytes": max(events.levels[name].nbytes),
            "highest": highest(events.levels[name], edges),
        }
        for name in names
    ]


def _owners(run: FinishedRun, events: RunEvents, edges: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the host memory that Penstock held, by owner, in each part.

    Saved tensors in host memory are taken from the levels of the device, which has every change; other
    owners are sampled some five times a second.
    """
    peaks = (
        {}
        if run.summary.host is None
        else {line.owner: line.peak_bytes for line in run.summary.host.owners}
    )
    rows = []
    for owner, samples in events.owners.items():
        levels = [highest(samples, edges)]
        if owner == SAVED_TENSORS:
            levels += [
                highest(each, edges) for name, each in events.levels.items() if name == "device"
            ]
        values = [max(column) for column in zip(*levels, strict=True)]
        if any(values):
            peak = peaks.get(owner, max(values))
            rows.append({"owner": owner, "peak_bytes": peak, "highest": values})
    rows.sort(key=lambda row: -row["peak_bytes"])
    return {"limit_bytes": events.limit_bytes, "rows": rows}


def _process(events: RunEvents, edges: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the memory of the whole process in each part, and what the program's own tensors take."""
    sampled = bool(events.process.t_ns)
    return {
        "highest": highest(events.process, edges) if sampled else [],
        "peak_bytes": max(events.process.nbytes) if sampled else 0,
        "model": dict(events.model),
        "model_s": max(0, events.model_ns - events.start_ns) / 1e9,
    }


def highest(samples: Samples, edges: npt.NDArray[np.int64]) -> list[int]:
    """Return the highest level in each part of the time; a level holds until the next one."""
    times = np.frombuffer(samples.t_ns, np.int64) if samples.t_ns else np.empty(0, np.int64)
    first = np.searchsorted(times, edges, side="left")
    levels, held, found = samples.nbytes, 0, []
    for begin, end in zip(first[:-1], [*first[1:-1], len(times)], strict=True):
        inside = levels[begin:end]
        found.append(max(held, max(inside, default=0)))
        held = inside[-1] if inside else held
    return found


# -- transfers and waits ------------------------------------------------------------------------------


def _lanes(events: RunEvents, edges: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the mean rate and the busy share of each kind of transfer in each part."""
    part_ns = np.diff(edges).astype(np.float64)
    rows = []
    for (stage, tier), spans in sorted(events.lanes.items(), key=lambda item: item[0][::-1]):
        rows.append(
            {
                "stage": str(stage),
                "place": "flash" if tier in ON_FLASH else tier,
                "client": ON_FLASH.get(tier, ""),
                "is_once": is_once(tier),
                "transfers": len(spans.nbytes),
                "nbytes": sum(spans.nbytes),
                "busy_s": float(_busy(spans, edges).sum()) / 1e9,
                "bytes_per_s": _plain(_moved(spans, edges) / part_ns * 1e9),
                "busy": _plain(_busy(spans, edges) / part_ns),
            }
        )
    return rows


def _stalls(events: RunEvents, edges: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the share of each part that was waited, by cause, and the longest waits."""
    part_ns = np.diff(edges).astype(np.float64)
    causes: list[dict[str, Any]] = [
        {
            "cause": cause,
            "times": len(spans.dur_ns),
            "total_s": float(_busy(spans, edges).sum()) / 1e9,
            "share": _plain(_busy(spans, edges) / part_ns),
        }
        for cause, spans in events.stalls.items()
    ]
    causes.sort(key=lambda row: -row["total_s"])
    longest = sorted(events.longest, reverse=True)
    return {
        "causes": causes,
        "longest": [
            {
                "at_s": (start_ns - events.start_ns) / 1e9,
                "dur_s": dur_ns / 1e9,
                "cause": cause,
                "slot": slot,
            }
            for dur_ns, start_ns, cause, slot in longest
        ],
    }


def _written(events: RunEvents, edges: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return the bytes written to flash until the end of each part, by client."""
    return [
        {
            "client": ON_FLASH[tier],
            "nbytes": sum(spans.nbytes),
            "until": [round(value) for value in np.cumsum(_moved(spans, edges))],
        }
        for (stage, tier), spans in events.lanes.items()
        if stage == Stage.WRITE and tier in ON_FLASH
    ]


def _moved(spans: Intervals, edges: npt.NDArray[np.int64]) -> _Array:
    """Return the bytes in each part, if each span moved its bytes at a constant rate."""
    return _amounts(_times(spans.start_ns, edges), _times(spans.dur_ns), spans.nbytes, edges)


def _busy(spans: Intervals, edges: npt.NDArray[np.int64]) -> _Array:
    """Return the time in each part during which at least one span ran."""
    starts = np.frombuffer(spans.start_ns, np.int64)
    ends = starts + np.frombuffer(spans.dur_ns, np.int64)
    order = np.argsort(starts, kind="stable")
    starts, until = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > until[:-1]]))
    begins, lasts = starts[first], until[np.append(first[1:] - 1, len(starts) - 1)]
    lengths = (lasts - begins).astype(np.float64)
    return _amounts((begins - edges[0]).astype(np.float64), lengths, lengths, edges)


def _times(values: Any, edges: npt.NDArray[np.int64] | None = None) -> _Array:
    found = np.frombuffer(values, np.int64)
    return (found if edges is None else found - edges[0]).astype(np.float64)


def _amounts(starts: _Array, lengths: _Array, amounts: Any, edges: npt.NDArray[np.int64]) -> _Array:
    """Distribute an amount evenly over each span, and return what falls into each part.

    What lies before the first edge, or after the last, counts in the first or the last part.
    """
    lengths = np.maximum(lengths, 1.0)
    rates = np.asarray(amounts, np.float64) / lengths
    at = (edges - edges[0]).astype(np.float64)
    until = _ramps(starts, rates, at) - _ramps(starts + lengths, rates, at)
    until[0], until[-1] = 0.0, float(np.sum(np.asarray(amounts, np.float64)))
    return np.maximum(0.0, np.diff(until))


def _ramps(starts: _Array, rates: _Array, at: _Array) -> _Array:
    """Return, at each time, the sum of ``rate * (time - start)`` over all starts before it."""
    order = np.argsort(starts)
    sums = np.concatenate([[0.0], np.cumsum(rates[order])])
    offsets = np.concatenate([[0.0], np.cumsum((rates * starts)[order])])
    before = np.searchsorted(starts[order], at)
    found: _Array = sums[before] * at - offsets[before]
    return found


def _plain(values: Iterable[float]) -> list[float]:
    """Return six digits of each number, which is more than a picture shows."""
    return [float(f"{value:.6g}") for value in values]


# -- steps and marks ----------------------------------------------------------------------------------


def _steps(steps: Sequence[StepTotals], start_ns: int) -> dict[str, Any]:
    """Return the mean time of groups of steps, and how long training waited in them."""
    group = max(1, -(-len(steps) // MOST_BARS))
    bars = []
    for begin in range(0, len(steps), group):
        part = steps[begin : begin + group]
        causes: dict[str, float] = {}
        for one in part:
            for cause, stall in one.totals.stalls.items():
                causes[cause] = causes.get(cause, 0.0) + stall.total_ns / 1e9 / len(part)
        bars.append(
            {
                "index": part[0].index,
                "start_s": (part[0].totals.start_ns - start_ns) / 1e9,
                "step_s": sum(one.totals.elapsed_ns for one in part) / 1e9 / len(part),
                "stalls_s": causes,
            }
        )
    return {"count": len(steps), "per_bar": group, "bars": bars}


def _marks(events: RunEvents) -> list[dict[str, Any]]:
    return [
        {"at_s": (t_ns - events.start_ns) / 1e9, "name": name, "text": _listed(fields)}
        for t_ns, name, fields in events.marks
    ]


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in fields.items())
