"""Codec choice for all offloaded slots, where transfers overlap with the network and each other.

The network, the encoder (one thread for all slots and tiers) and each tier's channel form a pipeline:
while one slot is encoded, another is being written and a third computed. So on paper one phase of a
pass, its forward or its backward, takes as long as the busiest stage. Slots are considered in the order
of channel time saved per second of codec work, and a slot is encoded

1. if its codec pays even with nothing overlapping (``encoding.best``), and the pass takes no longer;
2. or, while its channel is the busiest, if the pass becomes shorter by ``MARGIN`` of the codec's time.

So the encoder never becomes a worse bottleneck than the channel was, and a step is never slower on paper
than without codecs.

For the host tier of a device only the first rule counts. Frames share the link with whole storages, and
wait there for all copies that were enqueued before them, on whichever stream, so that encoding and
copying do not overlap: on an H100 a step of ResNet-50 took 0.80 s, instead of the 0.50 s foretold, with
codecs chosen by the second rule, and 0.48 s without.

What staging memory holds when forward ends need not pass flash, neither way: flash is counted as busy for
the other bytes only.

FlashNeuron (FAST 2021) has a phase 2 of the same purpose: if transfers do not fit in the forward pass,
compressible tensors are offloaded in place of others, until they fit. It assumes ratios and ignores
reads; here ratios, the encoder and both directions are measured. The policy chooses which slots are
offloaded (``auto`` ranks by the encoded transfer); this module chooses how they are encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from penstock.plan.encoding import MARGIN, best, saved_per_work
from penstock.plan.groups import SlotGroup
from penstock.plan.machine import Machine
from penstock.plan.profile import CodecSample, PassProfile, Profile

Placed: TypeAlias = Sequence[tuple[SlotGroup, str]]
"""Offloaded groups, each with its tier."""
Codecs: TypeAlias = list[CodecSample | None]
"""Codec sample of each of them; None: not encoded."""

_FORWARD: Final = 0
_BACKWARD: Final = 1
_Phase: TypeAlias = tuple[int, int]
"""(index of the pass, forward or backward)."""
_Busy: TypeAlias = list[float]
"""Seconds for which each stage is busy: the network, the encoder, and the channels of the tiers."""
_NETWORK: Final = 0
_ENCODER: Final = 1
_CHANNEL: Final = {"flash": 2, "host": 3}


def choose(profile: Profile, machine: Machine, placed: Placed, staging_bytes: int = 0) -> Codecs:
    """Choose the codec of each offloaded group. Pure.

    Args:
        profile: The step.
        machine: The tiers' speeds.
        placed: The offloaded groups with their tiers.
        staging_bytes: Memory on the way to flash; what it holds when forward ends need not pass flash.
    """
    codecs: Codecs = [None] * len(placed)
    candidates = _candidates(machine, placed, on_device=profile.device != "cpu")
    busy = _busy(profile, machine, placed, codecs, staging_bytes) if candidates else {}
    for i, sample, pays_alone in candidates:
        after = _encoded(profile, machine, placed[i], sample, busy)
        gain_s = sum(max(busy[phase]) - max(one) for phase, one in after.items())
        work_s = sum(one[_ENCODER] - busy[phase][_ENCODER] for phase, one in after.items())
        if gain_s > MARGIN * work_s or (pays_alone and gain_s >= 0):
            busy.update(after)
            codecs[i] = sample
    return codecs


def channel_bound(
    profile: Profile, machine: Machine, offloaded: Placed, staging_bytes: int = 0
) -> bool:
    """Return True if unencoded transfers keep a channel busy about as long as the network, or longer.

    If not, they overlap with compute entirely and codecs gain nothing, so sampling them is not worth it.

    Args:
        profile: The step.
        machine: The tiers' speeds.
        offloaded: The offloaded groups with their tiers.
        staging_bytes: Memory on the way to flash.
    """
    busy = _busy(profile, machine, offloaded, [None] * len(offloaded), staging_bytes)
    return any(max(one[2:]) > (1 - MARGIN) * one[_NETWORK] for one in busy.values())


def windows_s(one: PassProfile, first_saved_ns: int) -> tuple[float, float]:
    """Return the seconds of a pass's forward and backward, from the first offloaded save."""
    forward_s = max(0, one.backward_start_ns - first_saved_ns) / 1e9
    return forward_s, (one.end_ns - one.backward_start_ns) / 1e9


def _candidates(
    machine: Machine, placed: Placed, *, on_device: bool
) -> list[tuple[int, CodecSample, bool]]:
    """List (index, sample, pays alone) of the slots that could be encoded, most promising first."""
    found = []
    for i, (group, tier) in enumerate(placed):
        if group.codecs:
            alone = best(group.codecs, machine, tier)
            if alone is None and on_device and tier == "host":
                continue
            sample = alone or max(
                group.codecs, key=lambda s: (saved_per_work(s, machine, tier), s.codec)
            )
            found.append((-saved_per_work(sample, machine, tier), i, sample, alone is not None))
    found.sort(key=lambda one: one[:2])
    return [(i, sample, alone) for _, i, sample, alone in found]


def _busy(
    profile: Profile,
    machine: Machine,
    placed: Placed,
    codecs: Codecs,
    staging_bytes: int = 0,
) -> dict[_Phase, _Busy]:
    """Return how busy each stage is in each phase of each pass that offloads anything.

    Flash is less than idle where staging memory could hold more.
    """
    busy: dict[_Phase, _Busy] = {}
    first_ns: dict[int, int] = {}
    for (group, tier), sample in zip(placed, codecs, strict=True):
        write, read = machine.bytes_per_s(tier)
        channel = _CHANNEL[tier]
        for slot in (profile.slots[i] for i in group.indices):
            nbytes, index = slot.key.nbytes, slot.pass_index
            moved = nbytes if sample is None else sample.encoded_bytes(nbytes)
            out = _entry(busy, (index, _FORWARD))
            out[_ENCODER] += 0.0 if sample is None else sample.encode_s(nbytes)
            out[channel] += moved / write
            if slot.needed_at_ns is not None:
                back = _entry(busy, (index, _BACKWARD))
                back[_ENCODER] += 0.0 if sample is None else sample.decode_s(nbytes)
                back[channel] += moved / read
            first_ns[index] = min(first_ns.get(index, slot.saved_at_ns), slot.saved_at_ns)
    for one in profile.passes:
        windows = windows_s(one, first_ns.get(one.index, 0))
        speeds = machine.bytes_per_s("flash")
        phases = zip((_FORWARD, _BACKWARD), windows, speeds, strict=True)
        for direction, window_s, bytes_per_s in phases:
            if (one.index, direction) in busy:
                busy[one.index, direction][_NETWORK] = window_s
                busy[one.index, direction][_CHANNEL["flash"]] -= staging_bytes / bytes_per_s
    return busy


def _entry(busy: dict[_Phase, _Busy], phase: _Phase) -> _Busy:
    found = busy.get(phase)
    if found is None:
        found = busy[phase] = [0.0] * 4
    return found


def _encoded(
    profile: Profile,
    machine: Machine,
    each: tuple[SlotGroup, str],
    sample: CodecSample,
    busy: dict[_Phase, _Busy],
) -> dict[_Phase, _Busy]:
    """Return how busy each stage would be, in the phases of one group, if it were encoded."""
    group, tier = each
    write, read = machine.bytes_per_s(tier)
    channel = _CHANNEL[tier]
    after: dict[_Phase, _Busy] = {}
    for slot in (profile.slots[i] for i in group.indices):
        nbytes, index = slot.key.nbytes, slot.pass_index
        spared = nbytes - sample.encoded_bytes(nbytes)
        changes = [((index, _FORWARD), sample.encode_s(nbytes), spared / write)]
        if slot.needed_at_ns is not None:
            changes.append(((index, _BACKWARD), sample.decode_s(nbytes), spared / read))
        for phase, work_s, spared_s in changes:
            then = after.get(phase)
            if then is None:
                then = after[phase] = list(busy[phase])
            then[_ENCODER] += work_s
            then[channel] -= spared_s
    return after
