"""Trace of a recorder's events for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``.

The viewer groups events by process, so there are three:

- ``training``: the training thread, one lane per stage, named as in :class:`Stage`.
- ``tiers``: the transfers, one lane per tier and stage. Transfers of a lane may overlap, but slices
  of one thread must nest, so a lane has as many threads as it had simultaneous transfers.
- ``memory``: one counter per memory, in bytes.

Marks are instants across all lanes. Times are microseconds from the earliest event.
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from penstock.observe.events import Event, Level, Mark, Span, Stage
from penstock.observe.recorder import Recorder

TRAINING_PID: Final = 1
TIERS_PID: Final = 2
MEMORY_PID: Final = 3
_PROCESSES: Final = {TRAINING_PID: "training", TIERS_PID: "tiers", MEMORY_PID: "memory"}
_RANKS: Final = {
    str(stage): rank
    for rank, stage in enumerate(
        (
            Stage.STEP,
            Stage.FORWARD,
            Stage.BACKWARD,
            Stage.OPTIMIZER,
            Stage.STALL,
            *(stage for stage in Stage if stage is not Stage.STALL),
        )
    )
}

TraceEvent = dict[str, Any]
_Lane = tuple[str, str]


def write_trace(
    source: Recorder | Iterable[Event],
    path: str | os.PathLike[str],
    *,
    about: Mapping[str, object] | None = None,
) -> None:
    """Write the kept events; older ones have been dropped (``PENSTOCK_EVENT_MEMORY``).

    Args:
        source: A recorder, or events as :func:`penstock.observe.read_events` returns them.
        path: Path of the file, replaced atomically when the whole trace is written; compressed if it
            ends in ``.gz``, which Perfetto opens too.
        about: Facts for the trace's ``otherData``: policy, budget, versions.

    Raises:
        OSError: The file cannot be written.
    """
    events = source.events() if isinstance(source, Recorder) else source
    target = os.fspath(path)
    unfinished = f"{target}.part"
    opener = gzip.open if target.endswith(".gz") else open
    try:
        with opener(unfinished, "wt", encoding="utf-8") as file:
            _write_json(file, trace_events(events), about or {})
        os.replace(unfinished, target)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def trace_events(events: Iterable[Event]) -> Iterator[TraceEvent]:
    """Yield the ``traceEvents``: metadata and slices lane by lane, then counters and instants."""
    known = list(events)
    origin_ns = min((_start_ns(event) for event in known), default=0)
    spans = [event for event in known if isinstance(event, Span)]
    yield from _process_names()
    for tid, (lane, thread, slices) in enumerate(_threads(spans), start=1):
        pid = _pid(lane)
        name = _lane_name(lane) if thread == 0 else f"{_lane_name(lane)} ({thread + 1})"
        yield _metadata("thread_name", pid, tid, name=name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
        for span in slices:
            yield _slice(span, pid, tid, origin_ns)
    for event in known:
        if isinstance(event, Level):
            yield _counter(event, origin_ns)
        elif isinstance(event, Mark):
            yield _instant(event, origin_ns)


def _threads(spans: Sequence[Span]) -> Iterator[tuple[_Lane, int, list[Span]]]:
    lanes: dict[_Lane, list[Span]] = {}
    for span in spans:
        lanes.setdefault((span.tier, span.stage), []).append(span)
    for lane in sorted(lanes, key=_lane_rank):
        for thread, slices in enumerate(_without_overlap(lanes[lane])):
            yield lane, thread, slices


def _without_overlap(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few threads as possible, so that spans of a thread do not overlap."""
    threads: list[list[Span]] = []
    free: list[tuple[int, int]] = []  # (end of its last span, thread)
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        if free and free[0][0] <= span.start_ns:
            _, thread = heapq.heappop(free)
        else:
            thread = len(threads)
            threads.append([])
        threads[thread].append(span)
        heapq.heappush(free, (span.end_ns, thread))
    return threads


def _lane_rank(lane: _Lane) -> tuple[int, str, int, str]:
    tier, stage = lane
    return _pid(lane), tier, _RANKS.get(stage, len(_RANKS)), stage


def _lane_name(lane: _Lane) -> str:
    tier, stage = lane
    return f"{tier} {stage}" if tier else stage


def _pid(lane: _Lane) -> int:
    return TIERS_PID if lane[0] else TRAINING_PID


def _slice(span: Span, pid: int, tid: int, origin_ns: int) -> TraceEvent:
    args: dict[str, object] = {"slot": span.slot, "nbytes": span.nbytes}
    if span.cause:
        args["cause"] = span.cause
    if span.nbytes and span.end_ns > span.start_ns:
        args["GB_per_s"] = round(span.nbytes / (span.end_ns - span.start_ns), 3)
    return {
        "ph": "X",
        "name": span.cause or span.slot or span.stage,
        "cat": span.stage,
        "pid": pid,
        "tid": tid,
        "ts": (span.start_ns - origin_ns) / 1e3,
        "dur": max(span.end_ns - span.start_ns, 0) / 1e3,
        "args": args,
    }


def _counter(level: Level, origin_ns: int) -> TraceEvent:
    return {
        "ph": "C",
        "name": level.memory,
        "pid": MEMORY_PID,
        "tid": 0,
        "ts": (level.t_ns - origin_ns) / 1e3,
        "args": {"bytes": level.nbytes},
    }


def _instant(mark: Mark, origin_ns: int) -> TraceEvent:
    return {
        "ph": "i",
        "s": "g",
        "name": mark.name,
        "cat": "mark",
        "pid": TRAINING_PID,
        "tid": 0,
        "ts": (mark.t_ns - origin_ns) / 1e3,
        "args": dict(mark.fields),
    }


def _process_names() -> Iterator[TraceEvent]:
    for pid, name in _PROCESSES.items():
        yield _metadata("process_name", pid, 0, name=name)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)


def _metadata(what: str, pid: int, tid: int, **args: object) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _start_ns(event: Event) -> int:
    return event.start_ns if isinstance(event, Span) else event.t_ns


def _write_json(file: IO[str], events: Iterable[TraceEvent], about: Mapping[str, object]) -> None:
    """Write one event per line, without building the whole trace in memory."""
    other = {key: str(value) for key, value in about.items()}
    file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[')
    for number, event in enumerate(events):
        file.write(",\n" if number else "\n")
        file.write(json.dumps(event, allow_nan=False, separators=(",", ":")))
    file.write("\n]}\n")
