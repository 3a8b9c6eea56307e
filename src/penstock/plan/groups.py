"""Groups of slots that share one decision because their match keys are equal.

A step of several passes (accumulated micro-batches) saves the same slots in each. The runtime cannot tell
them apart, so a plan has one decision for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.units import round_up
from penstock.plan.profile import CodecSample, PassProfile, Profile, SlotProfile
from penstock.plan.slots import MatchKey, SlotKey

PAGE_BYTES: Final = 4096
FRAME_HEADER_BYTES: Final = 64
"""Bytes that encoding adds at worst: the header of a frame whose content did not shrink."""


@dataclass(frozen=True, slots=True)
class SlotGroup:
    """Slots of a profile with equal match keys."""

    key: SlotKey
    """Key of the slot that is saved first."""
    indices: tuple[int, ...]
    """Indices into the profile's slots."""
    nbytes: int
    """Most unencoded bytes of them that can be in a tier at once, in whole pages, as tiers hold them. See
    [Note: a tier's room is counted before encoding] (placement.py)."""
    longest_bytes: int
    """Most unencoded bytes of one of them, in whole pages."""
    idle_ns: int | None
    """Shortest time from save to need among them; None: none was ever needed."""
    held_elsewhere: bool
    """True if something else kept one of them alive."""
    codecs: tuple[CodecSample, ...] = ()
    """Samples of codecs measured on every slot: the worst ratio and the slowest speeds."""


def groups_of(profile: Profile) -> tuple[SlotGroup, ...]:
    """Return the groups of a profile, in the order in which they were first saved."""
    members: dict[MatchKey, list[int]] = {}
    for i, match in enumerate(profile.match_keys):
        members.setdefault(match, []).append(i)
    overlap = _overlap(profile.passes)
    return tuple(_group(profile, indices, overlap) for indices in members.values())


def need_order(profile: Profile, needs: Sequence[int] | None = None) -> tuple[SlotKey, ...]:
    """Return keys in the order in which backward first asked for them, one for each match key.

    Args:
        profile: The profile of the slots.
        needs: Indices of its slots in the order of need, if that is not ``profile.needs``.
    """
    needs = profile.needs if needs is None else needs
    keys = {profile.match_keys[i]: profile.slots[i].key for i in reversed(needs)}
    return tuple(keys.values())[::-1]


def _group(profile: Profile, indices: list[int], overlap: int) -> SlotGroup:
    slots = [profile.slots[i] for i in indices]
    per_pass: dict[int, int] = {}
    longest = 0
    for slot in slots:
        worst_bytes = slot.key.nbytes + (FRAME_HEADER_BYTES if slot.codecs else 0)
        pages_bytes = round_up(worst_bytes, PAGE_BYTES)
        per_pass[slot.pass_index] = per_pass.get(slot.pass_index, 0) + pages_bytes
        longest = max(longest, pages_bytes)
    idle = [slot.idle_ns for slot in slots if slot.idle_ns is not None]
    return SlotGroup(
        key=slots[0].key,
        indices=tuple(indices),
        nbytes=max(per_pass.values()) * min(overlap, len(per_pass)),
        longest_bytes=longest,
        idle_ns=min(idle) if idle else None,
        held_elsewhere=any(slot.held_elsewhere for slot in slots),
        codecs=_shared_codecs(slots),
    )


def _shared_codecs(slots: list[SlotProfile]) -> tuple[CodecSample, ...]:
    if len(slots) == 1 or not slots[0].codecs:
        return slots[0].codecs
    samples: dict[str, list[CodecSample]] = {}
    for sample in (sample for slot in slots for sample in slot.codecs):
        samples.setdefault(sample.codec, []).append(sample)
    return tuple(_worst(same) for same in samples.values() if len(same) == len(slots))


def _worst(samples: list[CodecSample]) -> CodecSample:
    return CodecSample(
        codec=samples[0].codec,
        ratio=max(sample.ratio for sample in samples),
        encode_bytes_per_s=min(sample.encode_bytes_per_s for sample in samples),
        decode_bytes_per_s=min(sample.decode_bytes_per_s for sample in samples),
    )


def _overlap(passes: tuple[PassProfile, ...]) -> int:
    """Return the largest number of passes alive at once."""
    changes = sorted(
        change
        for one in passes
        for change in ((one.start_ns, 1), (max(one.end_ns, one.start_ns + 1), -1))
    )
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most
