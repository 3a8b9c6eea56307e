"""A finished run, read from the file that it wrote: an event log, or its summary as JSON.

A complete log ends with the summary. The log of a killed process has none: then the totals of the ended
steps are added up, and facts that only the session had (slots, plans, warnings) are missing.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from penstock.core.errors import ConfigError
from penstock.core.files import open_regular, parse_json, read_text
from penstock.observe import records
from penstock.observe.counters import SESSION
from penstock.observe.forecast import PREDICTION, Forecast
from penstock.observe.records import placed_records, step_of
from penstock.observe.summary import SCHEMA, RunFacts, Summary, summarize
from penstock.observe.totals import StepTotals, summed

T = TypeVar("T")
LOG: Final = "event log"
SUMMARY: Final = "summary"
_WANTED: Final = (
    "name an event log (`penstock run --event-log FILE`, or event_log=...), or a summary as JSON"
    " (what `penstock run --json` prints, or Summary.to_json)"
)
_GZIP: Final = b"\x1f\x8b"
_HEADER_BYTES: Final = 64 << 10
"""Maximum length of the first line of an event log."""


@dataclass(frozen=True)
class FinishedRun:
    """The contents of a run's file."""

    kind: str
    """Kind of file: ``"event log"`` or ``"summary"``."""
    summary: Summary
    complete: bool = True
    """False if the log ends before the session did, so that the summary covers only its steps."""
    lost_events: int = 0
    """Number of events that the log dropped because the disk did not keep up."""
    missing_files: int = 0
    """Number of files missing at the beginning of a rotated log."""
    missing_steps: int = 0
    """Number of steps in the missing files."""


Observer = Callable[[dict[str, Any], str], None]
"""Called with each record of a log, and its place."""


def read_run(path: str | os.PathLike[str], *, observer: Observer | None = None) -> FinishedRun:
    """Read a run's file.

    Args:
        path: Path of the file; of a rotated log, of its last file.
        observer: Sees each record of an event log as well; none of a summary.

    Raises:
        ConfigError: The file cannot be read, is neither kind, is of another version, is damaged, or has
            no step. The message names the file, and the line or the field.
    """
    where = os.fspath(path)
    try:
        with open(where, "rb", opener=open_regular) as file:
            first = file.readline(_HEADER_BYTES)
        if first.startswith(_GZIP):
            raise ConfigError(f"{where} is compressed; is it a trace? {_WANTED}")
        header = _header(first)
        if header is not None:
            return _from_log(where, header, observer)
        text = read_text(where)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not a text file; {_WANTED}") from error
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    return FinishedRun(SUMMARY, _from_document(where, text))


def _header(line: bytes) -> dict[str, Any] | None:
    """Parse the first line; return None if it is not the header of an event log."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("kind") == "header" else None


# -- event logs ---------------------------------------------------------------------------------------


@dataclass
class _Gathered:
    """The parts of a log that a report needs."""

    missing_files: int = 0
    steps: list[StepTotals] = field(default_factory=list)
    session: dict[str, Any] = field(default_factory=dict)
    foreseen: Forecast | None = None
    summary: Summary | None = None
    lost_events: int = 0
    ended: bool = False


def _from_log(where: str, header: dict[str, Any], observer: Observer | None) -> FinishedRun:
    if header.get("schema") != records.SCHEMA:
        raise ConfigError(
            f"{where} is an event log of schema {header.get('schema')!r}, but this version of Penstock"
            f" reads schema {records.SCHEMA}; use the version that wrote it"
        )
    found = _Gathered()
    for place, record in placed_records(where):
        _gather(found, record, place)
        if observer is not None:
            observer(record, place)
    run = partial(
        FinishedRun, LOG, lost_events=found.lost_events, missing_files=found.missing_files
    )
    first_step = found.steps[0].index if found.steps else None
    if found.summary is not None:
        missing = found.summary.steps if first_step is None else first_step
        return run(found.summary, found.ended, missing_steps=missing)
    if first_step is None:
        raise ConfigError(
            f"{where} contains no ended step and no summary: there is nothing to report"
        )
    return run(_pieced_together(found, where), False, missing_steps=first_step)


def _gather(found: _Gathered, record: dict[str, Any], where: str) -> None:
    kind = record.get("kind")
    if kind == "header":
        found.missing_files = _whole(record.get("file", 0), "file", where)
        for mark in _marks(record, where):
            _gather(found, mark, where)
    elif kind == "step":
        found.steps.append(step_of(record, where=where))
    elif kind == "mark" and record.get("name") == PREDICTION:
        found.foreseen = Forecast.from_fields(_object(record, "fields", where), source=where)
    elif kind == "mark" and record.get("name") == SESSION:
        found.session = _object(record, "fields", where)
    elif kind == "summary":
        found.summary = _summary(_object(record, "summary", where), where)
    elif kind == "lost":
        found.lost_events += _value(int, record.get("count"), f"{where}: field 'count'")
    elif kind == "end":
        found.ended = True


def _whole(value: Any, name: str, where: str) -> int:
    if type(value) is not int or value < 0:
        raise ConfigError(f"{where}: field {name!r} is {value!r}, not a whole number")
    return value


def _marks(header: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the marks that a header repeats from earlier files."""
    marks = header.get("marks", [])
    if not isinstance(marks, list) or not all(
        isinstance(mark, dict) and mark.get("kind") == "mark" for mark in marks
    ):
        raise ConfigError(f"{where}: field 'marks' is {marks!r}, not a list of marks")
    return marks


def _object(record: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = record.get(name)
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: field {name!r} is {value!r}, not an object")
    return value


def _pieced_together(found: _Gathered, where: str) -> Summary:
    known, foreseen = found.session, found.foreseen
    facts = _decode(
        RunFacts,
        {
            "policy": known.get("policy", "unknown"),
            "device": known.get("device", "unknown"),
            **{
                name: known.get(name)
                for name in (
                    *("budget_bytes", "host_budget_bytes", "tbw_bytes"),
                    *("rank", "local_rank", "node"),
                )
            },
            "steps": len(found.steps),
            "saved_peak_bytes": 0 if foreseen is None else foreseen.saved_bytes,
        },
        f"{where}: mark {SESSION!r}",
    )
    facts = dataclasses.replace(facts, foreseen=foreseen)
    return summarize(summed(found.steps), facts, found.steps)


# -- documents ----------------------------------------------------------------------------------------


def _from_document(where: str, text: str) -> Summary:
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"{where} is neither an event log nor a complete JSON document ({error}); {_WANTED}"
        ) from error
    if isinstance(data, dict) and "traceEvents" in data:
        raise ConfigError(f"{where} is a trace for Perfetto, which has no totals; {_WANTED}")
    if isinstance(data, dict) and "penstock" in data:
        raise ConfigError(f"{where} is a {data['penstock']}, not a run; {_WANTED}")
    if not isinstance(data, dict) or not data.keys() & {"summary", "policy"}:
        raise ConfigError(f"{where} is neither an event log nor a summary; {_WANTED}")
    if "summary" not in data:
        return _summary(data, where)
    _check_schema(data, 1, where)
    if data["summary"] is None:
        raise ConfigError(
            f"{where}: the script did not import torch, so there is nothing to report"
        )
    return _summary(_object(data, "summary", where), where)


def _summary(data: dict[str, Any], where: str) -> Summary:
    _check_schema(data, SCHEMA, where)
    return _decode(Summary, {k: v for k, v in data.items() if k != "schema"}, f"{where}: summary")


def _check_schema(data: dict[str, Any], schema: int, where: str) -> None:
    if data.get("schema") != schema:
        raise ConfigError(
            f"{where}: field 'schema' is {data.get('schema')!r}, but this version of Penstock reads"
            f" {schema}; use the version that wrote it"
        )


def _decode(cls: type[T], data: dict[str, Any], where: str) -> T:
    """Rebuild a dataclass from ``dataclasses.asdict``; fields with defaults may be missing."""
    hints = get_type_hints(cls)
    values = {}
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        if each.name in data:
            place = f"{where}: field {each.name!r}"
            values[each.name] = _value(hints[each.name], data[each.name], place)
        elif each.default is dataclasses.MISSING:
            raise ConfigError(
                f"{where}: field {each.name!r} is missing; was it written by another version of"
                " Penstock?"
            )
    unknown = sorted(data.keys() - hints.keys())
    if unknown:
        raise ConfigError(
            f"{where}: unknown field {unknown[0]!r}; was it written by another version of Penstock?"
        )
    return cls(**values)


def _value(kind: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (types.UnionType,):
        return None if data is None else _value(args[0], data, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(data, dict):
        return _decode(kind, data, where)
    if origin is tuple and isinstance(data, list):
        return tuple(_value(args[0], each, f"{where}[{i}]") for i, each in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {key: _value(args[1], each, f"{where}[{key!r}]") for key, each in data.items()}
    if kind is float and type(data) is int and abs(data) <= sys.float_info.max:
        return float(data)
    if not isinstance(kind, type) or type(data) is not kind:
        raise ConfigError(f"{where} is {data!r}, not {getattr(kind, '__name__', kind)}")
    return data
