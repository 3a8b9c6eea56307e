"""The lines of an event log: their schema, and the conversion from and to events.

A rotated log is read from its oldest file on (see [Note: rotated logs]).

Every line has a ``kind``; times are nanoseconds of the recorder's clock, sizes are bytes:

============ ===================================================================================
``kind``     further fields
============ ===================================================================================
``header``   ``schema`` (1), ``t_ns`` and ``unix_ns`` (one moment on both clocks), ``pid``, ``file``
             (the number of this file of the log, from 0); from the second file on ``marks``: the
             latest lines of kind ``mark`` that describe the run
``span``     ``stage``, ``t_ns`` (its start), ``dur_ns``, ``nbytes``, ``tier``, ``slot``, ``cause``
``level``    ``t_ns``, ``memory``, ``nbytes``
``mark``     ``t_ns``, ``name``, ``fields`` (an object)
``step``     ``index``, and the totals of the step: ``t_ns``, ``dur_ns``, ``flows``, ``stalls``,
             ``counters``, ``memory`` (see ``Totals.to_json``)
``plan``     ``t_ns``, ``device``, ``policy``, ``left_out``, ``passes``, ``slots``: what the plan that
             is in force from now on does with each slot, and why (see ``runtime.plan_record``)
``holdings`` ``t_ns``, ``owners`` (bytes of host memory by owner), ``limit_bytes`` (of all owners, or
             ``null``), ``process_bytes`` (the process's memory that is no page of a file)
``model``    ``t_ns``, ``weights_bytes``, ``gradients_bytes``, ``states_bytes``: the program's own
             memory at the end of the first step
``lost``     ``count``: events dropped here because the disk did not keep up
``summary``  ``summary``: the session's summary at its end (see ``Summary.to_json``)
``end``      none: the log was closed properly
============ ===================================================================================
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.core.files import open_regular, parse_json
from penstock.observe.clock import Clock
from penstock.observe.events import Event, Level, Mark, RawEvent, Span, typed
from penstock.observe.totals import StepTotals, step_from_json

SCHEMA: Final = 1
PLAN: Final = "plan"
HOLDINGS: Final = "holdings"
MODEL: Final = "model"
MOST_HEADER_BYTES: Final = 1 << 16
"""Maximum length of a first line that is read as a header."""
_SAME_RUN: Final = ("t_ns", "unix_ns", "pid")
"""Fields of the header that all files of a run share."""


def read_log(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a log in order, without an incomplete last line of a killed process.

    The remaining files of a rotated log are read as one; the header is that of the oldest file.

    Raises:
        ConfigError: The file cannot be read, is not an event log of a known schema, or has a damaged
            line.
    """
    for _, record in placed_records(path):
        yield record


def placed_records(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records as ``read_log`` does, each with its place, such as ``"ev.jsonl:7"``."""
    for place, name in enumerate(log_files(path)):
        for number, line in enumerate(_lines(name), start=1):
            if not line.endswith("\n"):
                return
            record = _parse(line, where=f"{name}:{number}")
            if number == 1:
                if not _is_header(record):
                    raise ConfigError(f"{name} is not an event log of schema {SCHEMA}: {line!r}")
                if place:
                    continue
            yield f"{name}:{number}", record


def _lines(path: str) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", opener=open_regular) as file:
            yield from file
    except (OSError, ValueError) as error:
        raise ConfigError(f"event log {path!r} cannot be read: {error}") from error


def log_files(path: str | os.PathLike[str]) -> list[str]:
    """Return the remaining files of a log, the oldest first; ``path`` is the last.

    A ``path.1`` that does not directly precede, such as one of an earlier run, is not part of this log.
    """
    base = os.fspath(path)
    files, header = [base], _header_of(base)
    while header is not None and type(number := header.get("file")) is int and number > 0:
        older = f"{base}.{len(files)}"
        before = _header_of(older)
        if before is None or any(before.get(name) != header.get(name) for name in _SAME_RUN):
            break
        if before.get("file") != number - 1:
            break
        files.append(older)
        header = before
    return files[::-1]


def _header_of(name: str) -> dict[str, Any] | None:
    try:
        with open(name, encoding="utf-8", opener=open_regular) as file:
            record = parse_json(file.readline(MOST_HEADER_BYTES))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and _is_header(record) else None


def _is_header(record: Mapping[str, Any]) -> bool:
    return (record.get("kind"), record.get("schema")) == ("header", SCHEMA)


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Return the spans, levels and marks of a log, as ``Recorder.events`` does."""
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
    """Return the totals of a ``step`` record. Raises ConfigError naming ``where`` if it is damaged."""
    try:
        return step_from_json(record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{where}: a line of kind 'step' is damaged: {type(error).__name__}: {error}"
        ) from error


def header_record(clock: Clock) -> dict[str, Any]:
    """Return the first record: the schema, and one moment on both clocks."""
    return {
        "kind": "header",
        "schema": SCHEMA,
        "t_ns": clock.now_ns(),
        "unix_ns": time.time_ns(),
        "pid": os.getpid(),
        "file": 0,
    }


def record_of(entry: RawEvent | StepTotals | dict[str, Any]) -> dict[str, Any]:
    """Return the record of one event or of the totals of a step; a record as it is."""
    if isinstance(entry, dict):
        return entry
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
    """Return a record as strict JSON, with the newline."""
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _parse(line: str, *, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not a line of an event log: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is not a line of an event log: {line!r}")
    return record
