"""Placement of offloaded slots in tiers: those needed soonest in host memory, the rest on flash.

[Note: a tier's room is counted before encoding]
    As long as the tiers have room for unencoded bytes, a plan does not rely on compression. A tensor's
    ratio was measured on a sample of one step, and sparsity changes as a network learns; the length of a
    frame is known only when it has been encoded, after the tensor was promised to the tier. So every slot
    that may be encoded is charged its unencoded bytes and a frame's header: then the plan holds even if
    nothing compresses any more.

    If the tiers lack room for everything that must be offloaded, the plan relies on compression for what
    they lack: slots are charged as encoded, and are encoded even if that is slower (``packed``). They are
    charged the measured ratio and ``SPACE_MARGIN`` of their bytes more, which is as much as frames may
    deviate before the runtime samples again and makes a new plan. A slot without room then goes to
    another tier, or stays on the device, as it would have without codecs.

    A slot that is longer than the staging memory does not go to flash (``may_go``), only to host memory:
    it might pass when it is encoded, but that is known too late.

    The search of ``auto`` may also give one tier more unencoded bytes than it holds if another tier has
    room for those that turn out not to fit: then only time is at stake (``rooms_for``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from penstock.core.units import round_up
from penstock.plan.groups import PAGE_BYTES, SlotGroup
from penstock.plan.machine import Budgets
from penstock.plan.profile import CodecSample

SPACE_MARGIN: Final = 0.15
"""Fraction of a slot's bytes that is charged to a tier beyond the expected size of its frames."""


def packed_bytes(group: SlotGroup, sample: CodecSample) -> int:
    """Return the bytes that an encoded group is charged in a tier; never more than unencoded.

    Each slot is charged one page more, because it ends within a page.
    """
    wanted = math.ceil(group.nbytes * (sample.ratio + SPACE_MARGIN))
    return min(group.nbytes, round_up(wanted, PAGE_BYTES) + PAGE_BYTES * len(group.indices))


def least_bytes(group: SlotGroup) -> int:
    """Return the bytes that a group is charged with the codec that makes it smallest."""
    return min((packed_bytes(group, sample) for sample in group.codecs), default=group.nbytes)


def may_go(group: SlotGroup, tier: str, budgets: Budgets) -> bool:
    """Return True unless slots of a group, unencoded, are too long to be staged on their way to flash."""
    return tier != "flash" or budgets.stages(group.longest_bytes)


def fitting(
    ranked: Iterable[int], groups: Sequence[SlotGroup], budgets: Budgets, *, encoded: bool = False
) -> list[int]:
    """Return the indices of the groups that the tiers together have room for, in the given order.

    Args:
        ranked: Indices of groups, best first.
        groups: All groups.
        budgets: The tiers' capacities.
        encoded: Append the groups that fit only if they and the others are encoded.
    """
    room, host = budgets.host_bytes + budgets.flash_bytes, budgets.host_bytes
    found, left = [], []
    for g in ranked:
        nbytes = groups[g].nbytes
        if not may_go(groups[g], "flash", budgets):
            if nbytes > min(host, room):
                continue
            host -= nbytes
        if nbytes <= room:
            found.append(g)
            room -= nbytes
        else:
            left.append(g)
    if encoded and left:
        room = budgets.host_bytes + budgets.flash_bytes - sum(least_bytes(groups[g]) for g in found)
        for g in left:
            nbytes = least_bytes(groups[g])
            if nbytes <= room:
                found.append(g)
                room -= nbytes
    return found


def place(chosen: list[SlotGroup], budgets: Budgets) -> list[str]:
    """Return the tier of each group: ``"host"``, ``"flash"``, or ``""`` if neither has room.

    Groups that cannot go to flash, and then those that are needed soonest, go to the host tier, which is
    quicker, until it is full. Of the rest, the first in ``chosen`` have precedence. If not all fit
    unencoded, they are placed by their encoded sizes if more of them fit that way; ``packed`` then
    chooses which must be encoded.
    """
    raw = _place(chosen, [group.nbytes for group in chosen], budgets)
    if all(raw):
        return raw
    encoded = _place(chosen, [least_bytes(group) for group in chosen], budgets)
    return max(raw, encoded, key=lambda tiers: _placed_bytes(chosen, tiers))


def rooms_for(
    tiers: Sequence[str],
    budgets: Budgets,
    *,
    sizes: Sequence[int],
    least: Sequence[int],
    instead_of: Sequence[str],
) -> bool:
    """Return True if each tier has room for its groups, unencoded or encoded.

    Args:
        tiers: The tier of each group, or ``""``.
        budgets: The tiers' capacities.
        sizes: Unencoded bytes of each group.
        least: ``least_bytes`` of each group.
        instead_of: The tiers of another choice. If all tiers together have no room for unencoded bytes,
            encoded sizes are used only if that holds for the other choice as well.
    """
    host, flash = budgets.host_bytes, budgets.flash_bytes
    in_host, on_flash = _sums(tiers, sizes)
    if in_host <= host and on_flash <= flash:
        return True
    if in_host + on_flash > host + flash and sum(_sums(instead_of, sizes)) <= host + flash:
        return False
    in_host, on_flash = _sums(tiers, least)
    return in_host <= host and on_flash <= flash


def _sums(tiers: Sequence[str], sizes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes placed in host memory, and on flash."""
    used = {"host": 0, "flash": 0, "": 0}
    for tier, nbytes in zip(tiers, sizes, strict=True):
        used[tier] += nbytes
    return used["host"], used["flash"]


def packed(
    groups: Sequence[SlotGroup],
    tiers: Sequence[str],
    samples: Mapping[int, CodecSample],
    budgets: Budgets,
) -> Mapping[int, CodecSample]:
    """Choose codecs such that no tier receives more than it has room for.

    Args:
        groups: All groups.
        tiers: The tier of each, or ``""``.
        samples: The quickest codec sample of each group, by index. It is changed only for a tier that
            would be too full: first those groups that save most bytes per second of a core.
        budgets: The tiers' capacities.
    """
    found = dict(samples)
    for tier, room in (("host", budgets.host_bytes), ("flash", budgets.flash_bytes)):
        missing = sum(groups[g].nbytes for g, one in enumerate(tiers) if one == tier) - room
        if missing <= 0:
            continue
        mine = [g for g, one in enumerate(tiers) if one == tier and groups[g].codecs]
        missing -= sum(_spared(groups[g], found.get(g)) for g in mine)
        for g in sorted(mine, key=lambda g: (-_worth(groups[g], found.get(g)), g)):
            if missing <= 0:
                break
            best = _shortest(groups[g])
            more = _spared(groups[g], best) - _spared(groups[g], found.get(g))
            if more > 0:
                found[g] = best
                missing -= more
    return found


def _shortest(group: SlotGroup) -> CodecSample:
    return min(group.codecs, key=lambda sample: (sample.ratio, sample.codec))


def _spared(group: SlotGroup, sample: CodecSample | None) -> int:
    return 0 if sample is None else group.nbytes - packed_bytes(group, sample)


def _worth(group: SlotGroup, sample: CodecSample | None) -> float:
    """Return the further bytes that the smallest codec saves per second of its work on the group."""
    best = _shortest(group)
    more = _spared(group, best) - _spared(group, sample)
    return more / (best.encode_s(group.nbytes) + best.decode_s(group.nbytes))


def _placed_bytes(chosen: list[SlotGroup], tiers: list[str]) -> int:
    return sum(group.nbytes for group, tier in zip(chosen, tiers, strict=True) if tier)


def _place(chosen: list[SlotGroup], sizes: list[int], budgets: Budgets) -> list[str]:
    tiers = [""] * len(chosen)
    room = budgets.host_bytes
    free = [may_go(group, "flash", budgets) for group in chosen]
    for i in sorted(range(len(chosen)), key=lambda i: (free[i], _idle(chosen[i]), i)):
        if sizes[i] <= room:
            tiers[i], room = "host", room - sizes[i]
    room = budgets.flash_bytes
    for i, nbytes in enumerate(sizes):
        if not tiers[i] and nbytes <= room and free[i]:
            tiers[i], room = "flash", room - nbytes
    return tiers


def _idle(group: SlotGroup) -> float:
    return float("inf") if group.idle_ns is None else group.idle_ns


def first_true(count: int, holds: Callable[[int], bool]) -> int:
    """Return the k in 0..count that bisection ends at: the least for which ``holds``, if it is monotone.

    It is ``count`` if no smaller one holds. If one predicate holds wherever another does, its result is
    not above the other's, monotone or not.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
