"""Slots of a replay that stand for weights: one for each read, each gradient, each piece of an update."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.core.units import MIB
from penstock.plan.machine import Machine
from penstock.plan.profile import Event, PassProfile, Profile, SlotProfile
from penstock.plan.replay.moves import FLASH, HOST, NETWORK, Moves
from penstock.plan.residency import OFFLOADED
from penstock.plan.slots import SlotKey
from penstock.plan.weights import ModuleWeights, WeightsChoice, WeightUse

PIECE_BYTES: Final = 32 * MIB
"""Least bytes that a piece of an update reads and writes, if there are several."""
MOST_PIECES: Final = 8
"""Pieces of an update: what the arithmetic of one overlaps with the transfers of others."""


@dataclass(slots=True)
class WeightLoad:
    """One read of a module's weights for one use."""

    slot: int
    weights: ModuleWeights
    begin_ns: int
    end_ns: int
    nbytes: int
    handed_over: bool
    """True if an update takes the weights over when the use ends."""


@dataclass(slots=True)
class WeightUpdate:
    """Gradient of one module, and the update that begins when it is final."""

    gradient: int
    """Slot of the gradient."""
    begin_ns: int
    end_ns: int
    nbytes: int
    """Bytes of the gradient."""
    load: int | None
    """Slot of the load that it takes over; None: the weights are kept."""
    took_ns: int
    """Time of its arithmetic."""
    back: int | None = None
    """Slot of what earlier backwards have made of the gradient, which is read when this one is over;
    None: nothing of it is on flash, or its pieces read it."""
    in_step: bool = False
    """True if it is made in ``step()``, after the last backward."""
    work_ns: int = 0
    """Compute time lost to its transfers."""
    pieces: tuple[int, ...] = ()
    """Slots of the pieces that flash reads and writes."""
    whole: int | None = None
    """Slot of the gradient of all ranks, until each has the sum of its part; None: it is not divided."""


@dataclass(slots=True)
class WaitingGradient:
    """Gradient of one module, made by one backward, that waits on flash from its end."""

    slot: int
    """Slot of its memory in backward; with what earlier backwards have made of it, if they have."""
    begin_ns: int
    end_ns: int
    nbytes: int
    """Bytes of ``slot``."""
    back: int | None
    """Slot of what earlier backwards have made, which is read when this one is over; None: nothing."""
    out: int
    """Slot of the write."""


@dataclass(slots=True)
class ClippedGradient:
    """Gradient of one module on flash that the program clips, after the last backward."""

    norm: int
    """Slot of the read for the norm."""
    back: int
    """Slot of the read to scale it."""
    out: int
    """Slot of the write."""


@dataclass(slots=True)
class StepSlots:
    """Slots beyond those of the profile, in the order of their indices."""

    profile: Profile
    """The profile with these slots, which belong to a pass of their own."""
    first: int
    """Index of the first of them."""
    loads: tuple[WeightLoad, ...]
    """Reads of weights in the order of need."""
    updates: tuple[WeightUpdate, ...]
    waiting: tuple[WaitingGradient, ...] = ()
    clipped: tuple[ClippedGradient, ...] = ()
    gradient_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes of gradients that each moves, from or to flash: all it moves, or part of that."""
    read_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that each moves from flash; the next is to flash."""
    write_bytes: dict[int, int] = field(default_factory=dict)
    update_ns: dict[int, int] = field(default_factory=dict)
    """Time of the arithmetic of each piece."""
    network_bytes: dict[int, int] = field(default_factory=dict)
    """Bytes that come from other ranks."""
    host_read: dict[int, int] = field(default_factory=dict)
    """Bytes of ``read_bytes`` that come from host memory; the next, of ``write_bytes``, go there."""
    host_written: dict[int, int] = field(default_factory=dict)

    def fill(self, moves: Moves, machine: Machine) -> None:
        """Enter the bytes and times of these slots."""
        for load in self.loads:
            moves.action[load.slot] = OFFLOADED
            nbytes = self.read_bytes.get(load.slot, 0)
            here = HOST if load.slot in self.host_read else FLASH
            moves.tier[load.slot] = here if nbytes else NETWORK
            moves.read_work_ns[load.slot] = machine.read_work_ns(nbytes) if nbytes else 0
        for i, nbytes in self.read_bytes.items():
            flash = nbytes - self.host_read.get(i, 0)
            moves.flash_in_ns[i] = _busy_ns(machine, flash, writing=False)
            linked = nbytes if machine.flash_over_link else nbytes - flash
            moves.link_in_ns[i] = round(linked / machine.host_read_bytes_per_s * 1e9)
        for i, nbytes in self.write_bytes.items():
            flash = nbytes - self.host_written.get(i, 0)
            moves.flash_out_ns[i] = _busy_ns(machine, flash, writing=True)
            linked = nbytes if machine.flash_over_link else nbytes - flash
            moves.link_out_ns[i] = round(linked / machine.host_write_bytes_per_s * 1e9)

        for i, nbytes in self.network_bytes.items():
            moves.network_ns[i] = machine.network_ns(nbytes)
        for one in self.updates:
            if one.whole is not None:
                moves.tier[one.whole] = NETWORK

    def update_times(self) -> list[int]:
        """Return the time of the arithmetic of every slot; 0 for those that are no pieces."""
        return [self.update_ns.get(i, 0) for i in range(len(self.profile.slots))]

    def needed(self) -> list[tuple[int, int, int]]:
        """Return, for each begin of a load or gradient, (time, bytes in use from then on, its load).

        In the order of time. The load is its index in ``loads``; -1 for a gradient.
        """
        gradients = [(one.begin_ns, one.end_ns, one.nbytes) for one in self.updates]
        gradients += [(one.begin_ns, one.end_ns, one.nbytes) for one in self.waiting]
        return needed([(one.begin_ns, one.end_ns, one.nbytes) for one in self.loads], gradients)


def needed(
    loads: Sequence[tuple[int, int, int]], gradients: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Return (time, bytes in use from then on, load) of each begin; each is (begin, end, bytes)."""
    begins = [(begin, index) for index, (begin, _, _) in enumerate(loads)]
    begins += [(begin, -1) for begin, _, _ in gradients]
    changes = sorted(
        change
        for begin, end, nbytes in (*loads, *gradients)
        for change in ((begin, nbytes), (end, -nbytes))
    )
    times, levels, level = [], [], 0
    for when, delta in changes:
        level += delta
        times.append(when)
        levels.append(level)
    return [(when, levels[bisect_right(times, when) - 1], index) for when, index in sorted(begins)]


def step_slots(
    profile: Profile, machine: Machine, weights: Sequence[ModuleWeights], choice: WeightsChoice
) -> StepSlots:
    """Make the slots of all weights that are read or updated in a step of a profile.

    Args:
        profile: The step, with the operators to which the weights refer.
        machine: The machine.
        weights: Its weights.
        choice: Which of them stay in memory.
    """
    maker = _SlotMaker(profile, machine)
    for one in weights:
        maker.add(one, choice)
    return maker.made()


class _SlotMaker:
    def __init__(self, profile: Profile, machine: Machine) -> None:
        self._given = profile
        self._machine = machine
        self._pass = max((one.index for one in profile.passes), default=0) + 1
        self._slots: list[SlotProfile] = []
        self._loads: list[WeightLoad] = []
        self._updates: list[WeightUpdate] = []
        self._waiting: list[WaitingGradient] = []
        self._clipped: list[ClippedGradient] = []
        self._end_ns = profile.axis_ns[1]
        self._made = StepSlots(profile, len(profile.slots), (), ())

    def add(self, one: ModuleWeights, choice: WeightsChoice) -> None:
        streamed = one.module not in choice.kept
        handed, reads = None, choice.loads_of(one)
        for use in one.uses if one.gathered else reads:
            load = self._load(one, use, kept=use not in reads)
            if load.handed_over:
                handed = load.slot
        if one.updated:
            states = 0 if one.module in choice.cached else one.state_bytes
            spilled = one.module in choice.spilled and one.gradient_writes > 0
            self._update(one, handed, states, streamed=streamed, spilled=spilled)
            if spilled and choice.clips:
                self._clipped.append(
                    ClippedGradient(
                        self._back(one, self._end_ns),
                        self._back(one, self._end_ns),
                        self._out(one, self._end_ns),
                    )
                )

    def made(self) -> StepSlots:
        begin, end = self._given.axis_ns
        own = PassProfile(self._pass, begin, end, end)
        moments = (
            slot.saved_at_ns if slot.needed_at_ns is None else slot.needed_at_ns
            for slot in self._slots
        )
        beside = [
            replace(slot, small_bytes=small, small_bytes_at_need=small)
            for slot, small in zip(self._slots, _small_at(self._given, moments), strict=True)
        ]
        profile = replace(
            self._given,
            slots=(*self._given.slots, *beside),
            passes=(*self._given.passes, own),
        )
        loads = tuple(sorted(self._loads, key=lambda load: (load.begin_ns, load.slot)))
        return replace(
            self._made,
            profile=profile,
            loads=loads,
            updates=tuple(sorted(self._updates, key=lambda update: update.end_ns)),
            waiting=tuple(self._waiting),
            clipped=tuple(self._clipped),
        )

    def _slot(self, module: str, nbytes: int, begin_ns: int, needed_ns: int | None) -> int:
        key = SlotKey(
            f"{module} (weights)", len(self._slots), max(1, nbytes)
        )  # a trained bias alone
        begin_ns = min(begin_ns, self._end_ns)
        self._slots.append(
            SlotProfile(key, self._pass, begin_ns, needed_ns, "weights", False, "uint8")
        )
        return self._made.first + len(self._slots) - 1

    def _load(self, one: ModuleWeights, use: WeightUse, *, kept: bool) -> WeightLoad:
        begin_ns, end_ns = self._span_ns(use)
        axis_ns, _ = self._given.axis_ns
        held = one.held_bytes(kept=kept)
        slot = self._slot(one.module, held, axis_ns, min(begin_ns, self._end_ns))
        handed = one.updated and one.gradient is not None and one.gradient.last == use.last
        load = WeightLoad(slot, one, begin_ns, end_ns, held, handed)
        if not kept:
            self._made.read_bytes[slot] = one.read_bytes
            if one.on_host:
                self._made.host_read[slot] = one.read_bytes
        if one.gathered:
            self._made.network_bytes[slot] = one.gathered_bytes
        self._loads.append(load)
        return load

    def _span_ns(self, use: WeightUse) -> tuple[int, int]:
        """Return begin and end in ns; updates in ``step()`` have a nanosecond each, after the step."""
        operators = self._given.operators
        first, last = use.first - len(operators), use.last - len(operators)
        begin_ns = operators[use.first].start_ns if first < 0 else self._end_ns + 1 + first
        end_ns = operators[use.last].end_ns if last < 0 else self._end_ns + 2 + last
        return begin_ns, max(end_ns, begin_ns + 1)

    def _update(
        self,
        one: ModuleWeights,
        load: int | None,
        states: int,
        *,
        streamed: bool,
        spilled: bool,
    ) -> None:
        assert one.gradient is not None
        in_step, nbytes, back = one.is_updated_in_step, one.trained_bytes, None
        begin_ns, end_ns = self._span_ns(one.gradient)
        if spilled:
            self._wait(one, one.backwards[: one.gradient_writes])
            begin_ns, _ = self._span_ns(one.uses[-1] if in_step else one.backwards[-1])
        if spilled and not in_step:
            nbytes, back = 2 * nbytes, self._back(one, end_ns)
        gradient = self._slot(one.module, nbytes, begin_ns, None)
        took_ns = update_ns(one, self._machine)
        update = WeightUpdate(
            gradient, begin_ns, end_ns, nbytes, load, took_ns, back=back, in_step=in_step
        )
        self._updates.append(update)
        written = one.written_bytes * streamed
        returned = one.gradient_bytes if spilled and in_step else 0
        moved = 2 * states + written + returned
        if not moved + one.reduced_bytes + took_ns * in_step:
            return
        held = one.part_of(one.trained_bytes) + one.read_bytes * streamed
        count = max(1, min(moved // PIECE_BYTES, MOST_PIECES, held))
        parts = zip(
            _divided(held, count),
            _divided(states + returned, count),
            _divided(states + written, count),
            _divided(written * one.on_host, count),
            _divided(took_ns, count),
            _divided(one.reduced_bytes, count),
            _divided(returned, count),
            strict=True,
        )
        pieces = []
        for piece_bytes, read, write, to_host, took, reduced, of_gradient in parts:
            slot = self._slot(one.module, piece_bytes, end_ns, None)
            self._made.read_bytes[slot] = read
            self._made.gradient_bytes[slot] = of_gradient
            self._made.write_bytes[slot] = write
            if to_host:
                self._made.host_written[slot] = to_host
            self._made.update_ns[slot] = took
            if one.reduced_bytes:
                self._made.network_bytes[slot] = reduced
            update.work_ns += self._machine.read_work_ns(read) if read else 0
            update.work_ns += self._machine.write_work_ns(write) if write else 0
            pieces.append(slot)
        update.pieces = tuple(pieces)
        if one.gathered:
            update.whole = self._slot(one.module, one.trained_bytes, end_ns, None)
            self._made.network_bytes[update.whole] = 0

    def _wait(self, one: ModuleWeights, backwards: Sequence[WeightUse]) -> None:
        """Let what each of these backwards makes of a gradient wait on flash."""
        for number, use in enumerate(backwards):
            begin_ns, end_ns = self._span_ns(use)
            nbytes = one.trained_bytes * (2 if number else 1)
            slot = self._slot(one.module, nbytes, begin_ns, None)
            back = self._back(one, end_ns) if number else None
            out = self._out(one, end_ns)
            self._waiting.append(WaitingGradient(slot, begin_ns, end_ns, nbytes, back, out))

    def _back(self, one: ModuleWeights, end_ns: int) -> int:
        """Return a slot of what a gradient has on flash, which is read; its memory is another slot's."""
        slot = self._slot(one.module, one.trained_bytes, end_ns, None)
        self._made.read_bytes[slot] = self._made.gradient_bytes[slot] = one.gradient_bytes
        return slot

    def _out(self, one: ModuleWeights, end_ns: int) -> int:
        """Return a slot of a gradient that is written to flash."""
        slot = self._slot(one.module, one.trained_bytes, end_ns, None)
        self._made.write_bytes[slot] = self._made.gradient_bytes[slot] = one.gradient_bytes
        return slot


def update_ns(one: ModuleWeights, machine: Machine) -> int:
    """Return the time of the arithmetic of a module's update on one rank.

    If it was not measured, it is that of its memory traffic: weights, states and records pass through
    memory both ways, gradients one way. 0 if the machine's memory bandwidth is not known either.
    """
    if not one.updated:
        return 0
    if one.update_ns or machine.compute is None:
        return one.update_ns
    traffic = 3 * one.part_of(one.trained_bytes) + 2 * one.record_bytes
    return round(traffic / machine.compute.memory_bytes_per_s * 1e9)


def _small_at(profile: Profile, times: Iterable[int]) -> Iterator[int]:
    """Yield the bytes beside the slots at each time: those of the last save or need until then."""
    moments, levels = [], []
    for when, event, i in profile.steps:
        if event is not Event.FREE:
            moments.append(when)
            levels.append(profile.small_at(event, i))
    for when in times:
        place = bisect_right(moments, when) - 1
        yield levels[place] if place >= 0 else profile.small_bytes


def _divided(total: int, count: int) -> list[int]:
    """Divide a number into parts that differ by one at most."""
    each, rest = divmod(total, count)
    return [each + (part < rest) for part in range(count)]


def _busy_ns(machine: Machine, nbytes: int, *, writing: bool) -> int:
    return round(machine.flash_busy_s(nbytes, writing=writing) * 1e9) if nbytes else 0
