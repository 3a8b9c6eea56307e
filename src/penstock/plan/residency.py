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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.plan.arrays import Flags, Integers, StepArrays
from penstock.plan.profile import Profile

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
    drops: tuple[tuple[int, int, int], ...]
    """(step, slot, time in ns): the step before which a slot is dropped, and the end of its module's
    forward."""
    took_ns: int = 0
    """Time to recompute it."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Stays:
    """Periods for which slots are on the device."""

    slot: Integers
    begin: Integers
    """First event of the period."""
    end: Integers
    """First event after it."""

    def bytes_at(self, steps: StepArrays) -> Integers:
        """Return the bytes of the slots on the device at each event."""
        found, sizes = np.zeros(steps.count + 1, np.int64), steps.sizes[self.slot]
        np.add.at(found, self.begin, sizes)
        np.subtract.at(found, self.end, sizes)
        return np.cumsum(found[:-1])

    def at(self, place: int) -> Integers:
        """Return the slots on the device at an event."""
        return self.slot[(self.begin <= place) & (place < self.end)]


class Residents:
    """Slots on the device at each event, if some are offloaded and those of ``segments`` recomputed.

    Attributes:
        steps: The profile's events.
        mask: Decision per slot.
        first_uses: Event at which each segment is recomputed; the number of events if it never is.
    """

    def __init__(self, profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> None:
        self.steps = steps = profile.arrays
        self.mask: npt.NDArray[np.uint8] = np.frombuffer(mask, np.uint8)
        self._segments = segments
        firsts = [
            min(map(steps.use_place.item, one.slots), default=steps.count) for one in segments
        ]
        self.first_uses = np.array(firsts, np.int64)

    def _each(self, slots: Sequence[tuple[int, ...]]) -> tuple[Integers, Integers]:
        """Return the slots of all segments, and the segment of each."""
        counts = [len(one) for one in slots]
        each = np.array([i for one in slots for i in one], np.int64)
        return each, np.repeat(np.arange(len(slots)), counts)

    @cached_property
    def fate(self) -> npt.NDArray[np.uint8]:
        """Decision for each event's slot."""
        return self.mask[self.steps.slot]

    @cached_property
    def kept(self) -> Stays:
        """Slots kept, or not dropped yet."""
        those = np.flatnonzero(self.mask != OFFLOADED)
        end = self.steps.free_place.copy()
        drops = np.array([drop for one in self._segments for drop in one.drops], np.int64).reshape(
            -1, 3
        )
        end[drops[:, 1]] = np.minimum(drops[:, 0], self.steps.count)
        return Stays(those, self.steps.save_place[those], end[those])

    @cached_property
    def made(self) -> Stays:
        """Recomputed slots that are in use or will be."""
        slots, segment = self._each([one.slots for one in self._segments])
        return Stays(slots, self.first_uses[segment], self.steps.free_place[slots])

    @cached_property
    def _inputs(self) -> tuple[Stays, Flags]:
        """Offloaded inputs of segments while they are needed, and which were freed before."""
        places, steps = self.steps.free_place.item, self.steps
        ends = [max(map(places, one.slots), default=0) for one in self._segments]
        slots, segment = self._each([one.inputs for one in self._segments])
        those = (self.mask[slots] == OFFLOADED) & (self.first_uses[segment] < steps.count)
        slots, segment = slots[those], segment[those]
        begin = self.first_uses[segment]
        late = begin > steps.free_place[slots]
        return Stays(slots, begin, np.array(ends, np.int64)[segment]), late

    @cached_property
    def comes(self) -> Integers:
        """Event per slot that first asks for it, directly or as an input of a recomputed module.

        It is the number of events if none does, or if the slot is not offloaded.
        """
        comes = np.where(self.mask == OFFLOADED, self.steps.use_place, self.steps.count)
        if self._segments:
            inputs, late = self._inputs
            np.minimum.at(comes, inputs.slot[~late], inputs.begin[~late])
        return comes

    @cached_property
    def read(self) -> Stays:
        """Slots read back and in use; an input that had been freed stays until its segment is freed."""
        slots = np.flatnonzero(self.comes < self.steps.count)
        begin, end = self.comes[slots], self.steps.free_place[slots]
        if not self._segments:
            return Stays(slots, begin, end)
        inputs, late = self._inputs
        return Stays(
            np.concatenate([slots, inputs.slot[late]]),
            np.concatenate([begin, inputs.begin[late]]),
            np.concatenate([end, inputs.end[late]]),
        )

    @cached_property
    def kept_bytes(self) -> Integers:
        """Bytes of ``kept`` at each event."""
        return self.kept.bytes_at(self.steps)

    @cached_property
    def made_bytes(self) -> Integers:
        """Bytes of ``made`` at each event."""
        return self.made.bytes_at(self.steps)

    @cached_property
    def read_bytes(self) -> Integers:
        """Bytes of ``read`` at each event."""
        return self.read.bytes_at(self.steps)

    @cached_property
    def written_bytes(self) -> Integers:
        """Bytes at each event that it saves and that will be written."""
        steps = self.steps
        return np.where((self.fate == OFFLOADED) & steps.save, steps.nbytes, 0)

    @cached_property
    def small_bytes(self) -> Integers:
        """Bytes below the floor beside each event's slot.

        Recomputing a module takes as many as its first run.
        """
        steps = self.steps
        again = [one.slots for one in self._segments if one.slots]
        if not again:
            return steps.small
        each, segment = self._each(again)
        most = np.zeros(len(again), np.int64)
        np.maximum.at(most, segment, steps.small_at_save[each])
        took = np.zeros(len(steps.sizes), np.int64)
        took[each] = most[segment]
        return np.where(steps.save, steps.small, np.maximum(steps.small, took[steps.slot]))

    @cached_property
    def unread_bytes(self) -> Integers:
        """Bytes on the device at each event that were not read back."""
        return self.kept_bytes + self.made_bytes + self.small_bytes

    @cached_property
    def need_bytes(self) -> Integers:
        """Bytes at each save and use that no wait can free; 0 at others."""
        need = self.unread_bytes + self.read_bytes + self.written_bytes
        need[self.steps.free] = 0
        return need


def residency(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> ResidencyModel:
    """Return the memory needed with some slots offloaded, and those of ``segments`` recomputed."""
    steps, floor = profile.arrays, profile.small_bytes
    if not steps.count:
        return ResidencyModel(floor, -1, floor, 0)
    found = Residents(profile, mask, segments)
    need = found.need_bytes
    at, moved = int(np.argmax(need)), steps.use & (found.fate != KEPT)
    return ResidencyModel(
        hard_bytes=max(floor, int(need[at])),
        worst=int(steps.slot[at]) if need[at] > floor else -1,
        kept_bytes=int(np.max(found.unread_bytes, initial=floor, where=steps.use)),
        working_bytes=int(np.max(found.read_bytes, initial=0, where=moved)),
    )


def resident_at_worst(profile: Profile, mask: Mask, segments: Sequence[Segment]) -> list[int]:
    """Return the slots on the device when most bytes are first needed; none if there are no slots."""
    found = Residents(profile, mask, segments)
    if not found.steps.count:
        return []
    at = int(np.argmax(found.need_bytes))
    stays = (one.at(at).tolist() for one in (found.kept, found.made, found.read))
    return sorted({int(found.steps.slot[at]), *(i for each in stays for i in each)})


def saved_in_backward_bytes(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> int:
    """Return the most bytes kept, recomputed or just saved while a backward still has slots to read.

    Recomputed modules, segments that the program itself recomputes, and overlapping passes save then.
    Prefetches leave this much room, because they would only be dropped again.
    """
    steps, floor = profile.arrays, profile.small_bytes
    if not segments and not steps.save[int(np.min(steps.use_place, initial=steps.count)) :].any():
        return floor
    found = Residents(profile, mask, segments)
    saves = found.kept_bytes + found.made_bytes + found.written_bytes
    those = steps.save | (steps.use & (found.made_bytes > 0))
    return floor + int(np.max(saves, initial=0, where=those & _reading(profile, found)))


def _reading(profile: Profile, found: Residents) -> Flags:
    """Return at each event whether a backward that has begun still has slots to read."""
    steps, places = found.steps, np.arange(found.steps.count)
    reading = np.zeros(steps.count, np.bool_)
    pass_of = np.array([slot.pass_index for slot in profile.slots], np.int64)
    to_read = (found.mask == OFFLOADED) & (steps.use_place < steps.count)
    for one in profile.passes:
        mine = pass_of == one.index
        slots = np.flatnonzero(mine & to_read)
        begun = int(np.min(steps.use_place, initial=steps.count, where=mine))
        left = np.zeros(steps.count + 1, np.int64)
        np.add.at(left, steps.save_place[slots] + 1, 1)
        np.subtract.at(left, found.comes[slots] + 1, 1)
        reading |= (places > begun) & (np.cumsum(left[:-1]) > 0)
    return reading
