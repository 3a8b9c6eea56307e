"""From measured waits to a better plan of prefetching: reads that came late begin earlier next time.

A slot that backward had to wait for begins to be read as much earlier as it was late, and a quarter more.
Reads are issued in the order of need, so what is read before it must not begin later either. Where
nothing but the window held reads up, the window grows, as long as it leaves room for what is saved or
recomputed meanwhile. Prefetches still take only free memory: the budget is not touched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.plan.plan import Action, Plan
from penstock.runtime.orders import PassRecord

LATE_SHARE: Final = 0.005
"""Share of a pass's time; shorter waits are left alone."""
LATE_NS: Final = 200_000
"""Wait of one slot that is left alone: a thread that wakes up late makes as much."""
MARGIN: Final = 1.25
"""Factor of a wait by which the read begins earlier."""


@dataclass(frozen=True, slots=True)
class Improvement:
    """A plan that reads earlier."""

    plan: Plan
    moved: int
    """Triggers that moved to an earlier place."""
    window_grown_bytes: int


def improve(plan: Plan, record: PassRecord) -> Improvement | None:
    """Return the plan with what came late in a pass read earlier; None if there is nothing to improve."""
    late = _late(plan, record)
    if not late:
        return None
    times = _times(plan, record)
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
    window_bytes = _window_bytes(plan, record, [r for r in late if r not in moved])
    if not moved and window_bytes == plan.window_bytes:
        return None
    decisions = tuple(
        replace(d, prefetch_at=places[d.key.match_key]) if d.action is Action.OFFLOAD else d
        for d in plan.decisions
    )
    better = replace(plan, decisions=decisions, window_bytes=window_bytes)
    return Improvement(better, len(moved), window_bytes - plan.window_bytes)


def _late(plan: Plan, record: PassRecord) -> dict[int, int]:
    """Return the time for which backward waited, in ns, by place in the order of need."""
    waited_ns = sum(slot.waited_ns for slot in record.slots)
    if waited_ns <= LATE_SHARE * (record.end_ns - record.start_ns):
        return {}
    ranks = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
    late = {}
    for slot in record.slots:
        decision = plan.lookup(slot.key) if slot.waited_ns > LATE_NS else None
        rank = ranks.get(slot.key.match_key)
        if rank is not None and decision is not None and decision.action is Action.OFFLOAD:
            late[rank] = slot.waited_ns
    return late


def _times(plan: Plan, record: PassRecord) -> list[tuple[int, int]]:
    """Return (time, place in the order of need) of each slot that was asked for, in order of time."""
    ranks = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
    times = (
        (slot.needed_at_ns, ranks[slot.key.match_key])
        for slot in record.slots
        if slot.needed_at_ns is not None and slot.key.match_key in ranks
    )
    return sorted(times)


def _earlier(
    times: Sequence[tuple[int, int]], rank: int, trigger: int, waited_ns: int
) -> int | None:
    """Return the last place that is early enough; None: as soon as the window has room."""
    at_ns = {place: when for when, place in reversed(times)}
    since_ns = at_ns.get(trigger, at_ns[rank])
    wanted_ns = since_ns - int(MARGIN * waited_ns)
    found = bisect_right(times, (wanted_ns, len(times) + rank + trigger))
    return None if not found else min(times[found - 1][1], max(0, trigger - 1))


def _window_bytes(plan: Plan, record: PassRecord, late: Sequence[int]) -> int:
    """Return the read window, grown by what came late while it was full, as far as it may."""
    if not record.window_full or not late:
        return plan.window_bytes
    wanted = plan.window_bytes + sum(plan.need_order[rank].nbytes for rank in late)
    widest = plan.budgets.device_bytes if plan.widest_bytes is None else plan.widest_bytes
    return max(plan.window_bytes, min(wanted, widest))
