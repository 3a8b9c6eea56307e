"""Whether a plan keeps its budget, on paper: the bytes resident at every event of the profile.

Not a replay: it tells memory, not time. The encoder and the write channel behind it are first in,
first out, at the slot's and the machine's measured speeds. The runtime's waits are modelled, for they
are what keeps the budget: ``pack`` waits for writes when memory is full, and reads ahead take only
what is free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.plan.machine import Machine
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import Event, Profile, SlotProfile
from penstock.plan.slots import SlotKey


@dataclass
class _Walk:
    machine: Machine
    limit_bytes: int
    resident: int = 0
    """Kept and in use: what no wait can free."""
    small: int = 0
    """Below the floor, beside the slot at hand."""
    peak: int = 0
    encoder_free_s: float = 0.0
    channel_free_s: float = 0.0
    writing: deque[tuple[float, int]] = field(default_factory=deque)
    """(when done, bytes) of the writes in flight."""
    writing_bytes: int = 0

    def need(self, nbytes: int, at_s: float) -> None:
        """Let writes end, and wait for more of them if must be, until ``nbytes`` more fit.

        A wait is not added to later times: from then on memory is at its limit, and the peak known.
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

    def read_ahead(self, nbytes: int) -> None:
        """Reads ahead take what is free, up to ``nbytes``."""
        free = self.limit_bytes - self._now
        self.peak = max(self.peak, self._now + max(0, min(free, nbytes)))


def peak_bytes(profile: Profile, plan: Plan, machine: Machine) -> int:
    """The most bytes resident at once under ``plan``; over its device budget if it fails."""
    walk = _Walk(machine, plan.budgets.device_bytes, peak=profile.small_bytes)
    moves = [_move(plan, slot.key) for slot in profile.slots]
    in_use, to_come = 0, 0
    for when_ns, event, i in profile.steps:
        slot, move = profile.slots[i], moves[i]
        nbytes, returns = slot.key.nbytes, slot.needed_at_ns is not None
        walk.small = profile.small_beside[i]
        if event is Event.SAVE:
            walk.need(nbytes, when_ns / 1e9)
            if move:
                walk.write(slot, move, when_ns / 1e9)
                to_come += nbytes if returns else 0
            else:
                walk.resident += nbytes
        elif event is Event.USE:
            if move:
                walk.need(nbytes, when_ns / 1e9)
                walk.resident += nbytes
                in_use, to_come = in_use + nbytes, to_come - nbytes
            walk.read_ahead(min(to_come, max(0, plan.window_bytes - in_use)))
        elif not move:
            walk.resident -= nbytes
        elif returns:
            walk.resident -= nbytes
            in_use -= nbytes
    return walk.peak


def _move(plan: Plan, key: SlotKey) -> Decision | None:
    decision = plan.lookup(key)
    return decision if decision is not None and decision.action is Action.OFFLOAD else None
