"""``ranked``: offload the slots with the longest idle time per cost, as few as the budget allows.

An offload frees bytes for their idle time, and occupies the flash channel for the time to write and read
them, encoded where a codec pays. So slots are ranked by bytes x idle time per second of channel time; the
first saved are needed last, so they come first and the tail of forward stays. Of slots that are idle
equally long, the compressible ones are offloaded first. If the channel could not move everything during
the network's compute, idle time no longer counts, and slots are ranked by channel time per byte alone, so
that compressible ones come first: FlashNeuron's phase 2 (FAST 2021), by measured ratios. The plan
offloads the shortest prefix of the ranking with which the kept slots and a read window fit in the budget:

1. If everything fits, everything is kept.
2. Slots that something else keeps alive are kept: offloading them frees nothing.
3. Slots that come back sooner than they could be written and read are offloaded last, except for those
   that were never needed.
4. Room for reads must remain beside the kept slots: at least the bytes that one node of backward uses
   and the next read, and, up to a quarter of the budget, as much as reads must run ahead to stay hidden.
   Beyond that quarter a kept byte is worth more than a byte to read ahead into, since it is not moved at
   all.
5. If even the whole ranking does not leave that room, all of it is offloaded.

A larger budget never offloads more bytes as long as the tiers have room (see ``first_true``). ``auto``
begins with this plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.config import UNLIMITED
from penstock.core.units import format_bytes
from penstock.plan.assembly import assemble
from penstock.plan.encoding import SlotCodecs, cost_s, round_trip_s
from penstock.plan.explanation import why_kept
from penstock.plan.machine import Budgets, Machine
from penstock.plan.placement import first_true, fitting, place
from penstock.plan.plan import Plan
from penstock.plan.problem import Choice, PlanningProblem
from penstock.plan.profile import Profile
from penstock.plan.window import least_window, read_ahead_bytes, returning

WINDOW_SHARE = 4
"""Divisor of the budget: further slots are offloaded to widen the window up to this part of it."""


def ranked(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload as little as possible within the budget, the longest idle first."""
    case = PlanningProblem(profile, machine, budgets)
    if everything_fits(case):
        return assemble("ranked", case, case.offload({}), lambda _: why_everything_fits(case))
    return assemble("ranked", case, choose(case), why_kept)


def everything_fits(case: PlanningProblem) -> bool:
    """Return True if everything can be kept."""
    return case.profile.peak_saved_bytes <= case.budgets.device_bytes


def why_everything_fits(case: PlanningProblem) -> str:
    """Return the reason for keeping everything."""
    budget = case.budgets.device_bytes
    limit = "no budget" if budget >= UNLIMITED else f"a budget of {format_bytes(budget)}"
    return f"fits: everything saved is {format_bytes(case.profile.peak_saved_bytes)}, with {limit}"


def choose(case: PlanningProblem) -> Choice:
    """Return the choice that offloads the shortest sufficient prefix of the ranking."""
    case = case.fitted()
    order = rank(case)
    return offload_first(case, order[: enough(case, order)])


def enough(case: PlanningProblem, order: Sequence[int], recomputed: tuple[str, ...] = ()) -> int:
    """Return how many of an order must be offloaded so that the rest and a good window fit."""
    codecs = _codecs(case, order)
    return first_true(len(order), lambda k: _fits(case, order[:k], recomputed, codecs))


def offload_first(
    case: PlanningProblem, chosen: Sequence[int], recomputed: tuple[str, ...] = ()
) -> Choice:
    """Offload these groups except recomputed ones, the soonest needed to host memory."""
    dropped = case.dropped(case.offload({}, recomputed))
    gone = [g for g in chosen if g not in dropped]
    tiers = place([case.groups[g] for g in gone], case.budgets)
    return case.offload(dict(zip(gone, tiers, strict=True)), recomputed)


def rank(case: PlanningProblem) -> list[int]:
    """Return candidates, best first; the ranking is the same for every device budget."""
    bound = _channel_bound(case)
    order = sorted(case.movable, key=lambda g: (*_rank_key(case, g, bound=bound), g))
    return fitting(order, case.groups, case.budgets, encoded=True)


def _rank_key(case: PlanningProblem, g: int, *, bound: bool) -> tuple[int, float, float]:
    group, machine, tier = case.groups[g], case.machine, case.main_tier
    if group.idle_ns is None:
        return 2, 0.0, 0.0
    nbytes, idle_s = group.key.nbytes, group.idle_ns / 1e9
    sample = case.best_samples[g]
    late = idle_s < round_trip_s(nbytes, machine, tier, sample)
    freed_per_s = nbytes / cost_s(nbytes, machine, tier, sample)
    if bound:
        return int(late), -freed_per_s, -idle_s
    return int(late), -freed_per_s * idle_s, 0.0


def _channel_bound(case: PlanningProblem) -> bool:
    """Return True if moving everything unencoded would take longer than the network, either way."""
    write, read = case.machine.bytes_per_s(case.main_tier)
    passes, nbytes = case.profile.passes, case.profile.saved_bytes
    forward_ns = sum(one.backward_start_ns - one.start_ns for one in passes)
    backward_ns = sum(one.end_ns - one.backward_start_ns for one in passes)
    return nbytes / write > forward_ns / 1e9 or nbytes / read > backward_ns / 1e9


def _codecs(case: PlanningProblem, chosen: Sequence[int]) -> SlotCodecs:
    """Return the codecs that pay for each slot by itself, whatever else is offloaded."""
    samples = ((g, case.best_samples[g]) for g in chosen)
    return {i: sample for g, sample in samples if sample for i in case.groups[g].indices}


def _fits(
    case: PlanningProblem, chosen: Sequence[int], recomputed: tuple[str, ...], codecs: SlotCodecs
) -> bool:
    """Return True if the kept slots and a good window fit; monotone in the budget."""
    if not recomputed and case.lacks(chosen):
        return False
    device_bytes = case.budgets.device_bytes
    choice = case.offloaded(chosen, recomputed)
    mask, need = case.mask(choice), case.residency(choice)
    room = device_bytes - need.kept_bytes
    if need.hard_bytes > device_bytes:
        return False
    if least_window(returning(case.profile, mask), need.working_bytes) > room:
        return False
    if device_bytes // WINDOW_SHARE <= room:
        return True
    enough = room + 1
    ahead = read_ahead_bytes(case.profile, mask, case.machine, codecs, enough_bytes=enough)
    return ahead <= room
