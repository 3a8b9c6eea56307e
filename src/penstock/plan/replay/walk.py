"""Simulation of one step, event by event: compute, the device's memory, and waits.

It follows the runtime (``runtime/executor.py``, ``transfers.py``, ``eviction.py``):

1. A save takes its bytes. If they do not fit, it waits for writes to end; then prefetched copies are
   dropped, the one needed last first; then the budget is exceeded, and the plan is not feasible.
2. An offloaded slot's write is queued at its save, and its bytes are free when that ends.
3. If backward asks for a slot that is still being written, it stays, and a write that has not begun is
   cancelled. An offloaded slot is read while backward waits; a read in flight is waited for.
4. After each use, slots needed next are prefetched, in the order of need, up to the window, the free
   budget, and a slot that is still being written or whose ``prefetch_at`` has not come.
5. Slots that a recomputed module makes and saves are dropped at the end of its forward. The first need
   of any of them recomputes the module: that needs its inputs, and from then on all slots that it made
   and backward still needs are resident.
6. Under a plan that is ``joined``, each layer of forward ends when the writes that began under it have
   ended (:mod:`.joins`), and the window of point 4 does not apply: vDNN has none.
7. While bytes move, compute is slower by the machine's ``interference``; and each write and each read
   delays it by the runtime's work (``Machine.write_work_s``, ``read_work_s``) when it is queued.

If a storage is held elsewhere, offloading it frees the budget, and it need not be read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from penstock.plan.plan import Plan
from penstock.plan.profile import Event, Profile
from penstock.plan.replay.joins import JOIN, with_joins
from penstock.plan.replay.lanes import CANCELLED, NOT_YET, LaneEnds
from penstock.plan.replay.moves import Channels, Moves
from penstock.plan.replay.occupancy import HeldBytes
from penstock.plan.replay.order import NeedOrder
from penstock.plan.replay.recompute import DROP, with_drops
from penstock.plan.residency import OFFLOADED, RECOMPUTED, Segment

# States of slots that are not kept. Transfers are in flight only in WRITING, PREFETCHED and UNNEEDED.
NEW: Final = 0
RESIDENT: Final = 1
"""State of a slot in memory, where it was saved."""
WRITING: Final = 2
ABSENT: Final = 3
"""State of a slot that is only in its tier, or dropped."""
PREFETCHED: Final = 4
"""State of a slot whose memory is allocated and whose prefetch is in flight or done."""
RETURNED: Final = 5
"""State of a slot that was read or recomputed and is in use."""
FREED: Final = 6
UNNEEDED: Final = 7
"""State of a slot that is not needed any more, but whose write goes on."""

_MILLION: Final = 1_000_000


class Walk:
    """Simulation of one step. ``run`` it once, then read the attributes.

    Attributes:
        held: The bytes on the device and in the tiers.
        base_ns: Begin of the step on the profile's axis.
        now_ns: Time since then, with all waits; at the end, that of the whole step.
        computed_ns: Time of the step without waits and recomputation.
        delays: (time on the profile's axis, ns) of everything that was added to the step.
        stalls: (start, end) of the waits.
    """

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        moves: Moves,
        channels: Channels,
        segments: Sequence[Segment],
        *,
        interference: float,
    ) -> None:
        self._profile = profile
        self._moves = moves
        self._channels = channels
        self._lanes = channels.lanes
        self._endings = LaneEnds(channels.lanes, tuple(channels.out.values()))
        self._segments = segments
        self._segment_of = {i: one for one in segments for i in one.slots}
        self._slower = round(interference * _MILLION)
        self._slowed = False  # True if bytes may be moving, so that compute is slower
        self._window = plan.budgets.device_bytes if plan.joined else plan.window_bytes
        self._joined = plan.joined
        self._small = profile.small_beside
        self._small_at_need = profile.small_at_need
        self._state = bytearray(len(profile.slots))
        self.held = HeldBytes(profile, moves, plan.budgets.device_bytes)
        self._order = NeedOrder(profile, plan, moves)
        self._prefetched: deque[int] = deque()
        self._clock_ns = 0
        self.base_ns = self.now_ns = self.computed_ns = 0
        self.budget_ns = self.demand_ns = self.late_ns = 0
        self.recompute_ns = self.interference_ns = 0
        self.forwarded_bytes = 0
        self.delays: list[tuple[int, int]] = []
        self.stalls: list[tuple[int, int]] = []

    def run(self) -> None:
        """Simulate the whole step."""
        begin, end = self._profile.axis_ns
        self.base_ns = clock = begin
        sizes, action = self.held.sizes, self._moves.action
        small, at_need = self._small, self._small_at_need
        changes = self.held.changes
        save, use = Event.SAVE, Event.USE
        now, gate = 0, min(self.held.peak_bytes, self.held.limit)
        for when, event, i in self._events():
            if when > clock:
                self._clock_ns = when
                now = self._compute(when - clock, now) if self._slowed else now + when - clock
                clock = when
            if event is save:
                nbytes = sizes[i]
                if self.held.used + nbytes + small[i] > gate:
                    now = self._wait_for_room(nbytes, small[i], now)
                    gate = min(self.held.peak_bytes, self.held.limit)
                self.held.used += nbytes
                changes.append((now, i, nbytes))
                if action[i]:
                    now = self._saved(i, now)
            elif event is use:
                if self.held.used + at_need[i] > gate:
                    now = self._wait_for_room(0, at_need[i], now)
                now = self._use(i, now)
                gate = min(self.held.peak_bytes, self.held.limit)
            elif event == DROP:
                self._drop(i, now)
            elif event == JOIN:
                now = self._join(i, now)
            elif event > JOIN:
                now = self._more(event, i, now)
                gate = min(self.held.peak_bytes, self.held.limit)
            elif action[i]:
                self._free(i, now)
            else:
                self.held.used -= sizes[i]
                changes.append((now, i, -sizes[i]))
        self._clock_ns = end
        self.now_ns = self._compute(end - clock, now)
        self.computed_ns = end - begin
        self._settle(self.now_ns)

    @property
    def promised_bytes(self) -> Sequence[int]:
        """Most bytes, by tier, for which there must be room."""
        return self.held.tier_peak

    def _events(self) -> Sequence[tuple[int, int, int]]:
        """Return (time in ns, event, slot) of the whole step, in order."""
        steps = with_drops(self._profile, self._segments)
        return with_joins(self._profile, self._moves.action, steps) if self._joined else steps

    def _more(self, event: int, i: int, now: int) -> int:
        """Handle an event that only a subclass has, and return when it is over."""
        raise AssertionError(f"event {event} of slot {i} at {now} ns")

    # -- time -------------------------------------------------------------------------------------

    def _compute(self, work_ns: int, now: int) -> int:
        """Compute for ``work_ns``, longer while bytes move, and return the end."""
        begun, left = now, work_ns
        slower, lanes = self._slower, self._lanes
        while self._slowed and left:
            quiet = lanes.busy_until()
            if quiet <= now:
                lanes.advance(now)
                quiet = lanes.busy_until()
                if quiet <= now:
                    self._slowed = False
                    break
            slow_ns = -(-left * (_MILLION + slower) // _MILLION)
            if now + slow_ns <= quiet:
                left, now = 0, now + slow_ns
            else:
                left -= (quiet - now) * _MILLION // (_MILLION + slower)
                now = quiet
        now += left
        if now - begun > work_ns:
            self.interference_ns += now - begun - work_ns
            self.delays.append((self._clock_ns, now - begun - work_ns))
        return now

    def _worked(self, work_ns: int, now: int) -> int:
        """Delay compute by the work of queueing a transfer, and return when it resumes."""
        if work_ns:
            self.interference_ns += work_ns
            self.delays.append((self._clock_ns, work_ns))
        return now + work_ns

    def _waited(self, begun: int, now: int) -> int:
        """Record a wait and return its duration."""
        if now > begun:
            self.delays.append((self._clock_ns, now - begun))
            self.stalls.append((begun, now))
        return now - begun

    # -- room -------------------------------------------------------------------------------------

    def _wait_for_room(self, nbytes: int, small: int, now: int) -> int:
        """Wait for room, record the wait, and return when there is room or nothing to wait for."""
        there = self._make_room(nbytes, small, now)
        self.budget_ns += self._waited(now, there)
        return there

    def _make_room(self, nbytes: int, small: int, now: int) -> int:
        self._settle(now)
        while self.held.used + nbytes + small > self.held.limit:
            end = self._endings.next_ns()
            if end is not None:
                now = end
                self._settle(now)
            elif not self._drop_one_prefetch(now):
                if not self._prefetched:
                    break
                now = max(now, self._lanes.end_of(self._prefetched[0], self._channels.arrived))
        self.held.peak_bytes = max(self.held.peak_bytes, self.held.used + nbytes + small)
        return now

    def _settle(self, now: int) -> None:
        """Free slots that have been written by now."""
        state = self._state
        for end, i in self._endings.by(now):
            if state[i] == WRITING or state[i] == UNNEEDED:
                state[i] = ABSENT if state[i] == WRITING else FREED
                self.held.free(i, end)

    def _join(self, i: int, now: int) -> int:
        """Wait until a slot is written, and return the end."""
        if self._state[i] != WRITING:
            return now
        there = max(now, self._lanes.end_of(i, self._channels.written))
        self.budget_ns += self._waited(now, there)
        self._settle(there)
        return there

    def _drop_one_prefetch(self, now: int) -> bool:
        arrived = self._channels.arrived
        for i in reversed(self._prefetched):
            if NOT_YET < arrived[i] <= now:
                self._prefetched.remove(i)
                self._state[i] = ABSENT
                arrived[i] = NOT_YET
                self.held.read_back -= self.held.sizes[i]
                self.held.free(i, now)
                return True
        return False

    # -- slots ------------------------------------------------------------------------------------

    def _saved(self, i: int, now: int) -> int:
        if self._moves.action[i] == RECOMPUTED:
            self._state[i] = RESIDENT
            return now
        self._state[i] = WRITING
        self._slowed = self._slower > 0
        self.held.in_tier(i, 1, now)
        if self._moves.encode_ns[i] and self._channels.encode is not None:
            self._channels.encode.add(now, i)
        else:
            self._channels.out[self._moves.tier[i]].add(now, i)
        return self._worked(self._moves.write_work_ns[i], now)

    def _cancel_write(self, i: int, now: int) -> None:
        """Cancel a write that is not needed any more; one that has begun goes on."""
        written = self._channels.written
        self._lanes.advance(now)
        if written[i] == NOT_YET:
            written[i] = CANCELLED

    def _use(self, i: int, now: int) -> int:
        index = self._profile.slots[i].pass_index
        action = self._moves.action[i]
        self._order.ask(i)
        if action == OFFLOADED:
            now = self._fetch(i, now)
        elif action == RECOMPUTED:
            if self._state[i] == ABSENT:
                now = self._recompute(self._segment_of[i], now)
            self._state[i] = RETURNED
        if index in self._order.slots:
            now = self._prefetch(index, i, now)
        return now

    def _fetch(self, i: int, now: int) -> int:
        """Bring a slot to the device, and return when it is there."""
        state = self._state
        if state[i] == WRITING:
            self._settle(now)
        if state[i] == WRITING:
            self._cancel_write(i, now)
            state[i] = RESIDENT
            self.forwarded_bytes += self.held.sizes[i]
        elif state[i] == ABSENT and not self._profile.slots[i].held_elsewhere:
            return self._demand(i, now)
        elif state[i] == PREFETCHED:
            there = max(now, self._end_of_read(i, now))
            self.late_ns += self._waited(now, there)
            self._prefetched.remove(i)
            state[i] = RETURNED
            return there
        return now

    def _demand(self, i: int, now: int) -> int:
        """Read a slot while backward waits, and return the end."""
        ready = self._make_room(self.held.sizes[i], self._small_at_need[i], now)
        self.demand_ns += self._waited(now, ready)
        self._lanes.advance(ready)
        self.held.allocate(i, ready)
        self.held.read_back += self.held.sizes[i]
        self._state[i] = RETURNED
        self._slowed = self._slower > 0
        self._channels.back[self._moves.tier[i]].add_first(ready, i)
        ready = self._worked(self._moves.read_work_ns[i], ready)
        ready = self._prefetch(self._profile.slots[i].pass_index, i, ready)
        there = max(ready, self._lanes.end_of(i, self._channels.arrived))
        self.demand_ns += self._waited(ready, there)
        return there

    def _end_of_read(self, i: int, now: int) -> int:
        arrived = self._channels.arrived
        if arrived[i] == NOT_YET:
            self._lanes.advance(now)
            self._channels.back[self._moves.tier[i]].go_first(i)
        return self._lanes.end_of(i, arrived)

    def _recompute(self, segment: Segment, now: int) -> int:
        state, sizes = self._state, self.held.sizes
        for i in segment.inputs:
            if self._moves.action[i] == OFFLOADED:
                now = self._fetch(i, now)
        made = [i for i in segment.slots if state[i] == ABSENT]
        small = max(self._small[i] for i in segment.slots)
        now = self._wait_for_room(sum(sizes[i] for i in made), small, now)
        for i in made:
            self.held.allocate(i, now)
            state[i] = RESIDENT
        self.recompute_ns += segment.took_ns
        self.delays.append((self._clock_ns, segment.took_ns))
        return self._compute(segment.took_ns, now)

    def _drop(self, i: int, now: int) -> None:
        if self._state[i] == RESIDENT:
            self._state[i] = ABSENT
            self.held.free(i, now)

    def _free(self, i: int, now: int) -> None:
        state, offloaded = self._state, self._moves.action[i] == OFFLOADED
        if state[i] == WRITING:
            self._settle(now)
        if state[i] == WRITING:
            self._cancel_write(i, now)
        was = state[i]
        state[i] = FREED
        if was in (RESIDENT, WRITING) and offloaded and self._channels.written[i] > now:
            state[i] = UNNEEDED
        elif was in (RESIDENT, WRITING, RETURNED):
            self.held.free(i, now)
        if offloaded:
            self.held.in_tier(i, -1, now)
            if was == RETURNED:
                self.held.read_back -= self.held.sizes[i]

    def _prefetch(self, index: int, asked: int, now: int) -> int:
        """Start prefetches of the slots needed after ``asked``, and return when they are queued."""
        slots, place, state = self._order.slots[index], self._order.place[index], self._state
        while place < len(slots):
            i = slots[place]
            if state[i] == WRITING:
                self._settle(now)
                if state[i] == WRITING:
                    break
            if state[i] == ABSENT and not self._profile.slots[i].held_elsewhere:
                if not self._may_read(i, asked, now):
                    break
                self.held.allocate(i, now)
                self.held.read_back += self.held.sizes[i]
                self.held.peak_bytes = max(
                    self.held.peak_bytes, self.held.used + self._small_at_need[asked]
                )
                state[i] = PREFETCHED
                self._slowed = self._slower > 0
                self._prefetched.append(i)
                self._order.begin(i)
                self._channels.back[self._moves.tier[i]].add(now, i)
                now = self._worked(self._moves.read_work_ns[i], now)
            place += 1
        self._order.place[index] = place
        return now

    def _may_read(self, i: int, asked: int, now: int) -> bool:
        nbytes = self.held.sizes[i]
        if not self._order.due(i) or self.held.read_back + nbytes > self._window:
            return False
        beside = self._order.beside(PREFETCHED, self._state)
        small = max(self._small_at_need[asked], self._small_at_need[i], beside)
        if self.held.used + nbytes + small > self.held.limit:
            self._settle(now)
        return self.held.used + nbytes + small <= self.held.limit
