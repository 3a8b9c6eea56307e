"""``auto``: offload what is idle longest for what it costs, as little of it as the budget allows.

An offload frees bytes for the time that nobody wants them, and costs the flash channel the time to
write and to read them, encoded where a codec pays. So slots are ranked by bytes x idle time, per second
of channel time; the first saved are needed last, so they come first and the tail of forward stays. Of
slots that are idle for as long, the compressible go and the others stay. Where the channel could not
move everything behind the network, idle time no longer counts, and they are ranked by channel time per
byte alone, so that the compressible go first: FlashNeuron's phase 2 (FAST 2021), by measured ratios. The
plan offloads the shortest run of that ranking with which what is kept, and a window for reads, fit in
the budget:

1. Everything fits: everything stays.
2. Slots that something else keeps alive stay: offloading them frees nothing.
3. Slots that come back sooner than they could be written and read are offloaded last but for those
   that were never needed.
4. Room for reads must remain beside what is kept: at least what one node of backward uses and the
   next read, and, up to a quarter of the budget, as much as reads must run ahead to stay hidden.
   Beyond that quarter a kept byte is worth more than a byte to read ahead into: it is not moved at
   all.
5. Where even the whole ranking does not leave that room, all of it is offloaded.

A larger budget never offloads more bytes as long as the tiers have room (see ``_first_true``).
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.units import format_bytes, format_duration
from penstock.plan.assemble import assemble, mask_of
from penstock.plan.encoding import SlotCodecs, best, cost_s, trip_s
from penstock.plan.groups import Group, groups_of
from penstock.plan.machine import Budgets, Machine
from penstock.plan.placement import fitting
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.residency import residency
from penstock.plan.window import least_window, read_ahead_bytes, returning

WINDOW_SHARE = 4
"""Reads may run ahead by one part in this many of the budget before kept slots give way."""


def auto(profile: Profile, machine: Machine, budgets: Budgets) -> Plan:
    """Offload as little as fits the budget, the longest idle first."""
    if profile.peak_saved_bytes <= budgets.device_bytes:
        fits = (
            f"fits: everything saved is {format_bytes(profile.peak_saved_bytes)} of"
            f" {format_bytes(budgets.device_bytes)}"
        )
        return assemble("auto", profile, machine, budgets, chosen=[], why_kept=lambda _: fits)
    tier = "flash" if budgets.flash_bytes else "host"
    ranked = fitting(_rank(profile, machine, tier), budgets)
    codecs = _codecs(ranked, machine, tier)
    count = _first_true(len(ranked), lambda k: _fits(profile, machine, budgets, ranked[:k], codecs))
    return assemble("auto", profile, machine, budgets, chosen=ranked[:count], why_kept=_why_kept)


def _rank(profile: Profile, machine: Machine, tier: str) -> list[Group]:
    """Candidates, best first; the same for every device budget, which chooses a run of them."""
    movable = [group for group in groups_of(profile) if not group.held_elsewhere]
    bound = _channel_bound(profile, machine, tier)
    return sorted(movable, key=lambda group: _rank_key(group, machine, tier, bound=bound))


def _rank_key(
    group: Group, machine: Machine, tier: str, *, bound: bool
) -> tuple[int, float, float]:
    if group.idle_ns is None:
        return 2, 0.0, 0.0
    nbytes, idle_s = group.key.nbytes, group.idle_ns / 1e9
    sample = best(group.codecs, machine, tier)
    late = idle_s < trip_s(nbytes, machine, tier, sample)
    freed_per_s = nbytes / cost_s(nbytes, machine, tier, sample)
    if bound:
        return int(late), -freed_per_s, -idle_s
    return int(late), -freed_per_s * idle_s, 0.0


def _channel_bound(profile: Profile, machine: Machine, tier: str) -> bool:
    """Whether to move everything, as it is, would take longer than the network, either way."""
    write, read = machine.bytes_per_s(tier)
    forward_ns = sum(one.backward_start_ns - one.start_ns for one in profile.passes)
    backward_ns = sum(one.end_ns - one.backward_start_ns for one in profile.passes)
    nbytes = profile.saved_bytes
    return nbytes / write > forward_ns / 1e9 or nbytes / read > backward_ns / 1e9


def _codecs(groups: list[Group], machine: Machine, tier: str) -> SlotCodecs:
    """Those that pay for a slot by itself. How many slots are offloaded does not change them."""
    samples = ((group, best(group.codecs, machine, tier)) for group in groups if group.codecs)
    return {i: sample for group, sample in samples if sample for i in group.indices}


def _fits(
    profile: Profile,
    machine: Machine,
    budgets: Budgets,
    chosen: list[Group],
    codecs: SlotCodecs,
) -> bool:
    """Whether what stays and a good window fit. True for a budget if true for a smaller one."""
    mask = mask_of(profile, chosen)
    need = residency(profile, mask)
    if need.hard_bytes > budgets.device_bytes:
        return False
    ahead = read_ahead_bytes(profile, mask, machine, codecs)
    ahead = min(ahead, budgets.device_bytes // WINDOW_SHARE)
    window = max(ahead, least_window(returning(profile, mask), need.working_bytes))
    return need.kept_bytes + window <= budgets.device_bytes


def _why_kept(group: Group) -> str:
    if group.held_elsewhere:
        return "held elsewhere: offloading it would free nothing"
    if group.idle_ns is None:
        return "not needed in the profiled step"
    return f"tail of forward; needed {format_duration(group.idle_ns / 1e9)} after it was saved"


def _first_true(count: int, holds: Callable[[int], bool]) -> int:
    """The k in 0..count that bisection ends at: the least for which ``holds``, if it is monotone.

    Where ``holds(count)`` is false the answer is ``count``. If one predicate holds wherever another
    does, its answer is not above the other's, monotone or not.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
