"""Records of a run: counters, spans and memory levels, under the same stage names everywhere.

Every layer above reports to one :class:`Recorder` per session. Read in this order: ``events`` (the
names), ``recorder``, ``timeline`` and ``totals`` (the sums), ``log`` and ``records`` (the JSONL
file), ``summary`` (printed by ``print(session.summary())``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.observe.clock import Clock, ManualClock, RealClock
    from penstock.observe.events import Event, Level, Mark, Span, Stage, StallCause
    from penstock.observe.log import EventLog
    from penstock.observe.recorder import Recorder
    from penstock.observe.records import read_events, read_log
    from penstock.observe.totals import Flow, MemoryUse, Stall, StepTotals, Totals

_MODULES: Final = {
    "Clock": "clock",
    "Event": "events",
    "EventLog": "log",
    "Flow": "totals",
    "Level": "events",
    "ManualClock": "clock",
    "Mark": "events",
    "MemoryUse": "totals",
    "RealClock": "clock",
    "Recorder": "recorder",
    "Span": "events",
    "Stage": "events",
    "Stall": "totals",
    "StallCause": "events",
    "StepTotals": "totals",
    "Totals": "totals",
    "read_events": "records",
    "read_log": "records",
}

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


def __getattr__(name: str) -> Any:
    """Import a name at its first use (PEP 562): a session needs few of these modules."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
