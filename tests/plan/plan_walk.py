"""A check that a plan keeps its budget, event by event, beside the arrays that planning uses.

Unlike a replay, this gives memory, not time. The encoder and the write channel behind it are first in,
first out, at the slot's and the machine's measured speeds. The runtime's waits are modelled, because they
keep the budget: ``pack`` waits for writes when memory is full, and prefetches take only free memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.plan.convolution import with_algorithms
from penstock.plan.machine import Machine
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import Event, Profile, SlotProfile
from penstock.plan.recompute import RecomputeChoices
from penstock.plan.residency import KEPT, OFFLOADED, RECOMPUTED, Mask, Residents, Segment
from penstock.plan.slots import SlotKey

_KEEP: Final = Decision(SlotKey("", 0, 1), Action.KEEP, "", "")
_FATES: Final = {Action.KEEP: KEPT, Action.OFFLOAD: OFFLOADED, Action.RECOMPUTE: RECOMPUTED}


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


@dataclass
class _Walk:
    machine: Machine
    limit_bytes: int
    resident: int = 0
    """Bytes kept, in use and recomputed, which no wait can free."""
    small: int = 0
    """Bytes below the floor, beside the current slot."""
    peak: int = 0
    encoder_free_s: float = 0.0
    channel_free_s: float = 0.0
    writing: deque[tuple[float, int]] = field(default_factory=deque)
    """(end, bytes) of the writes in flight."""
    writing_bytes: int = 0

    def need(self, nbytes: int, at_s: float) -> None:
        """Complete writes, waiting for more of them if necessary, until ``nbytes`` more fit.

        A wait does not delay later events: memory is then at its limit, so the peak is known.
        """
        while self.writing:
            done_s, written = self.writing[0]
            full = self._now + nbytes > self.limit_bytes
            if done_s > at_s and not full:
                break
            self.writing.popleft()
            self.writing_bytes -= written
        self.peak = max(self.peak, self._now + nbytes)

    @property
    def _now(self) -> int:
        return self.resident + self.small + self.writing_bytes

    def write(self, slot: SlotProfile, decision: Decision, at_s: float) -> None:
        nbytes = moved = slot.key.nbytes
        ready_s = at_s
        sample = next((one for one in slot.codecs if one.codec == decision.codec), None)
        if sample is not None:
            moved = sample.encoded_bytes(nbytes)
            ready_s = max(self.encoder_free_s, at_s) + sample.encode_s(nbytes)
            self.encoder_free_s = ready_s
        begin_s = max(self.channel_free_s, ready_s)
        self.channel_free_s = begin_s + self.machine.write_s(moved, decision.tier)
        self.writing.append((self.channel_free_s, nbytes))
        self.writing_bytes += nbytes

    def prefetch(self, nbytes: int) -> None:
        """Fill free memory with prefetched bytes, up to ``nbytes``."""
        free = self.limit_bytes - self._now
        self.peak = max(self.peak, self._now + max(0, min(free, nbytes)))


def peak_bytes(profile: Profile, plan: Plan, machine: Machine) -> int:
    """Return the most bytes resident at once under ``plan``; over its device budget if it fails."""
    profile = with_algorithms(profile, machine, plan.workspace_limits)
    segments = RecomputeChoices.of(profile).segments(plan.recomputed)
    drops = deque(sorted(drop for one in segments for drop in one.drops))
    walk = _Walk(machine, plan.budgets.device_bytes, peak=profile.small_bytes)
    moves = [plan.lookup_match(match) or _KEEP for match in profile.match_keys]
    sizes = [slot.key.nbytes for slot in profile.slots]
    mask = bytearray(_FATES[move.action] for move in moves)
    back = Returned(sizes, mask, segments)
    small = Residents(profile, mask, segments).small_bytes.tolist()
    kept, to_come = 0, 0
    for place, (when_ns, event, i) in enumerate(profile.steps):
        while drops and drops[0][0] <= place:
            kept -= sizes[drops.popleft()[1]]
        slot, nbytes, fate = profile.slots[i], sizes[i], mask[i]
        walk.small = small[place]
        walk.resident = kept + back.read + back.made
        if event is Event.SAVE:
            walk.need(nbytes, when_ns / 1e9)
            kept += 0 if fate == OFFLOADED else nbytes
            if fate == OFFLOADED:
                walk.write(slot, moves[i], when_ns / 1e9)
                to_come += nbytes if slot.needed_at_ns is not None else 0
        elif event is Event.USE:
            arrived = back.use(i)
            to_come -= sum(sizes[j] for j in arrived if profile.slots[j].needed_at_ns is not None)
            brought = kept + back.read + back.made - walk.resident
            walk.need(brought, when_ns / 1e9)
            walk.resident += brought
            walk.prefetch(min(to_come, max(0, plan.window_bytes - back.read)))
        elif fate == KEPT:
            kept -= nbytes
        else:
            back.free(i)
    return walk.peak
