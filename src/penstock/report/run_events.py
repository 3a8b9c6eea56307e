"""The events of a run's log that pictures of the run are drawn from, gathered while the log is read.

Numbers are kept in arrays, some 16 to 24 bytes for an event, and spans of slots only for the latest pass.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core.errors import ConfigError
from penstock.observe.counters import SESSION
from penstock.observe.events import Stage
from penstock.observe.forecast import PREDICTION
from penstock.observe.records import HOLDINGS, MODEL, PLAN
from penstock.observe.totals import StepTotals, step_from_json

MOST_STALLS: Final = 20
"""Number of the longest stalls that are kept one by one."""
MOST_MARKS: Final = 100
"""Number of the latest marks that are kept."""
MOST_SPANS: Final = 100_000
"""Number of the latest spans of slots that are kept until their pass ends."""
MOVING: Final = (Stage.WRITE, Stage.READ, Stage.COPY_OUT, Stage.COPY_IN)
"""Stages that move bytes between memories."""
_OF_SLOTS: Final = (*MOVING, Stage.PACK, Stage.UNPACK, Stage.RECOMPUTE)
_TOLD: Final = (SESSION, PREDICTION)
"""Marks that the report shows elsewhere."""


class Intervals:
    """Begin, length and bytes of spans, in the order of their ends."""

    def __init__(self) -> None:
        """Make an empty list."""
        self.start_ns, self.dur_ns, self.nbytes = array("q"), array("q"), array("q")

    def add(self, start_ns: int, dur_ns: int, nbytes: int = 0) -> None:
        """Append a span."""
        self.start_ns.append(start_ns)
        self.dur_ns.append(max(0, dur_ns))
        self.nbytes.append(nbytes)


class Samples:
    """Levels and their times; a level holds until the next one."""

    def __init__(self) -> None:
        """Make an empty list."""
        self.t_ns, self.nbytes = array("q"), array("q")

    def add(self, t_ns: int, nbytes: int) -> None:
        """Append a level; one that is earlier than the last counts from there."""
        self.t_ns.append(max(t_ns, self.t_ns[-1]) if self.t_ns else t_ns)
        self.nbytes.append(nbytes)


@dataclass(frozen=True)
class SlotSpan:
    """One stage of one slot."""

    stage: str
    start_ns: int
    end_ns: int
    slot: str
    tier: str
    nbytes: int


@dataclass(frozen=True)
class PassEvents:
    """A pass whose forward and backward have ended, with the spans of its slots."""

    name: str
    start_ns: int
    backward_ns: int
    """Begin of backward."""
    end_ns: int
    spans: tuple[SlotSpan, ...]


@dataclass
class RunEvents:
    """Events and samples of one log. Call it with each record of the log, and the record's place."""

    start_ns: int = 0
    end_ns: int = 0
    levels: dict[str, Samples] = field(default_factory=dict)
    """Levels by memory."""
    owners: dict[str, Samples] = field(default_factory=dict)
    """Host memory by owner."""
    process: Samples = field(default_factory=Samples)
    """Memory of the process that is no page of a file."""
    limit_bytes: int | None = None
    """Latest limit of all owners."""
    model: dict[str, int] = field(default_factory=dict)
    """Weights, gradients and states of the program itself, in bytes."""
    model_ns: int = 0
    """Time at which these were measured."""
    lanes: dict[tuple[str, str], Intervals] = field(default_factory=dict)
    """Transfers by stage and tier."""
    stalls: dict[str, Intervals] = field(default_factory=dict)
    """Waits by cause."""
    longest: list[tuple[int, int, str, str]] = field(default_factory=list)
    """The longest waits: length, begin, cause, slot; a heap."""
    steps: list[StepTotals] = field(default_factory=list)
    marks: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The latest plan by device."""
    last_pass: PassEvents | None = None
    _forwards: dict[str, tuple[int, int]] = field(default_factory=dict)
    _recent: deque[SlotSpan] = field(default_factory=lambda: deque(maxlen=MOST_SPANS))

    def __call__(self, record: dict[str, Any], where: str) -> None:
        """Gather one record. Raises ConfigError naming ``where`` if it is damaged."""
        try:
            self._gather(record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{where}: a line of kind {record.get('kind')!r} is damaged:"
                f" {type(error).__name__}: {error}"
            ) from error

    def _gather(self, record: dict[str, Any]) -> None:
        kind = record.get("kind")
        if "t_ns" in record:
            end_ns = record["t_ns"] + record.get("dur_ns", 0)
            self.end_ns = max(self.end_ns, end_ns)
        if kind == "span":
            self._add_span(record)
        elif kind == "level":
            samples = self.levels.setdefault(record["memory"], Samples())
            samples.add(record["t_ns"], record["nbytes"])
        elif kind == "header":
            self.start_ns = self.end_ns = record["t_ns"]
        elif kind == "step":
            self.steps.append(step_from_json(record))
        elif kind == "mark" and record["name"] not in _TOLD:
            self.marks.append((record["t_ns"], str(record["name"]), dict(record["fields"])))
            del self.marks[:-MOST_MARKS]
        elif kind == HOLDINGS:
            self._add_holdings(record)
        elif kind == PLAN:
            self.plans[str(record["device"])] = record
        elif kind == MODEL:
            self.model_ns = record["t_ns"]
            self.model = {name: int(n) for name, n in record.items() if name.endswith("_bytes")}

    def _add_holdings(self, record: dict[str, Any]) -> None:
        for owner, nbytes in record["owners"].items():
            self.owners.setdefault(owner, Samples()).add(record["t_ns"], nbytes)
        self.process.add(record["t_ns"], record["process_bytes"])
        limit_bytes = record["limit_bytes"]
        self.limit_bytes = None if limit_bytes is None else int(limit_bytes)

    def _add_span(self, record: dict[str, Any]) -> None:
        stage, start_ns, dur_ns = record["stage"], record["t_ns"], record["dur_ns"]
        if stage in MOVING:
            lane = self.lanes.setdefault((stage, str(record["tier"])), Intervals())
            lane.add(start_ns, dur_ns, record["nbytes"])
        elif stage == Stage.STALL:
            cause = str(record["cause"]) or "other"
            self.stalls.setdefault(cause, Intervals()).add(start_ns, dur_ns)
            push = heapq.heappush if len(self.longest) < MOST_STALLS else heapq.heappushpop
            push(self.longest, (dur_ns, start_ns, cause, str(record["slot"])))
        elif stage == Stage.FORWARD:
            self._forwards[record["slot"]] = start_ns, start_ns + dur_ns
        elif stage == Stage.BACKWARD:
            self._end_pass(record["slot"], start_ns, start_ns + dur_ns)
        if stage in _OF_SLOTS and record["slot"]:
            self._recent.append(
                SlotSpan(
                    stage,
                    start_ns,
                    start_ns + dur_ns,
                    str(record["slot"]),
                    str(record["tier"]),
                    record["nbytes"],
                )
            )

    def _end_pass(self, name: str, backward_ns: int, end_ns: int) -> None:
        start_ns, _ = self._forwards.pop(name, (backward_ns, backward_ns))
        spans = [one for one in self._recent if start_ns <= one.start_ns <= end_ns]
        self.last_pass = PassEvents(str(name), start_ns, backward_ns, end_ns, tuple(spans))
        oldest_ns = min((start for start, _ in self._forwards.values()), default=end_ns)
        later = (one for one in self._recent if one.end_ns > oldest_ns)
        self._recent = deque(later, maxlen=MOST_SPANS)
