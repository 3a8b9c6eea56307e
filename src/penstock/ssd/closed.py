"""How long a weight update takes, in closed form: the bound of each resource, and no queues.

The formulas, with P parameters in U = P / k units of k words; C channels of W dies; x the time of a page
on the bus; tE' an erase shared by the pages of a block; WA write amplification; eta I/O efficiency:

- host: ``T = (b + g) P / (eta Br) + b P / (eta Bw) + P / rho``, where Br and Bw are the lower of the link
  and of all channels, and the phases follow one another unless ``host.overlap``;
- in the drive: each unit occupies its die for D and its channel for X, so a channel does
  ``min(W / (D + X), 1 / X)`` units in a second, and ``T = U / (C rate)``;
- controller: ``D = tR + (tPROG + tE') WA``, ``X = n x (1 + WA)``: states go over the bus both ways;
- die: ``D`` is longer by ``q k d / r``, q passes over k words, d byte times each; ``X = x (g + w) / 4``:
  only the gradient and the new weight cross the bus;
- split: dies update the share of units for which both ways end at once.

Reads of garbage collection take no time here; the engines count them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.ssd import energy
from penstock.ssd.device import PS_PER_S, WORD_BYTES, Device
from penstock.ssd.energy import Ledger
from penstock.ssd.update import Bytes, Gradient, Update, drive_bytes, host_bytes
from penstock.ssd.wear import Wear, wear_of

_NS: float = 1e-9


class Placement(enum.StrEnum):
    """Where states meet gradients."""

    HOST = "host"
    """Offloading: states go to the host's processor and back."""
    CONTROLLER = "controller"
    """In the drive's controller, over the channels."""
    DIE = "die"
    """Beside the page registers, in processing elements of the flash dies."""
    SPLIT = "split"
    """Some units on the dies, some in the controller."""


@dataclass(frozen=True, slots=True)
class Step:
    """One weight update on one device."""

    device: str
    placement: Placement
    time_s: float
    busy_s: tuple[tuple[str, float], ...]
    """(resource, seconds for which it works): its mean over the channels, or dies, of the drive."""
    on_die: float
    """Share of units that dies update."""
    moved: Bytes
    ledger: Ledger
    wear: Wear

    def use(self, resource: str) -> float:
        """Share of the time for which a resource works."""
        return dict(self.busy_s)[resource] / self.time_s

    @property
    def bound_by(self) -> str:
        """The resource that works longest."""
        return max(self.busy_s, key=lambda one: one[1])[0]


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of a unit."""

    array: float
    """tR, tPROG and its share of an erase."""
    compute: float
    bus: float
    die: float
    """All that its die is not free for, without the bus."""
    turn: float
    """What a die takes from one unit to the next."""


def step(device: Device, update: Update, placement: Placement) -> Step:
    """Time, bytes, energy and wear of one step. Raises ConfigError for what makes no sense."""
    if placement is Placement.HOST:
        return _host(device, update)
    die, controller = _on_die(device, update), _in_controller(device, update)
    share = {Placement.DIE: 1.0, Placement.CONTROLLER: 0.0}.get(placement)
    if share is None:
        share = _best_share(device, die, controller)
    return _in_drive(device, update, placement, share)


def steps(device: Device, update: Update, placements: Sequence[Placement]) -> tuple[Step, ...]:
    """``step`` for each placement."""
    return tuple(step(device, update, each) for each in placements)


def read_bytes_per_s(device: Device) -> float:
    """At which all channels deliver pages that are read in sequence, the link not counted."""
    geometry = device.geometry
    together = geometry.planes_per_die if device.channel.multi_plane else 1
    bus = device.page_bus_ps / PS_PER_S
    array = device.cell.mean_read_ns * _NS
    turn = max(array, together * bus) if device.channel.cache_read else array + together * bus
    return (
        geometry.channels * geometry.page_bytes * min(1 / bus, _workers(device) * together / turn)
    )


def program_bytes_per_s(device: Device) -> float:
    """At which all channels take pages that are programmed in sequence, erases included."""
    geometry = device.geometry
    together = geometry.planes_per_die if device.channel.multi_plane else 1
    bus = device.page_bus_ps / PS_PER_S
    array = device.cell.mean_program_ns * _NS + _erase_s(device)
    turn = max(array, together * bus) if device.channel.cache_program else array + together * bus
    return (
        geometry.channels * geometry.page_bytes * min(1 / bus, _workers(device) * together / turn)
    )


def _workers(device: Device) -> int:
    """W: what works at the same time on a channel."""
    geometry = device.geometry
    return (
        geometry.dies_per_channel if device.channel.dies_in_parallel else geometry.chips_per_channel
    )


def _erase_s(device: Device) -> float:
    """tE': of a page, its share of erasing the block."""
    return device.cell.erase_ns * _NS / device.geometry.pages_per_block


def _host(device: Device, update: Update) -> Step:
    host, moved = device.host, host_bytes(update)
    slower = update.write_amplification
    up = min(device.link.up_bytes_per_s, read_bytes_per_s(device)) * host.io_efficiency
    down = min(device.link.down_bytes_per_s, program_bytes_per_s(device) / slower)
    down *= host.io_efficiency
    channels = device.geometry.channels * device.channel.bytes_per_s
    bus = moved.channel / channels
    reading = moved.link_up / up
    # garbage collection goes over the channels while the host writes
    cleaning = (moved.channel - moved.link_up) / channels / host.io_efficiency
    writing = max(moved.link_down / down, cleaning)
    computing = update.parameters / host.parameters_per_s
    time_s = reading + writing + computing
    if host.overlap:
        time_s = max(reading, writing, computing, bus / host.io_efficiency)
    arrays = _arrays_s(device, moved)
    busy = (("read", reading), ("write", writing), ("processor", computing))
    return _finished(
        device,
        update,
        Placement.HOST,
        time_s=time_s,
        busy=(*busy, ("channel", bus), ("die", arrays)),
        share=0.0,
        moved=moved,
    )


def _arrays_s(device: Device, moved: Bytes) -> float:
    """For which the arrays of a die work, as many planes at once as can."""
    geometry, cell = device.geometry, device.cell
    together = geometry.planes_per_die if device.channel.multi_plane else 1
    at_once = geometry.channels * _workers(device) * together * geometry.page_bytes
    reading = moved.flash_read * cell.mean_read_ns * _NS
    return (
        reading + moved.flash_written * (cell.mean_program_ns * _NS + _erase_s(device))
    ) / at_once


def _in_drive(device: Device, update: Update, placement: Placement, share: float) -> Step:
    die, controller = _on_die(device, update), _in_controller(device, update)
    units, channels = update.units(device), device.geometry.channels
    moved = drive_bytes(update, on_die=share)
    bus, turn, busy_die = (
        share * getattr(die, name) + (1 - share) * getattr(controller, name)
        for name in ("bus", "turn", "die")
    )
    each = max(bus, turn / _workers(device))
    up = moved.link_up / device.link.up_bytes_per_s
    down = moved.link_down / device.link.down_bytes_per_s
    passes = len(update.rule.passes)
    words = (1 - share) * update.parameters * passes / device.unit.controller_words_per_s
    compute = share * die.compute / _workers(device)
    busy = (
        ("link up", up),
        ("link down", down),
        ("channel", units / channels * bus),
        ("die", units / channels * busy_die / _workers(device)),
        ("element", units / channels * compute),
        ("controller", words),
    )
    time_s = max(units / channels * each, up, down, words)
    return _finished(device, update, placement, time_s=time_s, busy=busy, share=share, moved=moved)


def _finished(
    device: Device,
    update: Update,
    placement: Placement,
    *,
    time_s: float,
    busy: tuple[tuple[str, float], ...],
    share: float,
    moved: Bytes,
) -> Step:
    ledger = energy.ledger(
        device, update, moved, time_s=time_s, on_host=placement is Placement.HOST, on_die=share
    )
    wear = wear_of(device, update, time_s)
    return Step(device.name, placement, time_s, busy, share, moved, ledger, wear)


def _best_share(device: Device, die: _Work, controller: _Work) -> float:
    """Of units on the die, so that the slower of bus and dies is as quick as can be.

    Both are linear in the share, so the best is at an end or where they cross.
    """
    workers = _workers(device)

    def slower(share: float) -> float:
        bus = share * die.bus + (1 - share) * controller.bus
        return max(bus, (share * die.turn + (1 - share) * controller.turn) / workers)

    candidates = [0.0, 1.0]
    lean = (die.bus - controller.bus) - (die.turn - controller.turn) / workers
    if lean:
        crossing = (controller.turn / workers - controller.bus) / lean
        if 0 < crossing < 1:
            candidates.append(crossing)
    return min(candidates, key=slower)


def _in_controller(device: Device, update: Update) -> _Work:
    """D and X of a unit whose states go to the controller and back."""
    planes = device.geometry.planes_per_die
    array, bus = _array(device, update, planes), 0.0
    page, wa = device.page_bus_ps / PS_PER_S, update.write_amplification
    pages = sum(size / WORD_BYTES for size in update.sizes)
    bus = pages * page * (1 + wa) + _commands(device, update, planes)
    if update.gradient is Gradient.PROGRAMMED:
        bus += update.gradient_bytes / WORD_BYTES * page * (1 + wa)
    return _Work(array, 0.0, bus, array, array + bus)


def _on_die(device: Device, update: Update) -> _Work:
    """D and X of a unit that is updated beside its page registers.

    The gradient's plane holds no state. The interface clock is the channel's, d byte times a word.
    """
    geometry, unit = device.geometry, device.unit
    planes = max(1, geometry.planes_per_die - 1)
    array = _array(device, update, planes)
    words = geometry.page_bytes // WORD_BYTES
    compute = len(update.rule.passes) * words * unit.divider / device.channel.bytes_per_s
    page = device.page_bus_ps / PS_PER_S
    bus = page * (update.gradient_bytes + update.returned_bytes) / WORD_BYTES
    bus += _commands(device, update, planes)
    die = max(array, compute) if unit.overlaps_array else array + compute
    return _Work(array, compute, bus, die, max(die, bus) if unit.double_buffered else die + bus)


def _rounds(device: Device, update: Update, planes: int) -> int:
    """Multi-plane operations that the pages of a unit's states need."""
    states = len(update.sizes)
    return -(-states // planes) if device.channel.multi_plane else states


def _array(device: Device, update: Update, planes: int) -> float:
    """``tR + (tPROG + tE') WA`` for each round; less where states are shorter than a word."""
    wa, cell = update.write_amplification, device.cell
    program = (cell.mean_program_ns * _NS + _erase_s(device)) * wa
    share = max(update.sizes) / WORD_BYTES
    array = _rounds(device, update, planes) * share * (cell.mean_read_ns * _NS + program)
    if update.gradient is Gradient.PROGRAMMED:
        array += update.gradient_bytes / WORD_BYTES * program
    return array


def _commands(device: Device, update: Update, planes: int) -> float:
    """For which the bus carries commands, not pages."""
    channel, rounds = device.channel, _rounds(device, update, planes)
    further = len(update.sizes) - rounds
    each = rounds * (channel.read_command_ns + channel.program_command_ns)
    return (each + further * (channel.read_plane_ns + channel.program_plane_ns)) * _NS
