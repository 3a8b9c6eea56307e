"""How many bytes are resident when some slots are offloaded.

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

from dataclasses import dataclass

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
    kept = in_use = most_used = 0
    hard, worst, most_kept = profile.small_bytes, -1, profile.small_bytes
    small = profile.small_beside
    for _, event, i in profile.steps:
        nbytes = sizes[i]
        need = 0
        if event is save:
            need = kept + in_use + nbytes + small[i]
            if not offloaded[i]:
                kept += nbytes
        elif event is use:
            most_kept = max(most_kept, kept + small[i])
            if offloaded[i]:
                in_use += nbytes
                most_used = max(most_used, in_use)
            need = kept + in_use + small[i]
        elif not offloaded[i]:
            kept -= nbytes
        elif returns[i]:
            in_use -= nbytes
        if need > hard:
            hard, worst = need, i
    return Residency(hard, worst, most_kept, most_used)


def saved_in_backward_bytes(profile: Profile, offloaded: Mask) -> int:
    """The most that is kept or just saved at a save while some backward still has slots to read.

    Recomputed segments and overlapping passes save then. Reads that run ahead leave this much room,
    for what they read would only be dropped again.
    """
    kept = most = profile.small_bytes
    to_read: dict[int, int] = {}
    begun: set[int] = set()
    for _, event, i in profile.steps:
        slot = profile.slots[i]
        nbytes, index = slot.key.nbytes, slot.pass_index
        if event is Event.SAVE:
            if any(to_read.get(one) for one in begun):
                most = max(most, kept + nbytes)
            if not offloaded[i]:
                kept += nbytes
            elif slot.needed_at_ns is not None:
                to_read[index] = to_read.get(index, 0) + 1
        elif event is Event.USE:
            begun.add(index)
            if offloaded[i]:
                to_read[index] -= 1
        elif not offloaded[i]:
            kept -= nbytes
    return most
