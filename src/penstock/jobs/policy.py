"""Who computes, who sleeps: a pure function of what jobs need, have had, and wait for.

Time goes in turns, of a slice each. At the end of a turn all jobs are ranked: by priority, then by
virtual time, which is the time that a job has had divided by its weight (start-time fair queueing:
Goyal, Vin and Cheng, SIGCOMM 1996). Down the ranking each job is chosen that fits beside those chosen
before it; so memory that the first leave is used, and who comes first is always served. Within a turn
those chosen stay, and others may fill what room there is. A higher priority ends a turn at once.

[Note: slices]
    What sharing costs is moving: each turn takes one way from flash and one back. Where no slice is
    given, a turn lasts so long that this is a small part of it, by what it took those whose turn it is in
    the past, or is expected to take.

[Note: nobody starves]
    Who has waited for longer than the patience ranks first at the end of the turn, whatever his
    priority, and no priority ends that turn before its slice is over. Of several such, the one goes first
    who has waited longest. So with n jobs nobody waits for longer than the patience and n + 1 turns.
    Where none is given it is the time of several turns of each: shorter, it would be all that decides.

[Note: who may begin]
    A process that sleeps holds some memory all the same. A job begins only if afterwards each of those
    that have begun could still be awake while the others sleep, and only if flash has room for it. So
    none of them blocks another for ever.

[Note: the budget]
    A job is woken if what it needs fits beside what the others are charged for: what they hold, measured,
    if they sleep; else the larger of what they need and what they hold. Who is on the way to sleep is
    charged in full until what he held is seen to be gone.

[Note: ahead of its turn]
    What the others leave of the budget is lent to who comes next, for the turn: so much of its memory
    comes back already, while others compute, who may end at any time. It stays on flash as well, so that
    it can be given up at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from penstock.core.units import MIB, format_bytes


class Phase(Enum):
    """Where a job is. What is between two states is charged for both."""

    WAITING = "waiting"
    """Has not begun: there is no process."""
    STARTING = "starting"
    """Its process has begun, and cannot be put to sleep yet."""
    AWAKE = "awake"
    SUSPENDING = "suspending"
    """Was told to sleep; its step, or its write, is under way."""
    ASLEEP = "asleep"
    WAKING = "waking"
    OVER = "over"
    """There is no process any more."""


ALIVE: Final = (Phase.STARTING, Phase.AWAKE, Phase.SUSPENDING, Phase.ASLEEP, Phase.WAKING)
UP: Final = (Phase.STARTING, Phase.AWAKE, Phase.WAKING)
"""Holds, or is about to hold, all that it needs."""
BETWEEN: Final = (Phase.STARTING, Phase.SUSPENDING, Phase.WAKING)


LEAST_SLICE_S: Final = 2.0
LEAST_PATIENCE_S: Final = 60.0
PATIENT_ROUNDS: Final = 10
"""So many turns of each job are waited for. See [Note: nobody starves]."""
MOVING_SHARE: Final = 0.05
"""What moving may take of the time. See [Note: slices]."""
_LEAST_FETCH_BYTES: Final = 64 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A job as the policy sees it."""

    name: str
    phase: Phase
    need_bytes: int
    """DRAM when it is awake."""
    held_bytes: int = 0
    """DRAM now, measured."""
    rest_bytes: int = 0
    """DRAM when it sleeps: measured, or expected."""
    fetch_bytes: int = 0
    """Of its memory so much is allowed to be back already, while it sleeps."""
    device_bytes: int = 0
    """Memory of the device when it is awake."""
    move_s: float = 0.0
    """What it takes to go to sleep and to come back, together: measured, or expected."""
    weight: float = 1.0
    priority: int = 0
    virtual_s: float = 0.0
    """Seconds awake, divided by the weight."""
    waited_s: float = 0.0
    """Since it was awake, or came."""
    held_back: bool = False
    """Somebody wants it to sleep."""
    urgent: bool = False
    """It is to be awake before all others: to be stopped."""
    fixed: bool = False
    """It cannot sleep now, and said why."""

    @property
    def charge_bytes(self) -> int:
        """What of the DRAM it is charged for."""
        if self.phase in (Phase.WAITING, Phase.OVER):
            return self.held_bytes
        if self.phase is Phase.ASLEEP:
            return max(self.held_bytes, self.rest_bytes + self.fetch_bytes)
        return max(self.need_bytes, self.held_bytes)

    @property
    def device_charge_bytes(self) -> int:
        """What of the device's memory it is charged for."""
        return self.device_bytes if self.phase in (*UP, Phase.SUSPENDING) else 0

    @property
    def runnable(self) -> bool:
        """Whether it should have turns."""
        return self.phase is not Phase.OVER and (not self.held_back or self.urgent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What all of them share."""

    memory_bytes: int
    slice_s: float | None
    """How long a turn lasts; None: see [Note: slices]."""
    patience_s: float | None
    """How long anybody waits at most; None: see [Note: nobody starves]."""
    device_bytes: int | None = None
    flash_bytes: int | None = None
    """For memory of those who sleep; None: none of them can, and who has begun goes on to its end."""
    spare_bytes: int = 16 * MIB
    """Of memory, not lent: what is measured is never to the byte what was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Those whose turn it is."""

    chosen: frozenset[str] = frozenset()
    aged: frozenset[str] = frozenset()
    """Of them, who was chosen because he had waited too long."""
    spent_s: float = 0.0
    """How long all of them have been awake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do now; more will follow when that is done."""

    turn: Turn
    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()
    """These fit now."""
    notes: Mapping[str, str]
    """Why who waits does."""


def decide(entries: Sequence[Entry], turn: Turn, limits: Limits) -> Decision:
    """Say who is to sleep and who is to wake.

    Args:
        entries: All jobs; names differ.
        turn: What the last decision has returned, with the time that it has lasted.
        limits: The machine.
    """
    ranked = rank(entries, limits)
    begun, notes = _may_begin(ranked, limits)
    able = [each for each in ranked if each.runnable and each.name in begun]
    fresh = _choose(able, Turn(), entries, limits)
    if not _goes_on(able, fresh, turn, slice_s(entries, turn, limits)):
        turn = Turn()
    chosen = _choose(able, turn, entries, limits)
    # who has waited too long and is among the first now keeps his turn to its end
    patient_s = patience_s(entries, limits)
    aged = turn.aged | {each.name for each in able if _is_aged(each, patient_s)}
    turn = replace(turn, chosen=frozenset(chosen), aged=aged & frozenset(chosen))
    crowded = _is_crowded(chosen, entries, limits)
    sleep = tuple(
        each.name
        for each in entries
        if each.phase is Phase.AWAKE
        and each.name not in chosen
        and not each.fixed
        and limits.flash_bytes is not None
        and (each.held_back or crowded)
    )
    wake = _wake_now([each for each in ranked if each.name in chosen], entries, limits)
    for each in able:
        if each.name not in chosen or each.phase in (Phase.WAITING, Phase.ASLEEP):
            notes.setdefault(each.name, _why(each, entries, wake, limits))
    for name in wake:
        notes.pop(name, None)
    return Decision(turn=turn, sleep=sleep, wake=wake, notes=notes)


def slice_s(entries: Iterable[Entry], turn: Turn, limits: Limits) -> float:
    """How long this turn lasts once all of those are awake whose turn it is. See [Note: slices]."""
    if limits.slice_s is not None:
        return limits.slice_s
    moving_s = sum(each.move_s for each in entries if each.name in turn.chosen)
    return max(LEAST_SLICE_S, moving_s / MOVING_SHARE)


def patience_s(entries: Sequence[Entry], limits: Limits) -> float:
    """Who has waited for longer than this goes first. See [Note: nobody starves]."""
    if limits.patience_s is not None:
        return limits.patience_s
    alone = [Turn(chosen=frozenset({each.name})) for each in entries if each.runnable]
    round_s = sum(slice_s(entries, turn, limits) for turn in alone)
    return max(LEAST_PATIENCE_S, PATIENT_ROUNDS * round_s)


def rank(entries: Sequence[Entry], limits: Limits) -> list[Entry]:
    """All jobs, who comes first first."""
    patient_s = patience_s(entries, limits)

    def key(each: Entry) -> tuple[object, ...]:
        if each.urgent:
            return (0, 0, 0.0, each.name)
        if _is_aged(each, patient_s):
            return (1, 0, -each.waited_s, each.name)
        return (2, -each.priority, each.virtual_s, each.name)

    return sorted(entries, key=key)


def following(entries: Sequence[Entry], turn: Turn, limits: Limits) -> Entry | None:
    """Who sleeps and will be woken first when this turn is over, as far as can be told."""
    whole_s = slice_s(entries, turn, limits)
    left_s = max(whole_s - turn.spent_s, 0.0)
    later = [
        replace(each, virtual_s=each.virtual_s + left_s / each.weight, waited_s=0.0)
        if each.phase is Phase.AWAKE
        else replace(each, waited_s=each.waited_s + left_s)
        for each in entries
    ]
    decided = decide(later, replace(turn, spent_s=whole_s), limits)
    named = {each.name: each for each in entries}
    return next(
        (
            named[each.name]
            for each in rank(later, limits)
            if each.name in decided.turn.chosen and each.phase is Phase.ASLEEP
        ),
        None,
    )


def ahead(
    entries: Sequence[Entry], turn: Turn, limits: Limits, rests: Mapping[str, int]
) -> tuple[str, int] | None:
    """Whose memory is to be back ahead of his turn, and how much of it. See [Note: ahead of its turn].

    Args:
        entries: All jobs.
        turn: Which lasts.
        limits: The machine.
        rests: What each has on flash, in bytes.
    """
    following_one = following(entries, turn, limits)
    if following_one is None or following_one.name in turn.chosen:
        return None
    if following_one.fetch_bytes:
        return following_one.name, following_one.fetch_bytes
    free = limits.memory_bytes - sum(each.charge_bytes for each in entries) - limits.spare_bytes
    nbytes = min(free, rests[following_one.name])
    return (following_one.name, nbytes) if nbytes >= _LEAST_FETCH_BYTES else None


def virtual_start(entries: Iterable[Entry]) -> float:
    """Virtual time of who comes, or comes back: he has no claim to what was before.

    Args:
        entries: All others.
    """
    running = [each for each in entries if each.phase in ALIVE and each.runnable]
    return min((each.virtual_s for each in running), default=0.0)


def _is_aged(each: Entry, patient_s: float) -> bool:
    return (
        each.phase in (Phase.WAITING, Phase.ASLEEP)
        and not each.held_back
        and each.waited_s > patient_s
    )


def _goes_on(able: Sequence[Entry], fresh: Mapping[str, Entry], turn: Turn, whole_s: float) -> bool:
    """Whether this turn is not over: its time, or because of who would be chosen in a new one."""
    mine = [each for each in able if each.name in turn.chosen]
    others = [each for each in fresh.values() if each.name not in turn.chosen]
    if not mine or any(each.urgent for each in others):
        return False
    if turn.spent_s >= whole_s:
        return False
    least = min((each.priority for each in mine if each.name not in turn.aged), default=None)
    return least is None or all(each.priority <= least for each in others)


def _choose(
    able: Sequence[Entry], turn: Turn, entries: Sequence[Entry], limits: Limits
) -> dict[str, Entry]:
    """Down the ranking, each that fits beside those before it; who has the turn first."""
    rests = {each.name: _rest_bytes(each) for each in entries}
    free = limits.memory_bytes - sum(rests.values())
    device = limits.device_bytes
    chosen: dict[str, Entry] = {}
    leaving = [each for each in entries if each.phase in UP and each not in able]
    for each in (*leaving, *(one for one in able if _stays_up(one, limits))):
        free -= max(each.need_bytes, each.held_bytes) - rests[each.name]
        device = None if device is None else device - each.device_bytes
        if each in able:
            chosen[each.name] = each
    for each in sorted(able, key=lambda one: one.name not in turn.chosen):
        if each.name in chosen:
            continue
        more = max(each.need_bytes, each.held_bytes if each.phase in UP else 0) - rests[each.name]
        if more <= free and (device is None or each.device_bytes <= device):
            chosen[each.name] = each
            free -= more
            device = None if device is None else device - each.device_bytes
    return chosen


def _stays_up(each: Entry, limits: Limits) -> bool:
    """Whether it is up, and cannot be put to sleep."""
    cannot = each.fixed or limits.flash_bytes is None or each.phase is Phase.STARTING
    return each.phase in UP and cannot


def _rest_bytes(each: Entry) -> int:
    """What it holds when it is not chosen."""
    return each.held_bytes if each.phase in (Phase.WAITING, Phase.OVER) else each.rest_bytes


def _is_crowded(chosen: Mapping[str, Entry], entries: Sequence[Entry], limits: Limits) -> bool:
    """Whether somebody whose turn it is waits for memory, or there is more than may be."""
    if any(each.phase not in UP for each in chosen.values()):
        return True
    return sum(each.charge_bytes for each in entries) > limits.memory_bytes


def _wake_now(wanted: Sequence[Entry], entries: Sequence[Entry], limits: Limits) -> tuple[str, ...]:
    free = limits.memory_bytes - sum(each.charge_bytes for each in entries)
    device = limits.device_bytes
    if device is not None:
        device -= sum(each.device_charge_bytes for each in entries)
    made = []
    for each in wanted:
        if each.phase not in (Phase.WAITING, Phase.ASLEEP):
            continue
        more = max(each.need_bytes - each.charge_bytes, 0)
        if more > free or (device is not None and each.device_bytes > device):
            break  # those who come later must not take what this one waits for
        made.append(each.name)
        free -= more
        device = None if device is None else device - each.device_bytes
    return tuple(made)


def _may_begin(ranked: Sequence[Entry], limits: Limits) -> tuple[set[str], dict[str, str]]:
    """Those that have begun or may; and why others may not. See [Note: who may begin]."""
    begun = [each for each in ranked if each.phase in ALIVE]
    notes: dict[str, str] = {}
    for each in ranked:
        if each.phase is not Phase.WAITING or not each.runnable or not begun:
            if each.phase is Phase.WAITING and each.runnable:
                begun.append(each)
            continue
        reason = _obstacle([*begun, each], limits)
        if reason is None:
            begun.append(each)
        else:
            notes[each.name] = reason
    return {each.name for each in begun}, notes


def _obstacle(together: Sequence[Entry], limits: Limits) -> str | None:
    """Why these cannot all have begun."""
    if limits.flash_bytes is None:
        memory = sum(max(each.need_bytes, each.held_bytes) for each in together)
        device = sum(each.device_bytes for each in together)
        if memory <= limits.memory_bytes and (
            limits.device_bytes is None or device <= limits.device_bytes
        ):
            return None
        return (
            f"{format_bytes(memory)} of {format_bytes(limits.memory_bytes)} would be needed, and no"
            " flash is named for others to sleep on: it begins when others are over"
        )
    flash = sum(each.need_bytes for each in together)
    if flash > limits.flash_bytes:
        return (
            f"{format_bytes(flash)} of memory might have to sleep, and flash has"
            f" {format_bytes(limits.flash_bytes)} for it: it begins when others are over"
        )
    rests = sum(each.rest_bytes for each in together)
    for each in together:
        least = rests - each.rest_bytes + each.need_bytes
        if least > limits.memory_bytes:
            return (
                f"job {each.name!r} would not fit any more: with the processes of {len(together) - 1}"
                f" that sleep it takes {format_bytes(least)} of {format_bytes(limits.memory_bytes)}:"
                " it begins when others are over"
            )
    return None


def _why(each: Entry, entries: Sequence[Entry], wake: Sequence[str], limits: Limits) -> str:
    up = [
        one
        for one in entries
        if one.name != each.name and (one.phase in (*UP, Phase.SUSPENDING) or one.name in wake)
    ]
    fixed = [one.name for one in up if one.fixed]
    if fixed:
        return f"waits for {fixed[0]!r}, which cannot sleep now"
    if up:
        return "waits for its turn"
    charged = sum(one.charge_bytes for one in entries if one.name != each.name)
    return (
        f"needs {format_bytes(each.need_bytes)}, and others hold {format_bytes(charged)} of"
        f" {format_bytes(limits.memory_bytes)}"
    )
