"""Read window: the bytes that reads may run ahead of backward."""

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
    ResidencyModel,
    Segment,
    saved_in_backward_bytes,
)

SLACK: Final = 4
"""Factor on the read-ahead that would hide reads on paper, while memory is free: bandwidth varies, and
compute and reads share a machine. A larger one only makes more bytes resident."""


def windows(
    profile: Profile,
    mask: Mask,
    machine: Machine,
    device_bytes: int,
    need: ResidencyModel,
    *,
    codecs: SlotCodecs = AS_THEY_ARE,
    segments: Sequence[Segment] = (),
) -> tuple[int, int]:
    """Return the read window of a plan, at least the bytes of one node, and its largest useful size.

    The budget holds without it, because reads take only free memory. At the beginning of backward that
    is everything but the kept bytes; it grows as the kept tail is used up. With a window beyond the
    largest useful size, bytes saved or recomputed in backward would have to evict what was read.
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
    """Return the sizes of the offloaded slots that backward asks for."""
    sizes, places = profile.arrays.sizes, profile.arrays.use_place
    those = (np.frombuffer(mask, np.uint8) == OFFLOADED) & (places < profile.arrays.count)
    found: list[int] = sizes[those].tolist()
    return found


def least_window(sizes: list[int], working_bytes: int) -> int:
    """Return the bytes to use a slot while the next is read: twice the largest, or one node's if more.

    Args:
        sizes: Sizes of the slots that are read back (``returning``).
        working_bytes: Most offloaded bytes that one node uses at once.
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
    """Return the bytes that reads must run ahead of backward so that it never waits for one.

    It walks backward from its end: a read ends at the latest when its slot is needed and when the next
    read must begin. The result is the most bytes that are read but not yet used at any time. An encoded
    slot takes the time of reading its frame and decoding it, but all of its bytes. The walk stops early
    once the result is ``enough_bytes`` or more.
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
