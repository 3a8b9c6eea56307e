"""How many bytes are resident when some slots are offloaded, and how far reads must run ahead.

[Note: what counts against the device budget]
    Kept storages from their save until the backward node that uses them is done; offloaded storages
    until their write is done, and again from the start of their read until their node is done;
    storages below the floor. Of these the runtime can wait for writes (in ``pack``) and do without
    reads ahead (they are a guess, and are dropped for a demand). It cannot do without what is kept
    nor what a node is using: ``hard_bytes`` is the least budget that a plan can run in. Offloading
    one more slot of n bytes takes n from what is kept and adds at most n to what is in use, so
    hard_bytes never grows: if offloading everything does not fit, nothing does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.plan.machine import Machine
from penstock.plan.profile import Event, Profile

Mask = bytearray
"""For each slot of the profile, whether it is offloaded."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The bytes that a choice of offloaded slots needs."""

    hard_bytes: int
    """The least device budget that it runs in, whatever the waits."""
    worst: int
    """Index of the slot at which ``hard_bytes`` is reached; -1 in an empty profile."""
    kept_bytes: int
    """The most that is kept when a backward pass asks for something."""
    working_bytes: int
    """The most offloaded bytes that one node of backward uses at once."""


def residency(profile: Profile, offloaded: Mask) -> Residency:
    """Walk the profile with some slots offloaded."""
    sizes = [slot.key.nbytes for slot in profile.slots]
    returns = [slot.needed_at_ns is not None for slot in profile.slots]
    save, use = Event.SAVE, Event.USE  # looked up once, not in every turn of the loop
    kept, in_use = profile.small_bytes, 0
    hard, worst, most_kept, most_used = kept, -1, kept, 0
    for _, event, i in profile.steps:
        nbytes = sizes[i]
        need = 0
        if event is save:
            need = kept + in_use + nbytes
            if not offloaded[i]:
                kept += nbytes
        elif event is use:
            most_kept = max(most_kept, kept)
            if offloaded[i]:
                in_use += nbytes
                most_used = max(most_used, in_use)
            need = kept + in_use
        elif not offloaded[i]:
            kept -= nbytes
        elif returns[i]:
            in_use -= nbytes
        if need > hard:
            hard, worst = need, i
    return Residency(hard, worst, most_kept, most_used)


def returning(profile: Profile, offloaded: Mask) -> list[int]:
    """Sizes of the offloaded slots that backward asks for."""
    pairs = zip(profile.slots, offloaded, strict=True)
    return [slot.key.nbytes for slot, out in pairs if out and slot.needed_at_ns is not None]


def least_window(sizes: list[int], working_bytes: int) -> int:
    """Room to use a slot while the next is read: twice the largest, or one node's if more.

    Args:
        sizes: Of the slots that are read back (``returning``).
        working_bytes: The most that one node uses at once.
    """
    return max(working_bytes, min(2 * max(sizes, default=0), sum(sizes)))


def read_ahead_bytes(profile: Profile, offloaded: Mask, machine: Machine) -> int:
    """How far reads must run ahead of backward so that it never waits for one.

    Walks backward from its end: a read ends at the latest when its slot is needed and when the next
    read must begin. What is then read but not yet used, at the worst moment, is the depth.
    """
    depth_s = worst_s = 0.0
    later_ns = later_pass = -1
    for i in reversed(profile.needs):
        slot = profile.slots[i]
        if not offloaded[i] or slot.needed_at_ns is None:
            continue
        if slot.pass_index != later_pass:
            depth_s, later_pass, later_ns = 0.0, slot.pass_index, slot.needed_at_ns
        hidden_s = (later_ns - slot.needed_at_ns) / 1e9
        depth_s = machine.read_s(slot.key.nbytes) + max(0.0, depth_s - hidden_s)
        worst_s, later_ns = max(worst_s, depth_s), slot.needed_at_ns
    return int(worst_s * machine.flash_read_bytes_per_s)


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
