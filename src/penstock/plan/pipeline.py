"""Which offloaded slots are encoded, where transfers hide behind the network and behind each other.

The network, the encoder (one thread for all slots and tiers) and each tier's channel are machines in a
pipeline: while one slot is encoded, another is being written and a third computed. So on paper one way
of a pass, its forward or its backward, takes as long as the busiest of them. Slots come up in turn,
those first that spare their channel most for each second of the encoder, and one is encoded

1. if its codec pays even with nothing overlapping (``encoding.pays``), and the pass takes no longer;
2. or, while its channel is the busiest, if the pass becomes shorter, by ``MARGIN`` of the encoder's time.

So the encoder never becomes the bottleneck that the channel was, and a step is never slower on paper
than with bytes as they are.

FlashNeuron (FAST 2021) has a phase 2 of the same purpose: where transfers do not fit in the forward
pass, compressible tensors are offloaded in place of others, until they fit. Its ratios are assumed, and
reads are not looked at; here ratios, the encoder and both ways are measured. Which slots are offloaded
is the policy's choice (``auto`` ranks by the encoded transfer); how they go is chosen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from penstock.plan.encoding import MARGIN, best, saved_per_work
from penstock.plan.groups import Group
from penstock.plan.machine import Machine
from penstock.plan.profile import CodecSample, PassProfile, Profile

Placed: TypeAlias = Sequence[tuple[Group, str]]
"""Offloaded groups, each with its tier."""
Codecs: TypeAlias = list[CodecSample | None]
"""How each of them is encoded; None: it goes as it is."""

_FORWARD: Final = 0
_BACKWARD: Final = 1
_Way: TypeAlias = tuple[int, int]
"""(index of the pass, forward or backward)."""
_Busy: TypeAlias = list[float]
"""Seconds for which each machine is busy: the network, the encoder, and the channels of the tiers."""
_NETWORK: Final = 0
_ENCODER: Final = 1
_CHANNEL: Final = {"flash": 2, "host": 3}


def choose(profile: Profile, machine: Machine, placed: Placed) -> Codecs:
    """How each placed group goes to its tier. Pure; the same answer for the same arguments."""
    codecs: Codecs = [None] * len(placed)
    candidates = _candidates(machine, placed)
    busy = _busy(profile, machine, placed, codecs) if candidates else {}
    for i, sample, pays_alone in candidates:
        after = _encoded(profile, machine, placed[i], sample, busy)
        gain_s = sum(max(busy[way]) - max(one) for way, one in after.items())
        work_s = sum(one[_ENCODER] - busy[way][_ENCODER] for way, one in after.items())
        if gain_s > MARGIN * work_s or (pays_alone and gain_s >= 0):
            busy.update(after)
            codecs[i] = sample
    return codecs


def channel_bound(profile: Profile, machine: Machine, offloaded: Placed) -> bool:
    """Whether transfers of bytes as they are keep a channel busy about as long as the network, or longer.

    If not, they hide behind it, and nothing is won by encoding: not even looking at codecs is due.

    Args:
        profile: What the network did, and how long it took.
        machine: How fast the tiers are.
        offloaded: What goes where.
    """
    busy = _busy(profile, machine, offloaded, [None] * len(offloaded))
    return any(max(one[2:]) > (1 - MARGIN) * one[_NETWORK] for one in busy.values())


def paper_s(profile: Profile, machine: Machine, placed: Placed, codecs: Codecs) -> float:
    """Seconds that all ways of all passes take on paper: the busiest machine of each."""
    return sum(max(one) for one in _busy(profile, machine, placed, codecs).values())


def windows_s(one: PassProfile, first_saved_ns: int) -> tuple[float, float]:
    """Seconds that a pass's forward and backward have, from the first save that is offloaded."""
    forward_s = max(0, one.backward_start_ns - first_saved_ns) / 1e9
    return forward_s, (one.end_ns - one.backward_start_ns) / 1e9


def _candidates(machine: Machine, placed: Placed) -> list[tuple[int, CodecSample, bool]]:
    """What could be encoded, in what order, how, and whether that pays alone."""
    found = []
    for i, (group, tier) in enumerate(placed):
        if group.codecs:
            alone = best(group.codecs, machine, tier)
            sample = alone or max(
                group.codecs, key=lambda s: (saved_per_work(s, machine, tier), s.codec)
            )
            found.append((-saved_per_work(sample, machine, tier), i, sample, alone is not None))
    found.sort(key=lambda one: one[:2])
    return [(i, sample, alone) for _, i, sample, alone in found]


def _busy(profile: Profile, machine: Machine, placed: Placed, codecs: Codecs) -> dict[_Way, _Busy]:
    """How busy each machine is in each way of each pass that offloads anything."""
    busy: dict[_Way, _Busy] = {}
    first_ns: dict[int, int] = {}
    for (group, tier), sample in zip(placed, codecs, strict=True):
        write, read = machine.bytes_per_s(tier)
        channel = _CHANNEL[tier]
        for slot in (profile.slots[i] for i in group.indices):
            nbytes, index = slot.key.nbytes, slot.pass_index
            moved = nbytes if sample is None else sample.encoded_bytes(nbytes)
            out = _way(busy, (index, _FORWARD))
            out[_ENCODER] += 0.0 if sample is None else sample.encode_s(nbytes)
            out[channel] += moved / write
            if slot.needed_at_ns is not None:
                back = _way(busy, (index, _BACKWARD))
                back[_ENCODER] += 0.0 if sample is None else sample.decode_s(nbytes)
                back[channel] += moved / read
            first_ns[index] = min(first_ns.get(index, slot.saved_at_ns), slot.saved_at_ns)
    for one in profile.passes:
        windows = windows_s(one, first_ns.get(one.index, 0))
        for direction, window_s in zip((_FORWARD, _BACKWARD), windows, strict=True):
            if (one.index, direction) in busy:
                busy[one.index, direction][_NETWORK] = window_s
    return busy


def _way(busy: dict[_Way, _Busy], way: _Way) -> _Busy:
    found = busy.get(way)
    if found is None:
        found = busy[way] = [0.0] * 4
    return found


def _encoded(
    profile: Profile,
    machine: Machine,
    each: tuple[Group, str],
    sample: CodecSample,
    busy: dict[_Way, _Busy],
) -> dict[_Way, _Busy]:
    """How busy each machine were, in the ways of one group, if that were encoded."""
    group, tier = each
    write, read = machine.bytes_per_s(tier)
    channel = _CHANNEL[tier]
    after: dict[_Way, _Busy] = {}
    for slot in (profile.slots[i] for i in group.indices):
        nbytes, index = slot.key.nbytes, slot.pass_index
        spared = nbytes - sample.encoded_bytes(nbytes)
        ways = [((index, _FORWARD), sample.encode_s(nbytes), spared / write)]
        if slot.needed_at_ns is not None:
            ways.append(((index, _BACKWARD), sample.decode_s(nbytes), spared / read))
        for way, work_s, spared_s in ways:
            then = after.get(way)
            if then is None:
                then = after[way] = list(busy[way])
            then[_ENCODER] += work_s
            then[channel] -= spared_s
    return after
