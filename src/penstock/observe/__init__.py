"""Records of a run: counters, spans and memory levels, under the same stage names everywhere.

Every layer above reports to one :class:`Recorder` per session. Read in this order: ``events`` (the
names), ``recorder``, ``timeline`` and ``totals`` (the sums), ``log`` and ``records`` (the JSONL
file), ``summary`` (printed by ``print(session.summary())``).
"""

from penstock.observe.clock import Clock, ManualClock, RealClock
from penstock.observe.events import Event, Level, Mark, Span, Stage, StallCause
from penstock.observe.log import EventLog
from penstock.observe.recorder import Recorder
from penstock.observe.records import read_events, read_log
from penstock.observe.totals import Flow, MemoryUse, Stall, StepTotals, Totals

__all__ = [
    "Clock",
    "Event",
    "EventLog",
    "Flow",
    "Level",
    "ManualClock",
    "Mark",
    "MemoryUse",
    "RealClock",
    "Recorder",
    "Span",
    "Stage",
    "Stall",
    "StallCause",
    "StepTotals",
    "Totals",
    "read_events",
    "read_log",
]
