"""Simulation of one training step with its weights on flash and the optimizer's update.

It adds to :mod:`.walk`, on the same channels and in the same memory:

1. Before the first operator of a use, a module's weights are read, ahead of time as far as the window
   allows: at any use to come there must be room for what is needed then. When the use ends, they are
   freed. A read that compute waits for goes first; writes come after reads.
2. A gradient has memory from the first operator of its module's backward. When it is final, the update
   takes over gradient and weights, piece by piece: records are read, the arithmetic is done, weights and
   records are written, and the memory is free. Backward goes on meanwhile.
3. A gradient that waits for other backwards or for ``step()`` stays in memory, or is written to flash
   when a backward has made it. Compute waits when a later backward adds to it: it is read, and written
   again. With updates in ``step()`` these begin when backward has ended: weights are read once more, and
   gradients with their records. If the program clips gradients, those on flash are read before that for
   the norm, and then read, scaled and written.
4. On a CPU the arithmetic of updates delays compute by as much: both use the same cores.
5. The step ends when everything is written: the next one needs the weights and the channels.
6. With several ranks, weights of which each rank has a part are gathered over the network once they are
   read, also those that stay. A gradient is reduced before its update; if it is divided among ranks, the
   whole of it has memory until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

from penstock.plan.convolution import with_algorithms
from penstock.plan.machine import Machine
from penstock.plan.plan import Plan
from penstock.plan.profile import Event, Profile
from penstock.plan.replay.joins import JOIN, with_joins
from penstock.plan.replay.lanes import ReplayLane
from penstock.plan.replay.moves import FLASH, HOST, NETWORK, Channels, Moves, channels_of, moves_of
from penstock.plan.replay.occupancy import HeldBytes
from penstock.plan.replay.recompute import recomputed_segments, with_drops
from penstock.plan.replay.step_moves import StepSlots, WaitingGradient, WeightUpdate, step_slots
from penstock.plan.replay.walk import ABSENT, FREED, PREFETCHED, UNNEEDED, Walk
from penstock.plan.residency import Segment
from penstock.plan.weights import ModuleWeights, StepBytes, WeightsChoice

_RELEASE: Final = JOIN + 1
"""Event: a use of weights ends."""
_UPDATE: Final = JOIN + 2
"""Event: a gradient is final; the slot is the gradient's."""
_GRADIENT: Final = JOIN + 3
"""Event: a gradient begins."""
_SPILL: Final = JOIN + 4
"""Event: a backward has made a gradient that waits on flash; the slot is that of its memory."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step with weights on flash, on paper. Times are integer nanoseconds.

    ``step_ns`` is the sum of ``compute_ns``, ``update_delay_ns``, ``interference_ns``, ``stall_ns`` and
    ``tail_ns``.
    """

    step_ns: int
    """Time of the whole step, until the last write has ended."""
    compute_ns: int
    """Time of forward and backward, with everything that the plan recomputes."""
    update_delay_ns: int
    """Compute time lost to the arithmetic of updates; 0 if the device does not compute them."""
    interference_ns: int
    """Compute time lost because bytes moved meanwhile."""
    room_ns: int
    """Waits for memory."""
    demand_ns: int
    """Waits for reads that had not begun."""
    late_ns: int
    """Waits for reads that had begun."""
    tail_ns: int
    """Time of updates after the end of backward; of all updates, if ``step()`` makes them."""
    update_ns: int
    """Time of the arithmetic of updates."""
    read_ns: int
    """Time for which reads occupy flash."""
    write_ns: int
    """Time for which writes occupy flash."""
    link_ns: int
    """Time for which the busier direction of the link is occupied."""
    network_ns: int
    """Time for which the network is occupied; 0 if it is not used, or its bandwidth is not known."""
    moved: StepBytes
    """Bytes of weights, records and gradients that moved."""
    activations_read: int
    """Bytes of saved tensors that were read from flash; the next were written to it."""
    activations_written: int
    peak_bytes: int
    """Most memory in use by saved tensors, weights that come and go, gradients and updates."""
    tier_peak_bytes: tuple[int, int]
    """Most bytes of saved tensors in host memory and on flash."""
    feasible: bool
    """True if memory, window included, was never exceeded."""

    @property
    def stall_ns(self) -> int:
        """Total of all waits before the end of backward."""
        return self.room_ns + self.demand_ns + self.late_ns


def replay_step(
    profile: Profile,
    plan: Plan,
    machine: Machine,
    weights: Sequence[ModuleWeights],
    choice: WeightsChoice,
) -> ReplayedStep:
    """Simulate one step of a plan for saved tensors, with weights as chosen. Pure.

    Args:
        profile: The step, with the operators to which the weights refer.
        plan: The plan for saved tensors. Its device budget is for these alone.
        machine: The channels' speeds.
        weights: All weights.
        choice: Those that stay, and the window of the others.
    """
    profile = with_algorithms(profile, machine, plan.workspace_limits)
    slots = step_slots(profile, machine, weights, choice)
    moves = moves_of(slots.profile, plan, machine)
    slots.fill(moves, machine)
    channels = channels_of(moves, machine, update_ns=slots.update_times())
    segments = recomputed_segments(profile, plan, moves.action)
    walk = StepWalk(profile, plan, moves, channels, segments, machine, slots, choice.window_bytes)
    walk.run()
    moved, saved_read, saved_written = _moved(slots, moves, channels)
    lanes_in = [lane for tier, lane in channels.back.items() if tier != NETWORK]
    lanes_in += [channels.update_in] if channels.update_in is not None else []
    read_ns, write_ns = (
        _busy_ns(lanes, times)
        for lanes, times in (
            (lanes_in, moves.flash_in_ns),
            (channels.out.values(), moves.flash_out_ns),
        )
    )
    link_ns = max(
        _busy_ns(lanes_in, moves.link_in_ns), _busy_ns(channels.out.values(), moves.link_out_ns)
    )
    network_ns = [moves.network_ns.get(i, 0) for i in range(len(moves.action))]
    return ReplayedStep(
        step_ns=walk.now_ns,
        compute_ns=walk.computed_ns + walk.recompute_ns,
        update_delay_ns=walk.update_delay_ns,
        interference_ns=walk.interference_ns,
        room_ns=walk.budget_ns,
        demand_ns=walk.demand_ns,
        late_ns=walk.late_ns,
        tail_ns=walk.tail_ns,
        update_ns=sum(one.took_ns for one in slots.updates),
        read_ns=read_ns,
        write_ns=write_ns,
        link_ns=link_ns,
        network_ns=_busy_ns([channels.back.get(NETWORK), channels.reduce], network_ns),
        moved=moved,
        activations_read=saved_read,
        activations_written=saved_written,
        peak_bytes=walk.held.peak_bytes,
        tier_peak_bytes=(walk.held.tier_peak[0], walk.held.tier_peak[1]),
        feasible=walk.held.peak_bytes <= walk.held.limit,
    )


def _moved(slots: StepSlots, moves: Moves, channels: Channels) -> tuple[StepBytes, int, int]:
    """Return the bytes of weights, records and gradients, and of saved tensors read and written."""
    back = channels.back[FLASH].log
    out = channels.out[FLASH].log
    read = [i for _, i in back]
    gradients = slots.gradient_bytes
    pieces = [i for one in slots.updates for i in one.pieces]
    updated = {*pieces}
    states = sum(slots.read_bytes[i] - gradients[i] for i in pieces)
    host_written = sum(slots.host_written.get(i, 0) for i in pieces)
    from_host = channels.back.get(HOST)
    moved = StepBytes(
        host_read=sum(
            slots.host_read.get(i, 0) for _, i in ([] if from_host is None else from_host.log)
        ),
        host_written=host_written,
        weights_read=sum(
            slots.read_bytes[i] for i in read if i >= slots.first and i not in gradients
        ),
        network=sum(
            slots.network_bytes[i]
            for lane in (channels.back.get(NETWORK), channels.reduce)
            if lane is not None
            for _, i in lane.log
        ),
        weights_written=sum(slots.write_bytes[i] for i in pieces) - states - host_written,
        records_read=states,
        records_written=states,
        gradients_read=sum(gradients[i] for i in [*read, *pieces] if i in gradients),
        gradients_written=sum(gradients[i] for _, i in out if i in gradients and i not in updated),
    )
    saved = moves.moved_bytes
    return (
        moved,
        sum(saved[i] for i in read if i < slots.first),
        sum(saved[i] for _, i in out if i < slots.first),
    )


def _busy_ns(lanes: Iterable[ReplayLane | None], times: Sequence[int]) -> int:
    return sum(times[i] for lane in lanes if lane is not None for _, i in lane.log)


class StepWalk(Walk):
    """Simulation of one step with weights. ``run`` it once, then read the attributes.

    Attributes:
        update_delay_ns: Compute time lost to the arithmetic of updates.
        tail_ns: Time from the end of backward until the last write has ended.
    """

    def __init__(  # noqa: PLR0917  (as the base, and what it adds)
        self,
        profile: Profile,
        plan: Plan,
        moves: Moves,
        channels: Channels,
        segments: Sequence[Segment],
        machine: Machine,
        slots: StepSlots,
        window_bytes: int,
    ) -> None:
        """Prepare.

        Args:
            profile: The step without the slots of weights.
            plan: The plan for saved tensors.
            moves: The moves of all slots.
            channels: Channels with lanes for updates.
            segments: What is recomputed.
            machine: The machine.
            slots: The slots of weights.
            window_bytes: Most bytes of weights that are read, of gradients, and of updates.
        """
        self._saved_bytes = plan.budgets.device_bytes
        limit = self._saved_bytes + window_bytes
        roomy = replace(plan, budgets=replace(plan.budgets, device_bytes=limit))
        super().__init__(
            slots.profile, roomy, moves, channels, segments, interference=machine.interference
        )
        self._window = plan.budgets.device_bytes if plan.joined else plan.window_bytes
        self._own = profile
        self._slots = slots
        self._first = slots.first
        self._weights_window = window_bytes
        loads = bytearray(len(slots.profile.slots))
        for load in slots.loads:
            loads[load.slot] = 1
            self._state[load.slot] = ABSENT
        self.held: HeldWithWeights = HeldWithWeights(
            slots.profile, moves, limit, slots.first, loads
        )
        self._on_cpu = profile.device == "cpu"
        self._read_work_ns, self._write_work_ns = machine.read_work_ns, machine.write_work_ns
        self._place = {load.slot: place for place, load in enumerate(slots.loads)}
        self._update_of = {one.gradient: one for one in slots.updates}
        self._waiting_of = {one.slot: one for one in slots.waiting}
        self._needed = slots.needed()
        self._begin_of = {load: at for at, (_, _, load) in enumerate(self._needed) if load >= 0}
        self._begun = 0
        self.update_delay_ns = self.tail_ns = 0

    def run(self) -> None:
        """Simulate the whole step, until everything is written."""
        super().run()
        end = self._step(self.now_ns)
        written = self._channels.written
        for one in self._slots.updates:
            for piece in one.pieces:
                end = max(end, self._lanes.end_of(piece, written))
        end = max(end, self._lanes.busy_until())
        self.tail_ns = end - self.now_ns
        self.now_ns = end
        self._settle(end)

    def _step(self, now: int) -> int:
        """Make the updates of ``step()``, and return when the last of them is queued.

        Waits are part of the tail, and no compute is delayed.
        """
        counted = self.budget_ns, self.demand_ns, self.late_ns, self.interference_ns
        _, end_ns = self._own.axis_ns
        for clipped in self._slots.clipped:
            now = self._read_gradient(clipped.norm, now)
        for clipped in self._slots.clipped:
            now = self._wait_for_room(self.held.sizes[clipped.out], 0, now)
            now = self._write_gradient(clipped.out, self._read_gradient(clipped.back, now))
        loads = {load.slot for load in self._slots.loads if load.begin_ns > end_ns}
        for one in self._slots.updates:
            if not one.in_step:
                continue
            if one.begin_ns > end_ns:
                now = self._begin_gradient(one.gradient, now)
            if one.load in loads:
                now = self._use(one.load, now)
            now = self._update(one, now)
        self.budget_ns, self.demand_ns, self.late_ns, self.interference_ns = counted
        return now

    def _events(self) -> Sequence[tuple[int, int, int]]:
        """Return the events of saved tensors and of weights; at one time ends come first."""
        saved = with_drops(self._own, self._segments)
        if self._joined:
            saved = with_joins(self._own, self._moves.action, saved)
        found: list[tuple[int, int, int]] = [
            (load.end_ns, _RELEASE, load.slot) for load in self._slots.loads if not load.handed_over
        ]
        updates, waiting = self._slots.updates, self._slots.waiting
        found += [(one.end_ns, _UPDATE, one.gradient) for one in updates if not one.in_step]
        found += [(one.end_ns, _SPILL, one.slot) for one in waiting]
        begins: list[tuple[int, int, int]] = []
        begins += [(one.begin_ns, _GRADIENT, one.gradient) for one in updates]
        begins += [(one.begin_ns, _GRADIENT, one.slot) for one in waiting]
        begins += [(load.begin_ns, Event.USE, load.slot) for load in self._slots.loads]
        _, end_ns = self._own.axis_ns
        found += [begin for begin in begins if begin[0] <= end_ns]  # others are in ``_step``
        return sorted([*found, *saved], key=itemgetter(0))  # stable

    def _more(self, event: int, i: int, now: int) -> int:
        if event == _RELEASE:
            self._release(i, now)
        elif event == _GRADIENT:
            now = self._begin_gradient(i, now)
        elif event == _SPILL:
            now = self._spill(self._waiting_of[i], now)
        else:
            now = self._update(self._update_of[i], now)
        return now

    def _begin_gradient(self, i: int, now: int) -> int:
        """Return when there is memory for a gradient."""
        self._begun += 1
        now = self._wait_for_room(self.held.sizes[i], self._small_at_need[i], now)
        self.held.allocate(i, now)
        return now

    def _spill(self, one: WaitingGradient, now: int) -> int:
        """Write a gradient to flash, with what was there of it, and return when compute goes on."""
        now = self._read_gradient(one.back, now)
        self.held.free(one.slot, now)
        return self._write_gradient(one.out, now)

    def _write_gradient(self, i: int, now: int) -> int:
        """Begin to write a gradient, and return when compute goes on."""
        self._state[i] = UNNEEDED  # its memory is free once it is written
        self.held.allocate(i, now)
        self._channels.out[FLASH].add(now, i)
        self._slowed = self._slower > 0
        return self._worked(self._write_work_ns(self._slots.write_bytes[i]), now)

    def _read_gradient(self, i: int | None, now: int) -> int:
        """Read what is on flash of a gradient while compute waits, and return the end."""
        if i is None:
            return now
        self._lanes.advance(now)
        self._slowed = self._slower > 0
        now = self._worked(self._read_work_ns(self._slots.read_bytes[i]), now)
        self._channels.back[FLASH].add_first(now, i)
        there = max(now, self._lanes.end_of(i, self._channels.arrived))
        self.demand_ns += self._waited(now, there)
        return there

    def _use(self, i: int, now: int) -> int:
        if i >= self._first:
            self._begun += 1
        return super()._use(i, now)

    def _release(self, i: int, now: int) -> None:
        self.held.read_back -= self.held.sizes[i]
        self._state[i] = FREED
        self.held.free(i, now)

    def _update(self, one: WeightUpdate, now: int) -> int:
        """Queue an update, and return when compute goes on."""
        now = self._read_gradient(one.back, now)
        if one.load is not None:
            self._release(one.load, now)
        self.held.free(one.gradient, now)
        update_in, update = self._channels.update_in, self._channels.update
        assert update_in is not None
        assert update is not None
        reduce = self._channels.reduce
        for piece in (*one.pieces, *(() if one.whole is None else (one.whole,))):
            self._state[piece] = UNNEEDED  # its memory is free once it is written
            self.held.allocate(piece, now)
            if piece in self._slots.network_bytes and reduce is not None:
                reduce.add(now, piece)
            else:
                (update_in if self._slots.read_bytes[piece] else update).add(now, piece)
        self._slowed = self._slower > 0
        now = self._worked(one.work_ns, now)
        if self._on_cpu and not one.in_step:
            self.update_delay_ns += one.took_ns
            self.delays.append((self._clock_ns, one.took_ns))
            now += one.took_ns
        return now

    def _may_read(self, i: int, asked: int, now: int) -> bool:
        nbytes, held = self.held.sizes[i], self.held
        if i >= self._first:
            if held.weights + nbytes > self._weights_window or not self._fits_later(i):
                return False
            share, used = held.limit, held.used
        else:
            if not self._order.due(i) or held.read_back - held.loaded + nbytes > self._window:
                return False
            share, used = self._saved_bytes, held.used - held.weights
        beside = self._order.beside(PREFETCHED, self._state)
        small = max(self._small_at_need[asked], self._small_at_need[i], beside)
        if used + nbytes + small > share:
            self._settle(now)
            used = held.used - (0 if i >= self._first else held.weights)
        return used + nbytes + small <= share

    def _fits_later(self, i: int) -> bool:
        """Return True if reading ahead leaves room for all that is needed before this load is used."""
        at, ahead = self._begin_of[self._place[i]], 0
        while at >= self._begun:
            _, level, load = self._needed[at]
            if level + ahead > self._weights_window:
                return False
            ahead += self._slots.loads[load].nbytes if load >= 0 else 0
            at -= 1
        return True


class HeldWithWeights(HeldBytes):
    """Account of bytes that also counts those of weights.

    Attributes:
        weights: Bytes of weights that were read, of gradients, and of updates.
        loaded: Bytes of these in targets of reads.
    """

    __slots__ = ("_first", "_loads", "loaded", "weights")

    def __init__(
        self, profile: Profile, moves: Moves, limit: int, first: int, loads: Sequence[int]
    ) -> None:
        """Count slots from ``first`` on as weights, and those of ``loads`` as read."""
        super().__init__(profile, moves, limit)
        self._first = first
        self._loads = loads
        self.weights = self.loaded = 0

    def allocate(self, i: int, now: int) -> None:
        """Add a slot to the device."""
        super().allocate(i, now)
        if i >= self._first:
            self.weights += self.sizes[i]
            self.loaded += self.sizes[i] * self._loads[i]

    def free(self, i: int, now: int) -> None:
        """Remove a slot from the device."""
        super().free(i, now)
        if i >= self._first:
            self.weights -= self.sizes[i]
            self.loaded -= self.sizes[i] * self._loads[i]
