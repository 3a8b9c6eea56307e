"""Timelines of a replayed step: average memory, and memory and channel use for plots."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from penstock.plan.profile import Event, Profile
from penstock.plan.replay.lanes import ReplayLane
from penstock.plan.replay.moves import Channels, Moves
from penstock.plan.replay.result import Interval, Level, Residence, Trace
from penstock.plan.replay.walk import Walk
from penstock.plan.residency import KEPT

_Change = tuple[int, int]
"""(time in ns, change in bytes)."""


def average_bytes(profile: Profile, walk: Walk) -> int:
    """Return the mean of the device's memory over the step, of slots and of the bytes beside them."""
    whole_ns = walk.now_ns
    held = sum(nbytes * (whole_ns - when) for when, _, nbytes in walk.held.changes)
    levels = _beside(profile, walk.base_ns)
    times = [when for when, _ in levels]
    ends = [*times[1:], walk.base_ns + walk.computed_ns]
    beside = sum(
        level * max(0, end - when) for (when, level), end in zip(levels, ends, strict=True)
    )
    for when, took_ns in walk.delays:
        beside += levels[max(0, bisect_right(times, when) - 1)][1] * took_ns
    return (held + beside) // whole_ns if whole_ns else 0


def trace_of(profile: Profile, walk: Walk, moves: Moves, channels: Channels) -> Trace:
    """Return all timelines of a step."""
    beside = _on_the_clock(_beside(profile, walk.base_ns), walk)
    device = [*((when, nbytes) for when, _, nbytes in walk.held.changes), *_changes(beside)]
    host, flash = walk.held.tier_changes
    out, back = channels.out.values(), channels.back.values()
    staging: dict[str, tuple[Level, ...]] = {}
    if channels.staged is not None:
        channels.staged.room.close()
        staging["staging"] = _levels(channels.staged.room.changes)
    return Trace(
        residences=tuple(sorted(_residences(walk, moves))),
        memory={
            "device": _levels(device),
            "host": _levels(host),
            "flash": _levels(flash),
            **staging,
        },
        busy={
            "compute": _between(walk.stalls, walk.now_ns),
            "link_out": _intervals(out, moves.link_out_ns),
            "link_in": _intervals(channels.to_device.values(), moves.link_in_ns),
            "flash_write": _intervals(channels.to_tier.values(), moves.flash_out_ns),
            "flash_read": _intervals(back, moves.flash_in_ns),
            "codec": _merged(
                *_intervals([channels.encode], moves.encode_ns),
                *_intervals([channels.decode], moves.decode_ns),
            ),
        },
    )


def _residences(walk: Walk, moves: Moves) -> Iterator[Residence]:
    """Yield the periods for which slots were on the device."""
    since: dict[int, int] = {}
    for when, i, nbytes in walk.held.changes:
        if nbytes > 0:
            since[i] = when
        else:
            yield Residence(since.pop(i), when, i, -nbytes, moves.action[i] == KEPT)
    for i, when in since.items():
        nbytes = walk.held.sizes[i]
        yield Residence(when, walk.now_ns, i, nbytes, moves.action[i] == KEPT)


def _beside(profile: Profile, base_ns: int) -> list[Level]:
    """Return the bytes on the device beside the slots, as levels on the profile's axis."""
    if profile.transients:
        fixed = profile.fixed_bytes
        return [(base_ns, fixed), *((one.at_ns, fixed + one.nbytes) for one in profile.transients)]
    small = {*profile.small_beside, *profile.small_at_need}
    if len(small) < 2:
        return [(base_ns, small.pop() if small else profile.small_bytes)]
    levels = [(base_ns, 0)]
    for when, event, i in profile.steps:
        if event is not Event.FREE and profile.small_at(event, i) != levels[-1][1]:
            levels.append((when, profile.small_at(event, i)))
    return levels


def _on_the_clock(levels: Iterable[Level], walk: Walk) -> list[Level]:
    """Convert times on the profile's axis to time since the step began, delays included."""
    delays = sorted(walk.delays)
    whens = [when for when, _ in delays]
    late_ns = [0, *accumulate(took_ns for _, took_ns in delays)]
    return [
        (when - walk.base_ns + late_ns[bisect_left(whens, when)], level) for when, level in levels
    ]


def _changes(levels: Sequence[Level]) -> list[_Change]:
    found, before = [], 0
    for when, level in levels:
        found.append((when, level - before))
        before = level
    return found


def _levels(changes: Iterable[_Change]) -> tuple[Level, ...]:
    """Accumulate changes into levels; several changes at one time become one level."""
    at: dict[int, int] = {}
    held = 0
    for when, nbytes in sorted(changes, key=lambda change: change[0]):
        held += nbytes
        at[when] = held
    return tuple(at.items())


def _between(stalls: Iterable[Interval], end_ns: int) -> tuple[Interval, ...]:
    found, begin = [], 0
    for start, end in stalls:
        if start > begin:
            found.append((begin, start))
        begin = end
    if end_ns > begin:
        found.append((begin, end_ns))
    return tuple(found)


def _intervals(lanes: Iterable[ReplayLane | None], times: Sequence[int]) -> tuple[Interval, ...]:
    return _merged(
        *((at, at + times[i]) for lane in lanes if lane is not None for at, i in lane.log)
    )


def _merged(*intervals: Interval) -> tuple[Interval, ...]:
    """Sort intervals, drop empty ones, and merge those that touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end == start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)
