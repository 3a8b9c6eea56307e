"""How many bytes are resident when some slots are offloaded, and some made again.

[Note: what counts against the device budget]
    Kept storages from their save until the backward node that uses them is done; offloaded storages
    until their write is done, and again from the start of their read until their node is done;
    recomputed ones until the forward of their module is over, and from when it is run again until their
    own node is done; storages below the floor. Of these the runtime can wait for writes (in ``pack``)
    and do without reads ahead (they are a guess, and are dropped for a demand). It cannot do without
    what is kept, what a node is using, nor what a module that is run again makes; of its inputs those
    that had been freed come once more, and stay until all that it made is freed. ``hard_bytes`` is
    the least budget that a plan can run in. Offloading one more slot of n bytes takes n from what is
    kept and adds at most n to what is in use, so hard_bytes never grows: if offloading everything does
    not fit, no choice of offloads does.
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
"""For each slot of the profile, what becomes of it: ``KEPT``, ``OFFLOADED`` or ``RECOMPUTED``."""
KEPT: Final = 0
OFFLOADED: Final = 1
RECOMPUTED: Final = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """One recomputed module in one pass: what is made again together. By index into the slots."""

    slots: tuple[int, ...]
    """What it makes again, and backward asks for."""
    inputs: tuple[int, ...]
    """Slots made outside of it that it reads: they must be on the device while it is run again."""
    drops: tuple[tuple[int, int], ...]
    """(step, slot): before which step a slot is dropped; until its module's forward is over, it stays."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The bytes that a choice of offloaded and recomputed slots needs."""

    hard_bytes: int
    """The least device budget that it runs in, whatever the waits."""
    worst: int
    """Index of the slot at which ``hard_bytes`` is reached; -1 in an empty profile."""
    kept_bytes: int
    """The most that is kept when a backward pass asks for something."""
    working_bytes: int
    """The most offloaded bytes that one node of backward uses at once."""


@dataclass
class Returned:
    """Which slots are on the device again, as a walk over the profile's steps goes on."""

    sizes: Sequence[int]
    mask: Mask
    segments: Sequence[Segment] = ()
    read: int = 0
    """Bytes that were read back and are in use."""
    made: int = 0
    """Bytes that were computed again and are in use, or will be."""
    _here: bytearray = field(init=False)
    _freed: bytearray = field(init=False)
    _once_more: dict[Segment, tuple[int, int]] = field(init=False, default_factory=dict)
    """(how many slots of it are not freed yet, bytes of inputs that came once more)."""
    _segment_of: dict[int, Segment] = field(init=False)

    def __post_init__(self) -> None:
        self._here = bytearray(len(self.mask))
        self._freed = bytearray(len(self.mask))
        self._segment_of = {i: one for one in self.segments for i in one.slots}

    def use(self, i: int) -> list[int]:
        """Slot ``i`` is asked for: bring it, and what comes with it. Says which come by a read."""
        if self.mask[i] == KEPT or self._here[i]:
            return []
        if self.mask[i] == OFFLOADED:
            arrived = [i]
        else:
            segment = self._segment_of[i]
            away = [j for j in segment.inputs if self.mask[j] == OFFLOADED and not self._here[j]]
            arrived = [j for j in away if not self._freed[j]]
            again = sum(self.sizes[j] for j in away if self._freed[j])
            self._once_more[segment] = len(segment.slots), again
            self.read += again
            for j in segment.slots:
                self._here[j] = 1
                self.made += self.sizes[j]
        for j in arrived:
            self._here[j] = 1
            self.read += self.sizes[j]
        return arrived

    def here(self) -> list[int]:
        """The slots that are."""
        return [i for i, here in enumerate(self._here) if here]

    def free(self, i: int) -> None:
        """The node that used slot ``i`` is done with it."""
        self._freed[i] = 1
        if not self._here[i]:
            return
        self._here[i] = 0
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
class Flow:
    """Bytes on the device, step by step, but where it says by slot."""

    fate: npt.NDArray[np.uint8]
    """What becomes of the slot that the step is about."""
    kept: Integers
    """Kept, or not dropped yet."""
    made: Integers
    """Made again, and in use or yet to be."""
    small: Integers
    """Beside the slot, and what running its module again took."""
    read: Integers
    """Read back, and in use."""
    comes: Integers
    """By slot, the step that first asks for it, by itself or as an input of what is run again; after
    all steps, if none does, or it is not offloaded."""

    @property
    def stays(self) -> Integers:
        """What no read has brought."""
        return self.kept + self.made + self.small


def residency(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> Residency:
    """What the profile's steps need with some slots offloaded, and those of ``segments`` recomputed."""
    steps, floor = profile.arrays, profile.small_bytes
    if not steps.count:
        return Residency(floor, -1, floor, 0)
    found = flow(profile, mask, segments)
    fate, stays, read = found.fate, found.stays, found.read
    need = stays + read + np.where((fate == OFFLOADED) & steps.save, steps.nbytes, 0)
    need[steps.free] = 0
    at = int(np.argmax(need))
    return Residency(
        hard_bytes=max(floor, int(need[at])),
        worst=int(steps.slot[at]) if need[at] > floor else -1,
        kept_bytes=int(np.max(stays, initial=floor, where=steps.use)),
        working_bytes=int(np.max(read, initial=0, where=steps.use & (fate != KEPT))),
    )


def flow(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> Flow:
    """Go through the profile's steps: as ``Returned`` does one by one, all at once."""
    steps, by_slot = profile.arrays, np.frombuffer(mask, np.uint8)
    fate = by_slot[steps.slot]
    here = np.where(fate == KEPT, steps.nbytes, 0)
    kept = here * steps.save - here * steps.free
    if not segments:
        gone = np.where((fate == OFFLOADED) & steps.needed, steps.nbytes, 0)
        comes = np.where(by_slot == OFFLOADED, steps.use_place, steps.count)
        read = np.cumsum(gone * steps.use - gone * steps.free)
        return Flow(fate, np.cumsum(kept), np.zeros_like(kept), steps.small, read, comes)
    kept += np.where((fate == RECOMPUTED) & steps.save, steps.nbytes, 0)
    kept -= _dropped(steps, segments)
    made, small = np.cumsum(_made(steps, segments)), _small_beside(steps, segments)
    read, comes = _read(steps, by_slot, segments)
    return Flow(fate, np.cumsum(kept), made, small, np.cumsum(read), comes)


def _dropped(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    """What goes before each step of what was saved."""
    found = np.zeros(steps.count + 1, np.int64)
    drops = np.array([drop for one in segments for drop in one.drops], np.int64).reshape(-1, 2)
    np.add.at(found, np.minimum(drops[:, 0], steps.count), steps.sizes[drops[:, 1]])
    return found[:-1]


def _made(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    """What each step adds to what was made again: all of a segment at once, and off one by one."""
    found = np.zeros(steps.count + 1, np.int64)
    again = np.array([i for one in segments for i in one.slots], np.int64)
    begins = np.repeat(first_uses(steps, segments), [len(one.slots) for one in segments])
    np.add.at(found, begins, steps.sizes[again])
    np.subtract.at(found, steps.free_place[again], steps.sizes[again])
    return found[:-1]


def _read(
    steps: StepArrays, by_slot: npt.NDArray[np.uint8], segments: Sequence[Segment]
) -> tuple[Integers, Integers]:
    """What each step adds to what was read back; and by slot, when it first comes."""
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
    """By segment, the step at which it is run again; after all steps, if it never is."""
    return np.array([_first_use(steps, one) for one in segments], np.int64)


def _last_frees(steps: StepArrays, segments: Sequence[Segment]) -> Integers:
    places = steps.free_place.item
    return np.array([max(map(places, one.slots), default=0) for one in segments], np.int64)


def _first_use(steps: StepArrays, segment: Segment) -> int:
    return min(map(steps.use_place.item, segment.slots), default=steps.count)


def resident_at(
    profile: Profile, mask: Mask, segments: Sequence[Segment], hard_bytes: int
) -> list[int]:
    """The slots that are on the device when ``hard_bytes`` are first reached; none if they never are."""
    sizes = [slot.key.nbytes for slot in profile.slots]
    small = small_beside(profile, segments)
    drops = deque(sorted(drop for one in segments for drop in one.drops))
    back = Returned(sizes, mask, segments)
    there: set[int] = set()
    kept = 0
    for place, (_, event, i) in enumerate(profile.steps):
        while drops and drops[0][0] <= place:
            there.discard(drops[0][1])
            kept -= sizes[drops.popleft()[1]]
        if event is Event.FREE:
            back.free(i)
            kept -= 0 if mask[i] else sizes[i]
            there.discard(i)
            continue
        if event is Event.USE:
            back.use(i)
        here = kept + (sizes[i] if event is Event.SAVE else 0)
        if here + back.read + back.made + small[place] == hard_bytes:
            return sorted({*there, *back.here(), i})
        if event is Event.SAVE and mask[i] != OFFLOADED:
            there.add(i)
            kept += sizes[i]
    return []


def small_beside(profile: Profile, segments: Sequence[Segment]) -> Sequence[int]:
    """Bytes beside the slot of each step; running a module again takes what running it took."""
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
    """The most that is kept, made again or just saved while some backward still has slots to read.

    Modules run again, segments that the program itself recomputes, and overlapping passes save then.
    Reads that run ahead leave this much room, for what they read would only be dropped again.
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
