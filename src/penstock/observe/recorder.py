"""The recorder of a session, to which every layer reports what it did.

``span``, ``count`` and ``level`` take about a microsecond each and are called from hot paths, also
under other locks of Penstock: they take only the recorder's own lock, never do I/O, never call back
and never raise. The latest events are kept for traces, in bounded memory; totals cover all events.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.core import knobs
from penstock.core.errors import PenstockWarning
from penstock.core.locks import Lock
from penstock.observe.clock import Clock, RealClock
from penstock.observe.events import (
    LEVEL,
    MARK,
    SPAN,
    Event,
    FieldValue,
    RawEvent,
    Stage,
    StallCause,
    typed,
)
from penstock.observe.timeline import BusyTime, LevelMeter
from penstock.observe.totals import Flow, MemoryUse, Stall, StepTotals, Totals, between

if TYPE_CHECKING:
    from penstock.observe.log import EventLog

__all__ = ["MAX_STEPS", "Recorder", "Stage", "StallCause"]

MAX_PENDING_LEVELS: Final = 1024
"""Maximum number of levels that are queued before they are processed."""
EVENT_BYTES: Final = 320
"""Memory counted for one kept event: a span of a slot takes some 300 bytes, others less."""
MAX_STEPS: Final = 256
"""Number of latest steps whose totals are kept individually."""


class _Sum:
    """The running sums of one lane (stage and tier), or of one cause of stalls."""

    __slots__ = ("busy", "count", "name", "nbytes")

    def __init__(self, name: str) -> None:
        self.name = name  # a bare str, not an enum member: see [Note: raw events]
        self.count = 0
        self.nbytes = 0
        self.busy = BusyTime()


class Recorder:
    """Collects spans, counters, memory levels and marks. Thread-safe.

    Attributes:
        clock: Clock of all recorded times; callers take their own times from it.
        log: Event log to which events are written as well, or ``None``.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        event_bytes: int | None = None,
        log: EventLog | None = None,
    ) -> None:
        """Make an empty recorder; its totals begin now.

        Args:
            clock: Defaults to the real clock.
            event_bytes: Memory for kept events; defaults to the knob
                ``PENSTOCK_EVENT_MEMORY``.
            log: Event log that receives every event as well. The recorder does not close it.
        """
        self.clock: Clock = RealClock() if clock is None else clock
        self.log = log
        self._now_ns = self.clock.now_ns
        self._lock = Lock()
        limit_bytes = knobs.event_bytes() if event_bytes is None else event_bytes
        self._events: deque[RawEvent] = deque(maxlen=limit_bytes // EVENT_BYTES)
        self._lanes: dict[tuple[str, str], _Sum] = {}
        self._stalls: dict[str, _Sum] = {}
        self._counters: dict[str, int] = {}
        self._meters: dict[str, LevelMeter] = {}
        self._levels: deque[tuple[int, int, str, int]] = deque()
        self._steps: deque[StepTotals] = deque(maxlen=MAX_STEPS)
        self._open_step: tuple[int, Totals] | None = None
        self._topics: set[str] = set()
        self._refused: deque[PenstockWarning] = deque()
        self._start_ns = self._now_ns()

    # -- hot ----------------------------------------------------------------------------------

    def span(
        self,
        stage: Stage,
        start_ns: int,
        end_ns: int,
        *,
        nbytes: int = 0,
        tier: str = "",
        slot: str = "",
        cause: str = "",
    ) -> None:
        """Record an event from ``start_ns`` to ``end_ns``, both of ``self.clock``.

        Args:
            stage: Stage of the event.
            start_ns: Time of its beginning.
            end_ns: Time of its end.
            nbytes: Bytes that it moved.
            tier: Tier that it used, if any.
            slot: Slot that it was for, as printed in plans.
            cause: Cause of a ``Stage.STALL``: a :class:`StallCause`.
        """
        with self._lock:
            self._add_span(stage, start_ns, end_ns, nbytes, tier, slot, cause)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter. Names are dotted, from the general to the particular."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0) + amount

    def level(self, memory: str, nbytes: int) -> None:
        """Record that ``memory`` (``"device"``, ``"host"``, ``"flash"``, ...) now holds ``nbytes``."""
        # two for every saved tensor: queued without the lock, and processed by the next other event
        # or reader
        levels = self._levels
        levels.append((LEVEL, self._now_ns(), memory, nbytes))
        if self.log is not None or len(levels) > MAX_PENDING_LEVELS:
            with self._lock:
                self._settle_levels()

    def mark(self, name: str, /, **fields: object) -> None:
        """Record an event at this moment: a new plan, a fallback, a warning.

        Fields that are not strings, finite numbers, booleans or ``None`` are converted to strings at
        once, so that no event keeps a tensor alive and every event is valid JSON.
        """
        plain = MappingProxyType({key: _plain(value) for key, value in fields.items()})
        with self._lock:
            self._keep((MARK, self._now_ns(), name, plain))

    # -- warnings -----------------------------------------------------------------------------

    def warn(self, topic: str, message: str) -> bool:
        """Warn with a :class:`PenstockWarning`, once for each ``topic``.

        May be called by any thread, also during a transfer. If warnings are errors, this one is raised
        later by :meth:`raise_warning`: here it would end an internal thread or interrupt a transfer.

        Returns:
            True for the first warning of the topic.
        """
        with self._lock:
            if topic in self._topics:
                return False
            self._topics.add(topic)
        try:
            warnings.warn(message, PenstockWarning, stacklevel=3)
        except PenstockWarning as refused:
            self._refused.append(refused.with_traceback(None))
        return True

    def raise_warning(self) -> None:
        """Raise the oldest pending warning that is an error; called in the program's thread."""
        if self._refused:
            raise self._refused.popleft()

    # -- steps --------------------------------------------------------------------------------

    def begin_step(self, index: int) -> None:
        """Begin training step ``index``; end an open one first."""
        self.end_step()
        with self._lock:
            self._settle_levels()
            for meter in self._meters.values():
                meter.open_window()
            self._open_step = index, self._totals(self._now_ns())

    def end_step(self) -> StepTotals | None:
        """End the open step: keep its totals, and make the log write them.

        Returns:
            The totals of the step, or ``None`` if none was open.
        """
        with self._lock:
            if self._open_step is None:
                return None
            self._settle_levels()
            index, start = self._open_step
            self._open_step = None
            end_ns = self._now_ns()
            self._add_span(Stage.STEP, start.end_ns, end_ns, 0, "", f"step {index}", "")
            peaks = {name: meter.window_peak_bytes for name, meter in self._meters.items()}
            step = StepTotals(index=index, totals=between(start, self._totals(end_ns), peaks))
            self._steps.append(step)
        if self.log is not None:
            self.log.end_step(step)
        return step

    # -- reading ------------------------------------------------------------------------------

    def snapshot(self) -> Totals:
        """Return the totals since the recorder was created."""
        with self._lock:
            self._settle_levels()
            return self._totals(self._now_ns())

    def steps(self) -> tuple[StepTotals, ...]:
        """Return the totals of each of the last :data:`MAX_STEPS` ended steps."""
        with self._lock:
            return tuple(self._steps)

    def events(self) -> list[Event]:
        """Return the kept events in the order of recording."""
        with self._lock:
            self._settle_levels()
            raw = list(self._events)
        return [typed(event) for event in raw]

    # -- private, under the lock --------------------------------------------------------------

    def _settle_levels(self) -> None:
        levels, meters, log = self._levels, self._meters, self.log
        keep = self._events.append
        while levels:
            event = levels.popleft()
            _, now_ns, memory, nbytes = event
            meter = meters.get(memory)
            if meter is None:
                meter = meters[memory] = LevelMeter(now_ns)
            if now_ns < meter.last_ns:  # threads may have overtaken each other
                now_ns = meter.last_ns
                event = LEVEL, now_ns, memory, nbytes
            meter.sample(now_ns, nbytes)
            keep(event)
            if log is not None:
                log.append(event)

    def _keep(self, event: RawEvent) -> None:
        if self._levels:
            self._settle_levels()
        self._append(event)

    def _append(self, event: RawEvent) -> None:
        self._events.append(event)
        if self.log is not None:
            self.log.append(event)

    def _add_span(  # noqa: PLR0917  (hot: keywords cost)
        self, stage: str, start_ns: int, end_ns: int, nbytes: int, tier: str, slot: str, cause: str
    ) -> None:
        key = (stage, tier)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Sum(str(stage))
        lane.count += 1
        lane.nbytes += nbytes
        lane.busy.add(start_ns, end_ns)
        if stage == Stage.STALL:
            self._add_stall(cause or "other", start_ns, end_ns)
        if self._levels:
            self._settle_levels()
        event = SPAN, lane.name, start_ns, end_ns, nbytes, tier, slot, cause
        self._events.append(event)  # as _append, without a call: hot
        if self.log is not None:
            self.log.append(event)

    def _add_stall(self, cause: str, start_ns: int, end_ns: int) -> None:
        stall = self._stalls.get(cause)
        if stall is None:
            stall = self._stalls[cause] = _Sum(str(cause))
        stall.count += 1
        stall.busy.add(start_ns, end_ns)

    def _totals(self, now_ns: int) -> Totals:
        flows = {
            (Stage(stage), tier): Flow(
                count=lane.count, nbytes=lane.nbytes, busy_ns=lane.busy.total_ns
            )
            for (stage, tier), lane in self._lanes.items()
        }
        stalls = {
            stall.name: Stall(count=stall.count, total_ns=stall.busy.total_ns)
            for stall in self._stalls.values()
        }
        memory = {name: _use(meter, now_ns) for name, meter in self._meters.items()}
        return Totals(
            start_ns=self._start_ns,
            end_ns=now_ns,
            flows=MappingProxyType(flows),
            stalls=MappingProxyType(stalls),
            counters=MappingProxyType(dict(self._counters)),
            memory=MappingProxyType(memory),
        )


def _use(meter: LevelMeter, now_ns: int) -> MemoryUse:
    return MemoryUse(
        current_bytes=meter.current_bytes,
        peak_bytes=meter.peak_bytes,
        area_byte_ns=meter.area_until(now_ns),
        observed_ns=now_ns - meter.first_ns,
    )


def _plain(value: object) -> FieldValue:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int | None) else str(value)
