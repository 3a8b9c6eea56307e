"""Scheduling policy: which jobs compute and which sleep, as a pure function of their needs and history.

Time is divided into turns of one slice each. At the end of a turn all jobs are ranked: by priority, then
by virtual time, which is a job's past computing time divided by its weight (start-time fair queueing:
Goyal, Vin and Cheng, SIGCOMM 1996). In ranking order, each job that fits beside those chosen before it
is chosen; so the first job is always served, and the memory that it leaves is used. Within a turn the
chosen jobs stay, and others may fill free memory. A higher priority ends a turn at once.

[Note: slices]
    Sharing costs transfers: each turn moves memory from flash and back. Without a configured slice, a
    turn is long enough that this is a small part of it, by measurements of its jobs or an estimate.

[Note: starvation]
    A job that has waited for longer than the patience ranks first at the end of the turn, whatever its
    priority, and no priority ends its turn before the slice has passed. Of several such jobs the one that
    has waited longest goes first. So with n jobs none waits longer than the patience and n + 1 turns.
    Without a configured patience it is the time of several turns of each job: a shorter one would
    override priorities all the time.

[Note: starting a job]
    A sleeping process still holds some memory. A job starts only if afterwards each started job could
    still be awake while the others sleep, and only if flash has space for it. So no job blocks another
    for ever.

[Note: the budget]
    A job is woken if its need fits beside the charges of the others: their measured memory if they sleep,
    otherwise the larger of their need and their measured memory. A job that is falling asleep is charged
    in full until measurement shows that its memory has been freed.

[Note: prefetching a job]
    Memory that the turn's jobs leave of the budget is lent to the next job: it prefetches that much of
    its memory while others compute, which may end at any time. The prefetched memory stays on flash as
    well, so that it can be freed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from penstock.core.units import MIB, format_bytes


class JobPhase(Enum):
    """Phase of a job. In a transition it is charged for both phases."""

    WAITING = "waiting"
    """The job has not started: there is no process."""
    STARTING = "starting"
    """The process has started, and cannot be put to sleep yet."""
    AWAKE = "awake"
    SUSPENDING = "suspending"
    """The job was told to sleep; its step, or its write, has not ended."""
    ASLEEP = "asleep"
    WAKING = "waking"
    OVER = "over"
    """The process has ended."""


ALIVE: Final = (
    JobPhase.STARTING,
    JobPhase.AWAKE,
    JobPhase.SUSPENDING,
    JobPhase.ASLEEP,
    JobPhase.WAKING,
)
UP: Final = (JobPhase.STARTING, JobPhase.AWAKE, JobPhase.WAKING)
"""Phases in which a job holds, or is about to hold, all that it needs."""
LEAST_SLICE_S: Final = 2.0
LEAST_PATIENCE_S: Final = 60.0
PATIENT_ROUNDS: Final = 10
"""Patience in turns of each job. See [Note: starvation]."""
MOVING_SHARE: Final = 0.05
"""Maximum fraction of the time for transfers. See [Note: slices]."""
_MIN_PREFETCH_BYTES: Final = 64 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEntry:
    """A job as input of the policy."""

    name: str
    phase: JobPhase
    need_bytes: int
    """DRAM needed while awake."""
    held_bytes: int = 0
    """DRAM held now, measured."""
    rest_bytes: int = 0
    """DRAM held while asleep: measured, or expected."""
    fetch_bytes: int = 0
    """Bytes that it may have prefetched while asleep."""
    device_bytes: int = 0
    """Device memory needed while awake."""
    move_s: float = 0.0
    """Time of suspending and resuming together: measured, or expected."""
    weight: float = 1.0
    priority: int = 0
    virtual_s: float = 0.0
    """Time awake in seconds, divided by the weight."""
    waited_s: float = 0.0
    """Time since it was awake or was added."""
    held_back: bool = False
    """True if a user has suspended it."""
    urgent: bool = False
    """True if it must be awake before all others, because it is to be stopped."""
    fixed: bool = False
    """True if it cannot sleep now."""

    @property
    def charge_bytes(self) -> int:
        """Charged bytes of DRAM."""
        if self.phase in (JobPhase.WAITING, JobPhase.OVER):
            return self.held_bytes
        if self.phase is JobPhase.ASLEEP:
            return max(self.held_bytes, self.rest_bytes + self.fetch_bytes)
        return max(self.need_bytes, self.held_bytes)

    @property
    def device_charge_bytes(self) -> int:
        """Charged bytes of device memory."""
        return self.device_bytes if self.phase in (*UP, JobPhase.SUSPENDING) else 0

    @property
    def runnable(self) -> bool:
        """True if it should have turns."""
        return self.phase is not JobPhase.OVER and (not self.held_back or self.urgent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of all jobs together."""

    memory_bytes: int
    slice_s: float | None
    """Duration of a turn; None for an automatic one, see [Note: slices]."""
    patience_s: float | None
    """Maximum waiting time; None for an automatic one, see [Note: starvation]."""
    device_bytes: int | None = None
    flash_bytes: int | None = None
    """Capacity for the memory of sleeping jobs; None: no job can sleep, and each runs to its end."""
    spare_bytes: int = 16 * MIB
    """Memory that is not lent for prefetching, as a margin for estimates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTurn:
    """The jobs of a turn."""

    chosen: frozenset[str] = frozenset()
    aged: frozenset[str] = frozenset()
    """Chosen jobs that had waited too long."""
    spent_s: float = 0.0
    """Time during which all of them have been awake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDecision:
    """Actions to take now; later decisions bring further ones."""

    turn: PolicyTurn
    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()
    """Jobs to wake, which fit now."""
    notes: Mapping[str, str]
    """Reason of each waiting job."""


def decide(entries: Sequence[JobEntry], turn: PolicyTurn, limits: Limits) -> JobDecision:
    """Decide which jobs sleep and which wake.

    Args:
        entries: All jobs, with unique names.
        turn: Turn of the last decision, with the time that it has lasted.
        limits: Limits of the machine.
    """
    ranked = rank(entries, limits)
    begun, notes = _may_begin(ranked, limits)
    able = [each for each in ranked if each.runnable and each.name in begun]
    fresh = _choose(able, PolicyTurn(), entries, limits)
    if not _continues(able, fresh, turn, slice_s(entries, turn, limits)):
        turn = PolicyTurn()
    chosen = _choose(able, turn, entries, limits)
    # a job that has waited too long and is chosen now keeps its turn to the end
    patient_s = patience_s(entries, limits)
    aged = turn.aged | {each.name for each in able if _is_aged(each, patient_s)}
    turn = replace(turn, chosen=frozenset(chosen), aged=aged & frozenset(chosen))
    crowded = _is_crowded(chosen, entries, limits)
    sleep = tuple(
        each.name
        for each in entries
        if each.phase is JobPhase.AWAKE
        and each.name not in chosen
        and not each.fixed
        and limits.flash_bytes is not None
        and (each.held_back or crowded)
    )
    wake = _wake_now([each for each in ranked if each.name in chosen], entries, limits)
    for each in able:
        if each.name not in chosen or each.phase in (JobPhase.WAITING, JobPhase.ASLEEP):
            notes.setdefault(each.name, _reason(each, entries, wake, limits))
    for name in wake:
        notes.pop(name, None)
    return JobDecision(turn=turn, sleep=sleep, wake=wake, notes=notes)


def slice_s(entries: Iterable[JobEntry], turn: PolicyTurn, limits: Limits) -> float:
    """Return the duration of a turn, counted while all its jobs are awake. See [Note: slices]."""
    if limits.slice_s is not None:
        return limits.slice_s
    moving_s = sum(each.move_s for each in entries if each.name in turn.chosen)
    return max(LEAST_SLICE_S, moving_s / MOVING_SHARE)


def patience_s(entries: Sequence[JobEntry], limits: Limits) -> float:
    """Return the waiting time after which a job goes first. See [Note: starvation]."""
    if limits.patience_s is not None:
        return limits.patience_s
    alone = [PolicyTurn(chosen=frozenset({each.name})) for each in entries if each.runnable]
    round_s = sum(slice_s(entries, turn, limits) for turn in alone)
    return max(LEAST_PATIENCE_S, PATIENT_ROUNDS * round_s)


def rank(entries: Sequence[JobEntry], limits: Limits) -> list[JobEntry]:
    """Return all jobs in scheduling order."""
    patient_s = patience_s(entries, limits)

    def key(each: JobEntry) -> tuple[object, ...]:
        if each.urgent:
            return (0, 0, 0.0, each.name)
        if _is_aged(each, patient_s):
            return (1, 0, -each.waited_s, each.name)
        return (2, -each.priority, each.virtual_s, each.name)

    return sorted(entries, key=key)


def next_to_wake(entries: Sequence[JobEntry], turn: PolicyTurn, limits: Limits) -> JobEntry | None:
    """Return the sleeping job that will probably be woken first after this turn."""
    whole_s = slice_s(entries, turn, limits)
    left_s = max(whole_s - turn.spent_s, 0.0)
    later = [
        replace(each, virtual_s=each.virtual_s + left_s / each.weight, waited_s=0.0)
        if each.phase is JobPhase.AWAKE
        else replace(each, waited_s=each.waited_s + left_s)
        for each in entries
    ]
    decided = decide(later, replace(turn, spent_s=whole_s), limits)
    named = {each.name: each for each in entries}
    return next(
        (
            named[each.name]
            for each in rank(later, limits)
            if each.name in decided.turn.chosen and each.phase is JobPhase.ASLEEP
        ),
        None,
    )


def prefetch_allowance(
    entries: Sequence[JobEntry], turn: PolicyTurn, limits: Limits, rests: Mapping[str, int]
) -> tuple[str, int] | None:
    """Return the job that may prefetch memory, and how many bytes. See [Note: prefetching a job].

    Args:
        entries: All jobs.
        turn: Present turn.
        limits: Limits of the machine.
        rests: Bytes of each job on flash.
    """
    next_one = next_to_wake(entries, turn, limits)
    if next_one is None or next_one.name in turn.chosen:
        return None
    if next_one.fetch_bytes:
        return next_one.name, next_one.fetch_bytes
    free = limits.memory_bytes - sum(each.charge_bytes for each in entries) - limits.spare_bytes
    nbytes = min(free, rests[next_one.name])
    return (next_one.name, nbytes) if nbytes >= _MIN_PREFETCH_BYTES else None


def virtual_start(entries: Iterable[JobEntry]) -> float:
    """Return the virtual time of a new or returning job, which has no claim to past time.

    Args:
        entries: All other jobs.
    """
    running = [each for each in entries if each.phase in ALIVE and each.runnable]
    return min((each.virtual_s for each in running), default=0.0)


def _is_aged(each: JobEntry, patient_s: float) -> bool:
    return (
        each.phase in (JobPhase.WAITING, JobPhase.ASLEEP)
        and not each.held_back
        and each.waited_s > patient_s
    )


def _continues(
    able: Sequence[JobEntry], fresh: Mapping[str, JobEntry], turn: PolicyTurn, whole_s: float
) -> bool:
    """Return whether the turn continues: it has time left, and no job of a new turn takes precedence."""
    mine = [each for each in able if each.name in turn.chosen]
    others = [each for each in fresh.values() if each.name not in turn.chosen]
    if not mine or any(each.urgent for each in others):
        return False
    if turn.spent_s >= whole_s:
        return False
    least = min((each.priority for each in mine if each.name not in turn.aged), default=None)
    return least is None or all(each.priority <= least for each in others)


def _choose(
    able: Sequence[JobEntry], turn: PolicyTurn, entries: Sequence[JobEntry], limits: Limits
) -> dict[str, JobEntry]:
    """Choose, in scheduling order, each job that fits; jobs of the present turn come first."""
    rests = {each.name: _rest_bytes(each) for each in entries}
    free = limits.memory_bytes - sum(rests.values())
    device = limits.device_bytes
    chosen: dict[str, JobEntry] = {}
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


def _stays_up(each: JobEntry, limits: Limits) -> bool:
    """Return whether it is up and cannot be put to sleep."""
    cannot = each.fixed or limits.flash_bytes is None or each.phase is JobPhase.STARTING
    return each.phase in UP and cannot


def _rest_bytes(each: JobEntry) -> int:
    """Return the bytes that it holds if it is not chosen."""
    return each.held_bytes if each.phase in (JobPhase.WAITING, JobPhase.OVER) else each.rest_bytes


def _is_crowded(
    chosen: Mapping[str, JobEntry], entries: Sequence[JobEntry], limits: Limits
) -> bool:
    """Return whether a chosen job waits for memory, or the budget is exceeded."""
    if any(each.phase not in UP for each in chosen.values()):
        return True
    return sum(each.charge_bytes for each in entries) > limits.memory_bytes


def _wake_now(
    wanted: Sequence[JobEntry], entries: Sequence[JobEntry], limits: Limits
) -> tuple[str, ...]:
    free = limits.memory_bytes - sum(each.charge_bytes for each in entries)
    device = limits.device_bytes
    if device is not None:
        device -= sum(each.device_charge_bytes for each in entries)
    made = []
    for each in wanted:
        if each.phase not in (JobPhase.WAITING, JobPhase.ASLEEP):
            continue
        more = max(each.need_bytes - each.charge_bytes, 0)
        if more > free or (device is not None and each.device_bytes > device):
            break  # later ones must not take the memory that this one waits for
        made.append(each.name)
        free -= more
        device = None if device is None else device - each.device_bytes
    return tuple(made)


def _may_begin(ranked: Sequence[JobEntry], limits: Limits) -> tuple[set[str], dict[str, str]]:
    """Return the jobs that have started or may, and reasons for others. See [Note: starting a job]."""
    begun = [each for each in ranked if each.phase in ALIVE]
    notes: dict[str, str] = {}
    for each in ranked:
        if each.phase is not JobPhase.WAITING or not each.runnable or not begun:
            if each.phase is JobPhase.WAITING and each.runnable:
                begun.append(each)
            continue
        reason = _obstacle([*begun, each], limits)
        if reason is None:
            begun.append(each)
        else:
            notes[each.name] = reason
    return {each.name for each in begun}, notes


def _obstacle(together: Sequence[JobEntry], limits: Limits) -> str | None:
    """Return the reason why these jobs cannot all be started, or None."""
    if limits.flash_bytes is None:
        memory = sum(max(each.need_bytes, each.held_bytes) for each in together)
        device = sum(each.device_bytes for each in together)
        if memory <= limits.memory_bytes and (
            limits.device_bytes is None or device <= limits.device_bytes
        ):
            return None
        return (
            f"{format_bytes(memory)} of {format_bytes(limits.memory_bytes)} would be needed, and jobs"
            " cannot sleep without flash: it starts when others have ended"
        )
    flash = sum(each.need_bytes for each in together)
    if flash > limits.flash_bytes:
        return (
            f"up to {format_bytes(flash)} of memory would go to flash, which has"
            f" {format_bytes(limits.flash_bytes)} for it: it starts when others have ended"
        )
    rests = sum(each.rest_bytes for each in together)
    for each in together:
        least = rests - each.rest_bytes + each.need_bytes
        if least > limits.memory_bytes:
            return (
                f"job {each.name!r} would no longer fit: with the processes of {len(together) - 1}"
                f" sleeping jobs it needs {format_bytes(least)} of {format_bytes(limits.memory_bytes)}:"
                " it starts when others have ended"
            )
    return None


def _reason(
    each: JobEntry, entries: Sequence[JobEntry], wake: Sequence[str], limits: Limits
) -> str:
    up = [
        one
        for one in entries
        if one.name != each.name and (one.phase in (*UP, JobPhase.SUSPENDING) or one.name in wake)
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
