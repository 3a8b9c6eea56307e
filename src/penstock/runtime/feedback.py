"""From measured waits to a better plan of prefetching: reads that came late begin earlier next time.

A slot that backward had to wait for begins to be read as much earlier as it was late, and a quarter more.
Reads are issued in the order of need, so what is read before it must not begin later either. Where
nothing but the window held reads up, the window grows, as long as it leaves room for what is saved or
made again meanwhile. Reads ahead still take only free memory: the budget is not touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.observe.counters import MOVED_EARLIER, WINDOW_GROWN
from penstock.observe.recorder import Recorder
from penstock.plan.plan import Action, Plan
from penstock.runtime.storage import Pass

LATE_SHARE: Final = 0.005
"""Waits that are a smaller part of a pass are left alone."""
LATE_NS: Final = 200_000
"""So is one slot's wait below this: a thread that wakes up late makes as much."""
MARGIN: Final = 1.25
"""How many times the wait a read begins earlier."""
MAX_IMPROVEMENTS: Final = 32
"""Times that a plan's reads are moved earlier."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A plan that reads earlier."""

    plan: Plan
    moved: int
    """Triggers that moved to an earlier place."""
    window_grown_bytes: int


class Feedback:
    """Improves a plan, a limited number of times, and tells of it. Used under the planner's lock."""

    def __init__(self, recorder: Recorder) -> None:
        """For one planner."""
        self._recorder = recorder
        self._improvements = 0

    def planned(self) -> None:
        """There is a new plan, which may be improved as often again."""
        self._improvements = 0

    def improve(self, plan: Plan, finished: Pass) -> Plan | None:
        """The plan, with what came late in a pass read earlier; None if it stays as it is."""
        if self._improvements >= MAX_IMPROVEMENTS or finished.observed:
            return None
        found = improve(plan, finished)
        if found is None:
            return None
        self._improvements += 1
        if found.moved:
            self._recorder.count(MOVED_EARLIER, found.moved)
        if found.window_grown_bytes:
            self._recorder.count(WINDOW_GROWN, found.window_grown_bytes)
        self._recorder.mark(
            "read_earlier", triggers=found.moved, window_bytes=found.plan.window_bytes
        )
        return found.plan


def improve(plan: Plan, finished: Pass) -> Improvement | None:
    """The plan, with what came late in a pass read earlier; None if there is nothing to improve."""
    late = _late(plan, finished)
    if not late:
        return None
    times = _times(plan, finished)
    places = {d.key.match_key: d.prefetch_at for d in plan.decisions if d.action is Action.OFFLOAD}
    ranked = [(rank, key.match_key) for rank, key in enumerate(plan.need_order)]
    moved = set()
    for rank, waited_ns in late.items():
        trigger = places[plan.need_order[rank].match_key]
        if trigger is None:
            continue
        earlier = _earlier(times, rank, trigger, waited_ns)
        for before, match in ranked[: rank + 1]:
            at = places.get(match)
            if at is not None and (earlier is None or at > earlier):
                places[match] = earlier
                moved.add(before)
    window_bytes = _window_bytes(plan, finished, [r for r in late if r not in moved])
    if not moved and window_bytes == plan.window_bytes:
        return None
    decisions = tuple(
        replace(d, prefetch_at=places[d.key.match_key]) if d.action is Action.OFFLOAD else d
        for d in plan.decisions
    )
    better = replace(plan, decisions=decisions, window_bytes=window_bytes)
    return Improvement(better, len(moved), window_bytes - plan.window_bytes)


def _late(plan: Plan, finished: Pass) -> dict[int, int]:
    """How long backward waited, by place in the order of need."""
    waited_ns = sum(record.waited_ns for record in finished.records)
    if waited_ns <= LATE_SHARE * ((finished.end_ns or 0) - finished.start_ns):
        return {}
    ranks = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
    late = {}
    for record in finished.records:
        decision = plan.lookup(record.key) if record.waited_ns > LATE_NS else None
        rank = ranks.get(record.key.match_key)
        if rank is not None and decision is not None and decision.action is Action.OFFLOAD:
            late[rank] = record.waited_ns
    return late


def _times(plan: Plan, finished: Pass) -> list[tuple[int, int]]:
    """(when it was asked for, place in the order of need) of what was asked for, in order of time."""
    ranks = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
    times = (
        (record.needed_at_ns, ranks[record.key.match_key])
        for record in finished.records
        if record.needed_at_ns is not None and record.key.match_key in ranks
    )
    return sorted(times)


def _earlier(
    times: Sequence[tuple[int, int]], rank: int, trigger: int, waited_ns: int
) -> int | None:
    """The last place that is early enough; None: as soon as the window has room."""
    at_ns = {place: when for when, place in reversed(times)}
    since_ns = at_ns.get(trigger, at_ns[rank])
    wanted_ns = since_ns - int(MARGIN * waited_ns)
    found = bisect_right(times, (wanted_ns, len(times) + rank + trigger))
    return None if not found else min(times[found - 1][1], max(0, trigger - 1))


def _window_bytes(plan: Plan, finished: Pass, late: Sequence[int]) -> int:
    """The window, grown by what came late while it was full, as far as it may."""
    if not finished.window_full or not late:
        return plan.window_bytes
    wanted = plan.window_bytes + sum(plan.need_order[rank].nbytes for rank in late)
    widest = plan.budgets.device_bytes if plan.widest_bytes is None else plan.widest_bytes
    return max(plan.window_bytes, min(wanted, widest))
