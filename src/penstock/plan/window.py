"""How far reads run ahead of backward: the bytes that targets of reads may take together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from penstock.plan.encoding import AS_THEY_ARE, SlotCodecs
from penstock.plan.machine import Machine
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.residency import (
    OFFLOADED,
    Mask,
    Residency,
    Segment,
    saved_in_backward_bytes,
)

SLACK: Final = 4
"""How many times further reads may run ahead than would hide them on paper, while memory is free:
bandwidth varies, and compute and reads share a machine. Further only makes more resident."""


def windows(
    profile: Profile,
    mask: Mask,
    machine: Machine,
    device_bytes: int,
    need: Residency,
    *,
    codecs: SlotCodecs = AS_THEY_ARE,
    segments: Sequence[Segment] = (),
) -> tuple[int, int]:
    """The window of a plan: at least what one node uses, else as far as is useful; and the widest.

    The budget holds at every moment without it, because reads take only what is free then. At the
    beginning of backward that is what is not kept; it grows as the kept tail is used up. Beyond the
    widest, what is saved or made again in backward would find no room but that of what was read.
    """
    sizes = returning(profile, mask)
    useful = SLACK * least_window(sizes, need.working_bytes)
    useful = max(useful, device_bytes - need.kept_bytes)
    most = min(sum(sizes), device_bytes - saved_in_backward_bytes(profile, mask, segments))
    if useful < most:
        enough = -(-most // SLACK)
        ahead = read_ahead_bytes(profile, mask, machine, codecs, enough_bytes=enough)
        useful = max(useful, SLACK * ahead)
    widest = min(sum(sizes), max(need.working_bytes, most))
    return min(widest, max(need.working_bytes, useful)), widest


def returning(profile: Profile, mask: Mask) -> list[int]:
    """Sizes of the offloaded slots that backward asks for."""
    sizes, places = profile.arrays.sizes, profile.arrays.use_place
    those = (np.frombuffer(mask, np.uint8) == OFFLOADED) & (places < profile.arrays.count)
    found: list[int] = sizes[those].tolist()
    return found


def least_window(sizes: list[int], working_bytes: int) -> int:
    """Room to use a slot while the next is read: twice the largest, or one node's if more.

    Args:
        sizes: Of the slots that are read back (``returning``).
        working_bytes: The most that one node uses at once.
    """
    return max(working_bytes, min(2 * max(sizes, default=0), sum(sizes)))


def read_ahead_bytes(
    profile: Profile,
    mask: Mask,
    machine: Machine,
    codecs: SlotCodecs = AS_THEY_ARE,
    *,
    enough_bytes: float = math.inf,
) -> int:
    """How far reads must run ahead of backward so that it never waits for one, in device memory.

    Walks backward from its end: a read ends at the latest when its slot is needed and when the next
    read must begin. What is then read but not yet used, at the worst moment, is the depth: of an encoded
    slot the time is that of what its tier holds and of decoding it, but the memory is all of it.
    Where that is ``enough_bytes`` or more, the walk ends, and it is not said how much more.
    """
    latency_bytes = machine.flash_latency_s * machine.flash_read_bytes_per_s
    ahead_s = ahead_bytes = worst_bytes = 0.0
    later_ns = later_pass = -1
    slots, read_s = profile.slots, machine.read_s
    for i in reversed(profile.needs):
        if mask[i] != OFFLOADED:
            continue
        slot = slots[i]
        nbytes, need_ns = slot.key.nbytes, slot.needed_at_ns
        assert need_ns is not None
        if slot.pass_index != later_pass:
            ahead_s, later_pass, later_ns = 0.0, slot.pass_index, need_ns
        left_s = ahead_s - (later_ns - need_ns) / 1e9
        left_bytes = ahead_bytes * (left_s / ahead_s) if left_s > 0 else 0.0
        back_s = _back_s(nbytes, machine, codecs.get(i)) if codecs else read_s(nbytes)
        ahead_s = left_s + back_s if left_s > 0 else back_s
        ahead_bytes = left_bytes + nbytes + latency_bytes
        later_ns = need_ns
        if ahead_bytes > worst_bytes:
            worst_bytes = ahead_bytes
            if worst_bytes >= enough_bytes:
                break
    return int(worst_bytes)


def _back_s(nbytes: int, machine: Machine, sample: CodecSample | None) -> float:
    if sample is None:
        return machine.read_s(nbytes)
    return machine.read_s(sample.encoded_bytes(nbytes)) + sample.decode_s(nbytes)
