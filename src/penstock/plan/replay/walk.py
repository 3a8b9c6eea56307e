"""One step, event by event: compute goes on, the device's memory fills, empties, and is waited for.

As the runtime does it (``runtime/executor.py``, ``traffic.py``, ``reads.py``, ``room.py``):

1. A save takes its bytes. If they do not fit, it waits for writes to end; then copies that were read
   ahead are dropped, the one needed last first; then the budget is exceeded, and the plan not feasible.
2. An offloaded slot's write is queued at its save, and its bytes are free when that ends.
3. When backward asks for a slot that is still being written, it stays, and a write that has not begun
   is given up. One that is away is read while backward waits; one on its way is waited for.
4. After each asking, what is needed next is read ahead, in the order of need, up to the window, the free
   budget, and a slot that is still being written or whose ``prefetch_at`` has not come.
5. What a recomputed module makes and saves is dropped at the end of its forward. The first need of any of
   it runs the module again: that needs its inputs, and all that it made, and backward still needs, is
   there from then on.
6. Under a plan that is ``joined``, each layer of forward is over when what is written under it is
   (:mod:`.joins`), and the window of point 4 does not hold: vDNN has none.
7. While bytes move, computing is slower by the machine's ``interference``; and each write and each read
   makes it later by the runtime's work (``Machine.write_work_s``, ``read_work_s``), when it is queued.

Of what is held elsewhere an offload frees the budget, and nothing has to be read.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.plan.plan import Plan
from penstock.plan.profile import Event, Profile
from penstock.plan.replay.held import Held
from penstock.plan.replay.joins import JOIN, with_joins
from penstock.plan.replay.lanes import GIVEN_UP, NOT_YET, Endings
from penstock.plan.replay.moves import OFFLOADED, RECOMPUTED, Channels, Moves
from penstock.plan.replay.order import Order
from penstock.plan.replay.rerun import DROP, Rerun, with_drops

# States of slots that are not kept. Beside WRITING, COMING and DEAD, nothing is under way.
_NEW: Final = 0
_HERE: Final = 1
"""In memory, where it was saved."""
_WRITING: Final = 2
_AWAY: Final = 3
"""In the tier only, or dropped."""
_COMING: Final = 4
"""Read ahead: memory is taken, the bytes are on their way or there."""
_BACK: Final = 5
"""Read or made again, and in use."""
_GONE: Final = 6
_DEAD: Final = 7
"""Nobody needs it any more, but its write goes on."""

_MILLION: Final = 1_000_000


class Walk:
    """A step under way. ``run`` it once, then read the attributes.

    Attributes:
        held: The bytes on the device and in the tiers.
        base_ns: When the step begins, on the profile's axis.
        now_ns: Since then, with everything that was waited for; at the end, the whole step.
        computed_ns: Without that, and without what was computed again.
        delays: (when on the profile's axis, ns) of all that was added to its time.
        stalls: (start, end) of the waits.
    """

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        moves: Moves,
        channels: Channels,
        reruns: dict[int, Rerun],
        *,
        interference: float,
    ) -> None:
        self._profile = profile
        self._moves = moves
        self._channels = channels
        self._lanes = channels.lanes
        self._endings = Endings(channels.lanes, tuple(channels.out.values()))
        self._reruns = reruns
        self._slower = round(interference * _MILLION)
        self._slowed = False  # whether bytes may be moving, so that computing is slower
        self._window = plan.budgets.device_bytes if plan.joined else plan.window_bytes
        self._joined = plan.joined
        self._small = profile.small_beside
        self._small_at_need = profile.small_at_need
        self._state = bytearray(len(profile.slots))
        self.held = Held(profile, moves, plan.budgets.device_bytes)
        self._order = Order(profile, plan, moves)
        self._coming: deque[int] = deque()
        self._clock_ns = 0
        self.base_ns = self.now_ns = self.computed_ns = 0
        self.budget_ns = self.demand_ns = self.late_ns = 0
        self.recompute_ns = self.interference_ns = 0
        self.forwarded_bytes = 0
        self.delays: list[tuple[int, int]] = []
        self.stalls: list[tuple[int, int]] = []

    def run(self) -> None:
        """Go through the whole step."""
        begin, end = self._profile.axis_ns
        self.base_ns = clock = begin
        sizes, action = self.held.sizes, self._moves.action
        small, at_need = self._small, self._small_at_need
        changes = self.held.changes
        save, use = Event.SAVE, Event.USE
        now, gate = 0, min(self.held.peak_bytes, self.held.limit)
        steps = with_drops(self._profile, self._reruns)
        if self._joined:
            steps = with_joins(self._profile, action, steps)
        for when, event, i in steps:
            if when > clock:
                self._clock_ns = when
                now = self._compute(when - clock, now) if self._slowed else now + when - clock
                clock = when
            if event is save:
                nbytes = sizes[i]
                if self.held.used + nbytes + small[i] > gate:
                    now = self._room(nbytes, small[i], now)
                    gate = min(self.held.peak_bytes, self.held.limit)
                self.held.used += nbytes
                changes.append((now, i, nbytes))
                if action[i]:
                    now = self._saved(i, now)
            elif event is use:
                if self.held.used + at_need[i] > gate:
                    now = self._room(0, at_need[i], now)
                now = self._use(i, now)
                gate = min(self.held.peak_bytes, self.held.limit)
            elif event == DROP:
                self._drop(i, now)
            elif event == JOIN:
                now = self._join(i, now)
            elif action[i]:
                self._free(i, now)
            else:
                self.held.used -= sizes[i]
                changes.append((now, i, -sizes[i]))
        self._clock_ns = end
        self.now_ns = self._compute(end - clock, now)
        self.computed_ns = end - begin
        self._settle(self.now_ns)

    # -- time -------------------------------------------------------------------------------------

    def _compute(self, work_ns: int, now: int) -> int:
        """Compute for so long, and longer where bytes move meanwhile; when that is done."""
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
        """A transfer was queued, which makes what is computed next later; when that begins."""
        if work_ns:
            self.interference_ns += work_ns
            self.delays.append((self._clock_ns, work_ns))
        return now + work_ns

    def _waited(self, begun: int, now: int) -> int:
        """Take note of a wait; how long it was."""
        if now > begun:
            self.delays.append((self._clock_ns, now - begun))
            self.stalls.append((begun, now))
        return now - begun

    # -- room -------------------------------------------------------------------------------------

    def _room(self, nbytes: int, small: int, now: int) -> int:
        """Wait for room for so much, and note the wait; when there is room, or nothing to wait for."""
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
            elif not self._drop_one_read_ahead(now):
                if not self._coming:
                    break
                now = max(now, self._lanes.end_of(self._coming[0], self._channels.arrived))
        self.held.peak_bytes = max(self.held.peak_bytes, self.held.used + nbytes + small)
        return now

    def _settle(self, now: int) -> None:
        """Free what has been written by now."""
        state = self._state
        for end, i in self._endings.by(now):
            if state[i] == _WRITING or state[i] == _DEAD:
                state[i] = _AWAY if state[i] == _WRITING else _GONE
                self.held.give(i, end)

    def _join(self, i: int, now: int) -> int:
        """Wait until a slot is written; when it is."""
        if self._state[i] != _WRITING:
            return now
        there = max(now, self._lanes.end_of(i, self._channels.written))
        self.budget_ns += self._waited(now, there)
        self._settle(there)
        return there

    def _drop_one_read_ahead(self, now: int) -> bool:
        arrived = self._channels.arrived
        for i in reversed(self._coming):
            if NOT_YET < arrived[i] <= now:
                self._coming.remove(i)
                self._state[i] = _AWAY
                arrived[i] = NOT_YET
                self.held.read_back -= self.held.sizes[i]
                self.held.give(i, now)
                return True
        return False

    # -- a slot's way -----------------------------------------------------------------------------

    def _saved(self, i: int, now: int) -> int:
        if self._moves.action[i] == RECOMPUTED:
            self._state[i] = _HERE
            return now
        self._state[i] = _WRITING
        self._slowed = self._slower > 0
        self.held.in_tier(i, 1, now)
        if self._moves.encode_ns[i] and self._channels.encode is not None:
            self._channels.encode.add(now, i)
        else:
            self._channels.out[self._moves.tier[i]].add(now, i)
        return self._worked(self._moves.write_work_ns[i], now)

    def _give_up(self, i: int, now: int) -> None:
        """A write is not needed any more; one that has begun goes on."""
        written = self._channels.written
        self._lanes.advance(now)
        if written[i] == NOT_YET:
            written[i] = GIVEN_UP

    def _use(self, i: int, now: int) -> int:
        index = self._profile.slots[i].pass_index
        action = self._moves.action[i]
        self._order.ask(i)
        if action == OFFLOADED:
            now = self._fetch(i, now)
        elif action == RECOMPUTED:
            if self._state[i] == _AWAY:
                now = self._run_again(self._reruns[i], now)
            self._state[i] = _BACK
        if index in self._order.slots:
            now = self._read_ahead(index, i, now)
        return now

    def _fetch(self, i: int, now: int) -> int:
        """Have a slot on the device; when it is."""
        state = self._state
        if state[i] == _WRITING:
            self._settle(now)
        if state[i] == _WRITING:
            self._give_up(i, now)
            state[i] = _HERE
            self.forwarded_bytes += self.held.sizes[i]
        elif state[i] == _AWAY and not self._profile.slots[i].held_elsewhere:
            return self._demand(i, now)
        elif state[i] == _COMING:
            there = max(now, self._end_of_read(i, now))
            self.late_ns += self._waited(now, there)
            self._coming.remove(i)
            state[i] = _BACK
            return there
        return now

    def _demand(self, i: int, now: int) -> int:
        """Read a slot while backward waits."""
        ready = self._make_room(self.held.sizes[i], self._small_at_need[i], now)
        self.demand_ns += self._waited(now, ready)
        self._lanes.advance(ready)
        self.held.take(i, ready)
        self.held.read_back += self.held.sizes[i]
        self._state[i] = _BACK
        self._slowed = self._slower > 0
        self._channels.back[self._moves.tier[i]].add_first(ready, i)
        ready = self._worked(self._moves.read_work_ns[i], ready)
        ready = self._read_ahead(self._profile.slots[i].pass_index, i, ready)
        there = max(ready, self._lanes.end_of(i, self._channels.arrived))
        self.demand_ns += self._waited(ready, there)
        return there

    def _end_of_read(self, i: int, now: int) -> int:
        arrived = self._channels.arrived
        if arrived[i] == NOT_YET:
            self._lanes.advance(now)
            self._channels.back[self._moves.tier[i]].go_first(i)
        return self._lanes.end_of(i, arrived)

    def _run_again(self, rerun: Rerun, now: int) -> int:
        state, sizes, slots = self._state, self.held.sizes, self._profile.slots
        for i in rerun.inputs:
            now = self._fetch(i, now)
        made = [i for i in rerun.slots if state[i] == _AWAY and slots[i].needed_at_ns is not None]
        small = max(self._small[i] for i in rerun.slots)
        now = self._room(sum(sizes[i] for i in made), small, now)
        for i in made:
            self.held.take(i, now)
            state[i] = _HERE
        self.recompute_ns += rerun.took_ns
        self.delays.append((self._clock_ns, rerun.took_ns))
        return self._compute(rerun.took_ns, now)

    def _drop(self, i: int, now: int) -> None:
        if self._state[i] == _HERE:
            self._state[i] = _AWAY
            self.held.give(i, now)

    def _free(self, i: int, now: int) -> None:
        state, offloaded = self._state, self._moves.action[i] == OFFLOADED
        if state[i] == _WRITING:
            self._settle(now)
        if state[i] == _WRITING:
            self._give_up(i, now)
        was = state[i]
        state[i] = _GONE
        if was in (_HERE, _WRITING) and offloaded and self._channels.written[i] > now:
            state[i] = _DEAD
        elif was in (_HERE, _WRITING, _BACK):
            self.held.give(i, now)
        if offloaded:
            self.held.in_tier(i, -1, now)
            if was == _BACK:
                self.held.read_back -= self.held.sizes[i]

    def _read_ahead(self, index: int, asked: int, now: int) -> int:
        """Begin to read what the pass needs after ``asked``, as far as is allowed; when that is done."""
        slots, place, state = self._order.slots[index], self._order.place[index], self._state
        while place < len(slots):
            i = slots[place]
            if state[i] == _WRITING:
                self._settle(now)
                if state[i] == _WRITING:
                    break
            if state[i] == _AWAY and not self._profile.slots[i].held_elsewhere:
                if not self._may_read(i, asked, now):
                    break
                self.held.take(i, now)
                self.held.read_back += self.held.sizes[i]
                self.held.peak_bytes = max(
                    self.held.peak_bytes, self.held.used + self._small_at_need[asked]
                )
                state[i] = _COMING
                self._slowed = self._slower > 0
                self._coming.append(i)
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
        beside = self._order.beside(_COMING, self._state)
        small = max(self._small_at_need[asked], self._small_at_need[i], beside)
        if self.held.used + nbytes + small > self.held.limit:
            self._settle(now)
        return self.held.used + nbytes + small <= self.held.limit
