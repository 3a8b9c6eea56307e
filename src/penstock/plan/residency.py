"""How many bytes are resident when some slots are offloaded, and some made again.

[Note: what counts against the device budget]
    Kept storages from their save until the backward node that uses them is done; offloaded storages
    until their write is done, and again from the start of their read until their node is done;
    recomputed ones until the forward of their module is over, and from when it is run again until their
    own node is done; storages below the floor. Of these the runtime can wait for writes (in ``pack``)
    and do without reads ahead (they are a guess, and are dropped for a demand). It cannot do without
    what is kept, what a node is using, nor what a module that is run again makes: ``hard_bytes`` is
    the least budget that a plan can run in. Offloading one more slot of n bytes takes n from what is
    kept and adds at most n to what is in use, so hard_bytes never grows: if offloading everything does
    not fit, no choice of offloads does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

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
    _segment_of: dict[int, Segment] = field(init=False)

    def __post_init__(self) -> None:
        self._here = bytearray(len(self.mask))
        self._segment_of = {i: one for one in self.segments for i in one.slots}

    def use(self, i: int) -> list[int]:
        """Slot ``i`` is asked for: bring it, and what comes with it. Says which come by a read."""
        if self.mask[i] == KEPT or self._here[i]:
            return []
        if self.mask[i] == OFFLOADED:
            arrived = [i]
        else:
            segment = self._segment_of[i]
            arrived = [j for j in segment.inputs if self.mask[j] == OFFLOADED and not self._here[j]]
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
        if self._here[i]:
            self._here[i] = 0
            if self.mask[i] == OFFLOADED:
                self.read -= self.sizes[i]
            else:
                self.made -= self.sizes[i]


def residency(profile: Profile, mask: Mask, segments: Sequence[Segment] = ()) -> Residency:
    """Walk the profile with some slots offloaded, and those of ``segments`` recomputed."""
    if not segments:
        return _without_segments(profile, mask)
    sizes = [slot.key.nbytes for slot in profile.slots]
    save, use = Event.SAVE, Event.USE  # looked up once, not in every turn of the loop
    back = Returned(sizes, mask, segments)
    kept = most_used = 0
    hard, worst, most_kept = profile.small_bytes, -1, profile.small_bytes
    small = small_beside(profile, segments)
    drops = deque(sorted(drop for one in segments for drop in one.drops))
    for place, (_, event, i) in enumerate(profile.steps):
        while drops and drops[0][0] <= place:
            kept -= sizes[drops.popleft()[1]]
        fate = mask[i]
        need = 0
        if event is save:
            need = kept + back.read + back.made + sizes[i] + small[i]
            if fate != OFFLOADED:
                kept += sizes[i]
        elif event is use:
            if fate:
                back.use(i)
                most_used = max(most_used, back.read)
            most_kept = max(most_kept, kept + back.made + small[i])
            need = kept + back.read + back.made + small[i]
        elif not fate:
            kept -= sizes[i]
        else:
            back.free(i)
        if need > hard:
            hard, worst = need, i
    return Residency(hard, worst, most_kept, most_used)


def _without_segments(profile: Profile, offloaded: Mask) -> Residency:
    """The same where nothing is recomputed, in a third of the time: policies ask for it often."""
    sizes = [slot.key.nbytes for slot in profile.slots]
    returns = [slot.needed_at_ns is not None for slot in profile.slots]
    save, use = Event.SAVE, Event.USE
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
        if here + back.read + back.made + small[i] == hard_bytes:
            return sorted({*there, *back.here(), i})
        if event is Event.SAVE and mask[i] != OFFLOADED:
            there.add(i)
            kept += sizes[i]
    return []


def small_beside(profile: Profile, segments: Sequence[Segment]) -> Sequence[int]:
    """Bytes beside each slot; running a module again takes what running it took."""
    if not segments:
        return profile.small_beside
    small = list(profile.small_beside)
    for segment in segments:
        most = max((profile.small_beside[i] for i in segment.slots), default=0)
        for i in segment.slots:
            small[i] = max(small[i], most)
    return small


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
