"""Which tier an offloaded slot goes to: the quick ones to host memory, the rest to flash.

[Note: a tier's room is counted before encoding]
    As long as the tiers have room for bytes as they are, a plan does not count on what codecs leave. What
    a tensor shrinks to was measured on a sample of one step, and sparsity changes as a network learns;
    how long a frame is shows only when it has been encoded, after the tensor was promised to the tier.
    So every slot that may be encoded counts as it is, and a frame's header more: then the plan holds even
    if from now on nothing compresses at all.

    Where the tiers have no room for all that is to go, that certainty is given up for what they lack:
    slots count as encoded, and are, though it be slower (``packed``). They count with the measured ratio
    and ``SPACE_MARGIN`` of their bytes more. That is as much as frames may differ from what was foreseen
    before the runtime measures again and plans anew. What has no room then goes to another tier, or
    stays on the device, as without codecs it would have from the beginning.

    The search of ``auto`` may also give one tier more than it holds as it is where another has room for
    what does not fit after all: then nothing but time is at stake (``rooms_for``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from penstock.core.units import round_up
from penstock.plan.groups import PAGE_BYTES, Group
from penstock.plan.machine import Budgets
from penstock.plan.profile import CodecSample

SPACE_MARGIN: Final = 0.15
"""Share of a slot's bytes for which a tier has room beyond what its frames are expected to take."""


def packed_bytes(group: Group, sample: CodecSample) -> int:
    """What a group is counted for in a tier if it is encoded so; no more than as it is.

    A page more for each slot: each ends within one.
    """
    wanted = math.ceil(group.nbytes * (sample.ratio + SPACE_MARGIN))
    return min(group.nbytes, round_up(wanted, PAGE_BYTES) + PAGE_BYTES * len(group.indices))


def least_bytes(group: Group) -> int:
    """What it is counted for by whichever codec makes it shortest."""
    return min((packed_bytes(group, sample) for sample in group.codecs), default=group.nbytes)


def fitting(
    ranked: Iterable[int], groups: Sequence[Group], budgets: Budgets, *, encoded: bool = False
) -> list[int]:
    """Those of the groups, by index and the first ones first, that the tiers have room for together.

    Args:
        ranked: The groups, best first.
        groups: What the indices mean.
        budgets: The tiers' capacities.
        encoded: Whether those for which there is room only if they, and the others, are encoded, follow.
    """
    room = budgets.host_bytes + budgets.flash_bytes
    found, left = [], []
    for g in ranked:
        if groups[g].nbytes <= room:
            found.append(g)
            room -= groups[g].nbytes
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


def place(chosen: list[Group], budgets: Budgets) -> list[str]:
    """The tier of each group: ``"host"``, ``"flash"``, or ``""`` where neither has room.

    Those that are needed soonest go to the host tier, which is quicker, until it is full. Of the
    rest, the first in ``chosen`` have precedence. Where not all have room as they are, they are placed
    as they would be encoded, if more of them have room so; ``packed`` says which then must be.
    """
    as_they_are = _place(chosen, [group.nbytes for group in chosen], budgets)
    if all(as_they_are):
        return as_they_are
    encoded = _place(chosen, [least_bytes(group) for group in chosen], budgets)
    return max(as_they_are, encoded, key=lambda tiers: _placed_bytes(chosen, tiers))


def rooms_for(
    tiers: Sequence[str],
    budgets: Budgets,
    *,
    sizes: Sequence[int],
    least: Sequence[int],
    instead_of: Sequence[str],
) -> bool:
    """Whether each tier has room for the groups that it is given: as they are, or encoded.

    Args:
        tiers: The tier of each group, or ``""``.
        budgets: The tiers' capacities.
        sizes: What each group takes as it is.
        least: ``least_bytes`` of each.
        instead_of: The tiers of another choice. Where all tiers together have no room for bytes as they
            are, encoded ones count only if that is so with that choice as well.
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
    """Bytes to host memory, bytes to flash."""
    used = {"host": 0, "flash": 0, "": 0}
    for tier, nbytes in zip(tiers, sizes, strict=True):
        used[tier] += nbytes
    return used["host"], used["flash"]


def packed(
    groups: Sequence[Group],
    tiers: Sequence[str],
    samples: Mapping[int, CodecSample],
    budgets: Budgets,
) -> Mapping[int, CodecSample]:
    """How groups are encoded, so that no tier is given more than it has room for.

    Args:
        groups: All of them.
        tiers: The tier of each, or ``""``.
        samples: How they would be encoded, by index: to be quick. It is changed only for a tier that is
            otherwise too full: those first that spare it most for each second of a core.
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


def _shortest(group: Group) -> CodecSample:
    return min(group.codecs, key=lambda sample: (sample.ratio, sample.codec))


def _spared(group: Group, sample: CodecSample | None) -> int:
    return 0 if sample is None else group.nbytes - packed_bytes(group, sample)


def _worth(group: Group, sample: CodecSample | None) -> float:
    """Bytes more that the shortest codec spares, for each second that it works on the group."""
    best = _shortest(group)
    more = _spared(group, best) - _spared(group, sample)
    return more / (best.encode_s(group.nbytes) + best.decode_s(group.nbytes))


def _placed_bytes(chosen: list[Group], tiers: list[str]) -> int:
    return sum(group.nbytes for group, tier in zip(chosen, tiers, strict=True) if tier)


def _place(chosen: list[Group], sizes: list[int], budgets: Budgets) -> list[str]:
    tiers = [""] * len(chosen)
    room = budgets.host_bytes
    for i in sorted(range(len(chosen)), key=lambda i: (_idle(chosen[i]), i)):
        if sizes[i] <= room:
            tiers[i], room = "host", room - sizes[i]
    room = budgets.flash_bytes
    for i, nbytes in enumerate(sizes):
        if not tiers[i] and nbytes <= room:
            tiers[i], room = "flash", room - nbytes
    return tiers


def _idle(group: Group) -> float:
    return float("inf") if group.idle_ns is None else group.idle_ns


def first_true(count: int, holds: Callable[[int], bool]) -> int:
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
