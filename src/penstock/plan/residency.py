"""Resident bytes when some slots are offloaded and some recomputed.

[Note: what counts against the device budget]
    Kept storages from their save until the backward node that uses them is done; offloaded storages
    until their write is done, and again from the start of their read until their node is done;
    recomputed ones until the forward of their module is over, and from its recomputation until their own
    node is done; storages below the floor. The runtime can wait for writes (in ``pack``) and give up
    prefetches (they are a guess, and are dropped for a demand read). It cannot give up kept bytes, bytes
    that a node is using, or bytes that a recomputed module makes; those of the module's inputs that had
    been freed are read once more, and stay until everything that it made is freed. ``hard_bytes`` is the
    smallest budget that a plan can run in. Offloading one more slot of n bytes removes n kept bytes and
    adds at most n bytes in use, so hard_bytes never grows: if offloading everything does not fit, no
    choice of offloads does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.plan.arrays import Integers, StepArrays
from penstock.plan.profile import Event, Profile

Mask = bytearray
"""Decision per slot of the profile: ``KEPT``, ``OFFLOADED`` or ``RECOMPUTED``."""
KEPT: Final = 0
OFFLOADED: Final = 1
RECOMPUTED: Final = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """One recomputed module in one pass: slots recomputed together, by index."""

    slots: tuple[int, ...]
    """Slots that it recomputes and backward asks for."""
    inputs: tuple[int, ...]
    """Slots that it reads and did not make: they must be on the device while it is recomputed."""
    drops: tuple[tuple[int, int], ...]
    """(step, slot): the step before which a slot is dropped, when its module's forward is over."""


@dataclass(frozen=True, slots=True)
class ResidencyModel:
    """Device memory that a choice of offloaded and recomputed slots needs."""

    hard_bytes: int
    """Smallest device budget that it runs in, however long the waits."""
    worst: int
    """Index of the slot at which ``hard_bytes`` is reached; -1 in an empty profile."""
    kept_bytes: int
    """Most bytes kept when backward asks for a slot."""
    working_bytes: int
    """Most offloaded bytes that one node of backward uses at once."""


@dataclass
class Returned:
    """Slots that have returned to the device during a walk over the profile's events."""

    sizes: Sequence[int]
    mask: Mask
    segments: Sequence[Segment] = ()
    read: int = 0
    """Bytes that were read back and are in use."""
    made: int = 0
    """Bytes that were recomputed and are in use, or will be."""
    _resident: bytearray = field(init=False)
    _freed: bytearray = field(init=False)
    _once_more: dict[Segment, tuple[int, int]] = field(init=False, default_factory=dict)
    """(slots that are not freed yet, bytes of inputs that were read once more), by segment."""
    _segment_of: dict[int, Segment] = field(init=False)

    def __post_init__(self) -> None:
        self._resident = bytearray(len(self.mask))
        self._freed = bytearray(len(self.mask))
        self._segment_of = {i: one for one in self.segments for i in one.slots}

    def use(self, i: int) -> list[int]:
        """Bring slot ``i`` back with all that comes with it, and return the slots that are read."""
        if self.mask[i] == KEPT or self._resident[i]:
            return []
        if self.mask[i] == OFFLOADED:
            arrived = [i]
        else:
            segment = self._segment_of[i]
            offloaded = [
                j for j in segment.inputs if self.mask[j] == OFFLOADED and not self._resident[j]
            ]
            arrived = [j for j in offloaded if not self._freed[j]]
            again = sum(self.sizes[j] for j in offloaded if self._freed[j])
            self._once_more[segment] = len(segment.slots), again
            self.read += again
            for j in segment.slots:
                self._resident[j] = 1
                self.made += self.sizes[j]
        for j in arrived:
            self._resident[j] = 1
            self.read += self.sizes[j]
        return arrived

    def resident(self) -> list[int]:
        """Return the slots that are on the device again."""
        return [i for i, resident in enumerate(self._resident) if resident]

    def free(self, i: int) -> None:
        """Free slot ``i``: the node that used it is done."""
        self._freed[i] = 1
        if not self._resident[i]:
            return
        self._resident[i] = 0
        if self.mask[i] == OFFLOADED:
            self.read -= self.sizes[i]
            return
        self.made -= self.sizes[i]
        segment = self._segment_of[i]
        left, again = self._once_more.pop(segment)
        if left > 1:
            self._once_more[segment] = left - 1, again
        else:
            self.read -= again


@dataclass(frozen=True, slots=True, eq=False)
class ResidentBytes:
    """Bytes on the device at each event, or per slot where the field says so."""

    fate: npt.NDArray[np.uint8]
    """Decision for the event's slot."""
    kept: Integers
    """Bytes kept, or not dropped yet."""
    made: Integers
    """Bytes recomputed that are in use or will be."""
    small: Integers
    """Bytes below the floor beside the slot, or while its module is recomputed."""
    read: Integers
    """Bytes read back and in use."""
    comes: Integers
    """Event per slot that first asks for it, directly or as an input of a recomputed module; the number
    of events if none does, or if it is not offloaded."""

    @property
    def stays(self) -> Integers:
        """Bytes that were not read back."""
        return self.kept + self.made + self.small


def residency(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> ResidencyModel:
    """Return the memory needed with some slots offloaded, and those of ``segments`` recomputed."""
    steps, floor = profile.arrays, profile.small_bytes
    if not steps.count:
        return ResidencyModel(floor, -1, floor, 0)
    found = flow(profile, mask, segments)
    fate, stays, read = found.fate, found.stays, found.read
    need = stays + read + np.where((fate == OFFLOADED) & steps.save, steps.nbytes, 0)
    need[steps.free] = 0
    at = int(np.argmax(need))
    return ResidencyModel(
        hard_bytes=max(floor, int(need[at])),
        worst=int(steps.slot[at]) if need[at] > floor else -1,
        kept_bytes=int(np.max(stays, initial=floor, where=steps.use)),
        working_bytes=int(np.max(read, initial=0, where=steps.use & (fate != KEPT))),
    )


def flow(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> ResidentBytes:
    """Return the bytes on the device at every event: a vectorized ``Returned``."""
    steps, by_slot = profile.arrays, np.frombuffer(mask, np.uint8)
    fate = by_slot[steps.slot]
    staying = np.where(fate == KEPT, steps.nbytes, 0)
    kept = staying * steps.save - staying * steps.free
    if not segments:
        gone = np.where((fate == OFFLOADED) & steps.needed, steps.nbytes, 0)
        comes = np.where(by_slot == OFFLOADED, steps.use_place, steps.count)
        read = np.cumsum(gone * steps.use - gone * steps.free)
        return ResidentBytes(fate, np.cumsum(kept), np.zeros_like(kept), steps.small, read, comes)
    kept += np.where((fate == RECOMPUTED) & steps.save, steps.nbytes, 0)
    kept -= _dropped(steps, segments)
    made, small = np.cumsum(_made(steps, segments)), _small_beside(steps, segments)
    read, comes = _read(steps, by_slot, segments)
    return ResidentBytes(fate, np.cumsum(kept), made, small, np.cumsum(read), comes)


def _dropped(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    """Return the bytes dropped before each event."""
    found = np.zeros(steps.count + 1, np.int64)
    drops = np.array([drop for one in segments for drop in one.drops], np.int64).reshape(-1, 2)
    np.add.at(found, np.minimum(drops[:, 0], steps.count), steps.sizes[drops[:, 1]])
    return found[:-1]


def _made(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    """Return the change of recomputed bytes at each event: segments add at once, and free singly."""
    found = np.zeros(steps.count + 1, np.int64)
    again = np.array([i for one in segments for i in one.slots], np.int64)
    begins = np.repeat(first_uses(steps, segments), [len(one.slots) for one in segments])
    np.add.at(found, begins, steps.sizes[again])
    np.subtract.at(found, steps.free_place[again], steps.sizes[again])
    return found[:-1]


def _read(
    steps: StepArrays, by_slot: npt.NDArray[np.uint8], segments: Sequence[Segment]
) -> tuple[Integers, Integers]:
    """Return the change of bytes read back at each event, and the event at which each slot returns."""
    never, found = steps.count, np.zeros(steps.count + 1, np.int64)
    gone = by_slot == OFFLOADED
    inputs = np.array([i for one in segments for i in one.inputs], np.int64)
    begins = np.repeat(first_uses(steps, segments), [len(one.inputs) for one in segments])
    ends = np.repeat(_last_frees(steps, segments), [len(one.inputs) for one in segments])
    those = gone[inputs] & (begins < never)
    inputs, begins, ends = inputs[those], begins[those], ends[those]
    comes = np.where(gone, steps.use_place, never)
    late = begins > steps.free_place[inputs]
    np.minimum.at(comes, inputs[~late], begins[~late])
    there = comes < never
    np.add.at(found, comes, steps.sizes)
    np.subtract.at(found, steps.free_place[there], steps.sizes[there])
    np.add.at(found, begins[late], steps.sizes[inputs[late]])
    np.subtract.at(found, ends[late], steps.sizes[inputs[late]])
    return found[:-1], comes


def first_uses(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    """Return the event at which each segment is recomputed; the number of events if it never is."""
    return np.array([_first_use(steps, one) for one in segments], np.int64)


def _last_frees(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    places = steps.free_place.item
    return np.array([max(map(places, one.slots), default=0) for one in segments], np.int64)


def _first_use(steps: StepArrays, segment: Segment) -> int:
    return min(map(steps.use_place.item, segment.slots), default=steps.count)


def resident_at(
    profile: Profile, mask: Mask, segments: Sequence[Segment], hard_bytes: int
) -> list[int]:
    """Return the slots resident when ``hard_bytes`` are first reached; none if they never are."""
    sizes = [slot.key.nbytes for slot in profile.slots]
    small = small_beside(profile, segments)
    drops = deque(sorted(drop for one in segments for drop in one.drops))
    back = Returned(sizes, mask, segments)
    resident: set[int] = set()
    kept = 0
    for place, (_, event, i) in enumerate(profile.steps):
        while drops and drops[0][0] <= place:
            resident.discard(drops[0][1])
            kept -= sizes[drops.popleft()[1]]
        if event is Event.FREE:
            back.free(i)
            kept -= 0 if mask[i] else sizes[i]
            resident.discard(i)
            continue
        if event is Event.USE:
            back.use(i)
        staying = kept + (sizes[i] if event is Event.SAVE else 0)
        if staying + back.read + back.made + small[place] == hard_bytes:
            return sorted({*resident, *back.resident(), i})
        if event is Event.SAVE and mask[i] != OFFLOADED:
            resident.add(i)
            kept += sizes[i]
    return []


def small_beside(profile: Profile, segments: Sequence[Segment]) -> Sequence[int]:
    """Return the bytes beside each event's slot; recomputing a module takes as much as its first run."""
    found: list[int] = _small_beside(profile.arrays, segments).tolist()
    return found


def _small_beside(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    again = [one.slots for one in segments if one.slots]
    if not again:
        return steps.small
    each = np.array([i for slots in again for i in slots], np.int64)
    counts = [len(slots) for slots in again]
    most = np.maximum.reduceat(steps.small_at_save[each], np.cumsum([0, *counts[:-1]]))
    took = np.zeros(len(steps.sizes), np.int64)
    took[each] = np.repeat(most, counts)
    return np.where(steps.save, steps.small, np.maximum(steps.small, took[steps.slot]))


def saved_in_backward_bytes(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> int:
    """Return the most bytes kept, recomputed or just saved while a backward still has slots to read.

    Recomputed modules, segments that the program itself recomputes, and overlapping passes save then.
    Prefetches leave this much room, because they would only be dropped again.
    """
    if not segments and not _saves_in_backward(profile):
        return profile.small_bytes
    sizes = [slot.key.nbytes for slot in profile.slots]
    needed = [slot.needed_at_ns is not None for slot in profile.slots]
    kept = most = profile.small_bytes
    back = Returned(sizes, mask, segments)
    to_read = dict.fromkeys((one.index for one in profile.passes), 0)
    begun: set[int] = set()
    drops = deque(sorted(drop for one in segments for drop in one.drops))
    for place, (_, event, i) in enumerate(profile.steps):
        while drops and drops[0][0] <= place:
            kept -= sizes[drops.popleft()[1]]
        index = profile.slots[i].pass_index
        reading = any(to_read[one] for one in begun)
        if event is Event.SAVE:
            most = max(most, kept + back.made + sizes[i]) if reading else most
            kept += 0 if mask[i] == OFFLOADED else sizes[i]
            to_read[index] += mask[i] == OFFLOADED and needed[i]
        elif event is Event.USE:
            begun.add(index)
            arrived = back.use(i)
            for j in arrived:
                to_read[profile.slots[j].pass_index] -= needed[j]
            most = max(most, kept + back.made) if back.made and reading else most
        else:
            back.free(i)
            kept -= 0 if mask[i] else sizes[i]
    return most


def _saves_in_backward(profile: Profile) -> bool:
    events = [event for _, event, _ in profile.steps]
    return Event.USE in events and Event.SAVE in events[events.index(Event.USE) :]
