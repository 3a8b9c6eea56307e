"""The lines of an event log: their schema, and events to lines and back.

Every line has a ``kind``; times are nanoseconds of the recorder's clock, sizes are bytes:

=========== ===================================================================================
``kind``    further fields
=========== ===================================================================================
``header``  ``schema`` (1), ``t_ns`` and ``unix_ns`` (one moment on both clocks), ``pid``
``span``    ``stage``, ``t_ns`` (its begin), ``dur_ns``, ``nbytes``, ``tier``, ``slot``, ``cause``
``level``   ``t_ns``, ``memory``, ``nbytes``
``mark``    ``t_ns``, ``name``, ``fields`` (an object)
``step``    ``index``, and the totals of the step: ``t_ns``, ``dur_ns``, ``flows``, ``stalls``,
            ``counters``, ``memory`` (see ``Totals.to_json``)
``lost``    ``count``: events left out here because the disk did not keep up
``summary`` ``summary``: what the session says of itself at its end (see ``Summary.to_json``)
``end``     nothing: the log was closed in an orderly way
=========== ===================================================================================
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.core.files import open_regular, parse_json
from penstock.observe.clock import Clock
from penstock.observe.events import Event, Level, Mark, RawEvent, Span, typed
from penstock.observe.totals import StepTotals, step_from_json

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a session says of itself at its end, for the log."""

    summary: Mapping[str, Any]


def read_log(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a log, in order, without the torn last line that a killed process leaves.

    Raises:
        ConfigError: The file cannot be read, is no event log of a known schema, or a line within it is
            damaged.
    """
    for number, line in enumerate(_lines(os.fspath(path)), start=1):
        if not line.endswith("\n"):
            return
        record = _parse(line, where=f"{os.fspath(path)}:{number}")
        if number == 1 and (record.get("kind"), record.get("schema")) != ("header", SCHEMA):
            raise ConfigError(f"{os.fspath(path)} is no event log of schema {SCHEMA}: {line!r}")
        yield record


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", opener=open_regular) as file:
            yield from file
    except (OSError, ValueError) as error:
        raise ConfigError(f"event log {path!r} cannot be read: {error}") from error


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """The spans, levels and marks of a log, as ``Recorder.events`` gives them."""
    events = []
    for number, record in enumerate(read_log(path), start=1):
        try:
            event = _event(record)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{os.fspath(path)}:{number} is damaged: {type(error).__name__}: {error}"
            ) from error
        if event is not None:
            events.append(event)
    return events


def step_of(record: Mapping[str, Any], *, where: str) -> StepTotals:
    """The totals of a line of kind ``step``. Raises ConfigError naming ``where`` if it is damaged."""
    try:
        return step_from_json(record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{where}: a line of kind 'step' is damaged: {type(error).__name__}: {error}"
        ) from error


def header_record(clock: Clock) -> dict[str, Any]:
    """The first line: what the file is, and one moment on both clocks."""
    return {
        "kind": "header",
        "schema": SCHEMA,
        "t_ns": clock.now_ns(),
        "unix_ns": time.time_ns(),
        "pid": os.getpid(),
    }


def record_of(entry: RawEvent | StepTotals | LastWords) -> dict[str, Any]:
    """The line of one event, of the totals of a step, or of the summary."""
    if isinstance(entry, LastWords):
        return {"kind": "summary", "summary": dict(entry.summary)}
    if isinstance(entry, StepTotals):
        return {"kind": "step", "index": entry.index, **entry.totals.to_json()}
    event = typed(entry)
    if isinstance(event, Level):
        return {"kind": "level", **event._asdict()}
    if isinstance(event, Mark):
        return {"kind": "mark", **event._asdict(), "fields": dict(event.fields)}
    return {
        "kind": "span",
        "stage": event.stage,
        "t_ns": event.start_ns,
        "dur_ns": event.end_ns - event.start_ns,
        "nbytes": event.nbytes,
        "tier": event.tier,
        "slot": event.slot,
        "cause": event.cause,
    }


def _event(record: dict[str, Any]) -> Event | None:
    kind = record["kind"]
    if kind == "level":
        return Level(record["t_ns"], record["memory"], record["nbytes"])
    if kind == "mark":
        return Mark(record["t_ns"], record["name"], record["fields"])
    if kind != "span":
        return None
    start_ns = record["t_ns"]
    names = (record[name] for name in ("nbytes", "tier", "slot", "cause"))
    return Span(record["stage"], start_ns, start_ns + record["dur_ns"], *names)


def line_of(record: dict[str, Any]) -> str:
    """A record as strict JSON, newline included."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _parse(line: str, *, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not a line of an event log: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a line of an event log: {line!r}")
    return record
