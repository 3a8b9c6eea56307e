"""A profile with chosen convolution algorithms: its times, workspaces, and bytes beside slots.

A convolution uses the fastest algorithm whose workspace is within its limit, if it has one
(:mod:`penstock.plan.algorithms`). Its time then differs from the profile's, so everything after it
shifts. Workspaces are in device memory while their operator runs; they count if the profile is of a
whole device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from penstock.plan.algorithms import MAX_PARTS, Algorithm, fastest, least_for_time
from penstock.plan.machine import Machine
from penstock.plan.operators import Operator, WorkspaceLimit
from penstock.plan.profile import Event, Profile, Transient
from penstock.plan.residency import Mask, Residents
from penstock.plan.time_map import TimeMap

Limits: TypeAlias = tuple[WorkspaceLimit, ...]
"""Limits of convolutions that do not use their fastest algorithm, in the order of the profile."""
MAX_FRUGAL_SLOWDOWN: Final = 1 / 32
"""Fraction of its time by which a convolution may be slower to save workspace."""
_Kind: TypeAlias = tuple[str, bool]
"""(module, backward): the convolutions that share a limit."""
_NO_LIMITS: Final[Mapping[_Kind, WorkspaceLimit]] = {}


@dataclass(frozen=True, slots=True)
class _Run:
    """An operator with its algorithm and its new times."""

    operator: Operator
    algorithm: Algorithm
    start_ns: int
    end_ns: int

    @property
    def kind(self) -> _Kind:
        """Key of its workspace limit."""
        return self.operator.module, self.operator.backward


def with_algorithms(profile: Profile, machine: Machine, limits: Limits) -> Profile:
    """Return the profile with convolutions within ``limits`` and the fastest algorithm for all others.

    The result is cached in ``Profile.derived``.

    Args:
        profile: A profile made from shapes, with the geometry of its convolutions and no workspace.
        machine: The machine; without its ``compute`` the profile is returned as it is.
        limits: Workspace limits of some of its convolutions.
    """
    if machine.compute is None or not profile.operators:
        return profile
    key = (machine.compute, limits)
    known: Profile | None = profile.derived.get(key)
    if known is None:
        by_kind = {(one.module, one.backward): one for one in limits}
        runs = _runs(profile, machine, by_kind)
        known = profile.derived[key] = _computed(profile, runs) if runs else profile
    return known


def _computed(profile: Profile, runs: Sequence[_Run]) -> Profile:
    clock = TimeMap(
        (run.operator.start_ns, run.operator.end_ns, run.start_ns, run.end_ns) for run in runs
    )
    beside = _workspace_beside(profile, runs) if _whole_device(profile) else None
    slots = tuple(
        replace(
            slot,
            saved_at_ns=clock(slot.saved_at_ns),
            needed_at_ns=None if slot.needed_at_ns is None else clock(slot.needed_at_ns),
            small_bytes=slot.small_bytes if beside is None else small + beside[Event.SAVE][i],
            small_bytes_at_need=(
                slot.small_bytes_at_need if beside is None else at_need + beside[Event.USE][i]
            ),
        )
        for i, (slot, small, at_need) in enumerate(
            zip(profile.slots, profile.small_beside, profile.small_at_need, strict=True)
        )
    )
    transients = tuple(Transient(clock(one.at_ns), one.nbytes) for one in profile.transients)
    return replace(
        profile,
        slots=slots,
        passes=tuple(
            replace(
                one,
                start_ns=clock(one.start_ns),
                backward_start_ns=clock(one.backward_start_ns),
                end_ns=clock(one.end_ns),
            )
            for one in profile.passes
        ),
        operators=tuple(
            one.moved(clock(one.start_ns), clock(one.end_ns)) for one in profile.operators
        ),
        small_bytes=max(
            [
                profile.small_bytes,
                *(max(slot.small_bytes or 0, slot.small_bytes_at_need or 0) for slot in slots),
            ]
        ),
        transients=transients if beside is None else tuple(_merged(transients, runs)),
    )


def leanest(profile: Profile, machine: Machine) -> Limits:
    """Return limits that leave no convolution a workspace: vDNN's memory-optimal mode (m)."""
    if machine.compute is None:
        return ()
    kinds = dict.fromkeys(
        (one.module, one.backward) for one in profile.operators if one.convolution
    )
    return tuple(WorkspaceLimit(module, backward, 0) for module, backward in kinds)


def stepped_down(
    profile: Profile, machine: Machine, mask: Mask, device_bytes: int, *, split: bool = False
) -> Limits:
    """Return the least strict limits that make each workspace fit beside the resident bytes.

    This is vDNN's step-down (MICRO 2016, section 3.4) in one pass: the slots that are resident beside a
    convolution do not depend on the algorithms, so each convolution is considered by itself and gets the
    fastest algorithm that fits.

    Args:
        profile: As for ``with_algorithms``.
        machine: As for ``with_algorithms``.
        mask: The decision for each slot; none may be recomputed.
        device_bytes: The device budget.
        split: Whether convolutions may be computed in parts of their batch.
    """
    if machine.compute is None or not _whole_device(profile):
        return ()
    rooms = _rooms(profile, machine, mask, device_bytes)
    runs = _runs(profile, machine, _NO_LIMITS)
    return _within(runs, machine, rooms, MAX_PARTS if split else 1)


def frugal(profile: Profile, machine: Machine) -> Limits:
    """Return limits for convolutions that need less workspace at little cost in time, split in parts."""
    if machine.compute is None or not _whole_device(profile):
        return ()
    rooms: dict[_Kind, int] = {}
    known: dict[object, int] = {}
    spared = False
    for one in profile.operators:
        if one.convolution is None:
            continue
        kind, work = (one.module, one.backward), _work(one)
        need = known.get(work)
        if need is None:
            need = least_for_time(one, machine.compute, MAX_FRUGAL_SLOWDOWN).workspace_bytes
            known[work] = need
            spared = spared or need < fastest(one, machine.compute).workspace_bytes
        rooms[kind] = max(need, rooms.get(kind, 0))
    if not spared:
        return ()
    return _within(_runs(profile, machine, _NO_LIMITS), machine, rooms, MAX_PARTS)


def _within(
    runs: Sequence[_Run], machine: Machine, rooms: Mapping[_Kind, int], parts: int
) -> Limits:
    """Return the least strict limits for convolutions whose fastest algorithm does not fit its room."""
    assert machine.compute is not None
    found: dict[_Kind, list[Algorithm]] = {}
    too_large = {run.kind for run in runs if run.algorithm.workspace_bytes > rooms[run.kind]}
    known: dict[object, Algorithm] = {}
    for run in runs:
        if run.kind in too_large:
            work = _work(run.operator), rooms[run.kind]
            within = known.get(work)
            if within is None:
                within = fastest(run.operator, machine.compute, rooms[run.kind], parts)
                known[work] = within
            found.setdefault(run.kind, []).append(within)
    return tuple(
        WorkspaceLimit(
            *kind, max(one.workspace_bytes for one in those), max(one.parts for one in those)
        )
        for kind, those in found.items()
    )


def _rooms(profile: Profile, machine: Machine, mask: Mask, device_bytes: int) -> dict[_Kind, int]:
    """Return the bytes free for the workspace of each convolution; of several calls the fewest."""
    everything = leanest(profile, machine)
    spare = with_algorithms(profile, machine, everything)
    events = ~spare.arrays.free
    times: list[int] = spare.arrays.at_ns[events].tolist()
    needs: list[int] = Residents(spare, mask).need_bytes[events].tolist()
    rooms: dict[_Kind, int] = {}
    for run in _runs(profile, machine, {(one.module, one.backward): one for one in everything}):
        first = max(0, bisect_right(times, run.start_ns) - 1)
        since = (
            bisect_left(times, times[first]) if times else 0
        )  # all storages may be below the floor
        beside = needs[since : bisect_left(times, run.end_ns)]
        room = max(0, device_bytes - max(beside, default=spare.small_bytes))
        rooms[run.kind] = min(room, rooms.get(run.kind, room))
    return rooms


def _whole_device(profile: Profile) -> bool:
    return bool(profile.transients or profile.fixed_bytes)


def _runs(profile: Profile, machine: Machine, limits: Mapping[_Kind, WorkspaceLimit]) -> list[_Run]:
    """Return the convolutions in order of time, shifted by the new times of earlier ones."""
    if machine.compute is None:
        return []
    found = []
    known: dict[object, Algorithm] = {}
    shift_ns = 0
    for one in sorted(profile.operators, key=lambda one: one.start_ns):
        if one.convolution is not None:
            limit = limits.get((one.module, one.backward))
            within = () if limit is None else (limit.nbytes, limit.parts)
            work = _work(one), within
            algorithm = known.get(work)
            if algorithm is None:
                algorithm = known[work] = fastest(one, machine.compute, *within)
            start_ns = one.start_ns + shift_ns
            found.append(_Run(one, algorithm, start_ns, start_ns + algorithm.took_ns))
            shift_ns += algorithm.took_ns - one.took_ns
    return found


def _work(one: Operator) -> object:
    """Return a key that is equal for convolutions that take the same time with the same algorithm."""
    return one.convolution, one.flops, one.moved_bytes, one.half, one.backward


def _workspace_beside(profile: Profile, runs: Sequence[_Run]) -> Mapping[Event, list[int]]:
    """Return the largest workspace between each slot's save, and its use, and the next event."""
    starts, ends = zip(*((run.operator.start_ns, run.operator.end_ns) for run in runs), strict=True)
    beside = {event: [0] * len(profile.slots) for event in (Event.SAVE, Event.USE)}
    events = [step for step in profile.steps if step[1] is not Event.FREE]
    after_ns = events[-1][0] if events else 0
    for place in reversed(range(len(events))):
        when_ns, event, i = events[place]
        if place + 1 < len(events) and events[place + 1][0] > when_ns:
            after_ns = events[place + 1][0]
        first = bisect_right(ends, when_ns)
        last = bisect_left(starts, after_ns) if after_ns > when_ns else len(runs)
        for run in runs[first:last]:
            beside[event][i] = max(beside[event][i], run.algorithm.workspace_bytes)
    return beside


def _merged(transients: Sequence[Transient], runs: Sequence[_Run]) -> Iterator[Transient]:
    """Yield the sum of two functions of time: transient bytes and workspace bytes."""
    changes: list[tuple[int, int]] = []
    before = 0
    for one in transients:
        changes.append((one.at_ns, one.nbytes - before))
        before = one.nbytes
    for run in runs:
        if run.algorithm.workspace_bytes:
            changes.append((run.start_ns, run.algorithm.workspace_bytes))
            changes.append((run.end_ns, -run.algorithm.workspace_bytes))
    changes.sort()
    total = 0
    for place, (at_ns, change) in enumerate(changes):
        total += change
        if place + 1 == len(changes) or changes[place + 1][0] > at_ns:
            yield Transient(at_ns, total)
