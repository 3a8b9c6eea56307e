"""Time of a weight update in closed form: the bound of each resource, without queues.

The formulas, with P parameters in U = P / k units of k words; C channels of W dies; x the time of a page
on the bus; tE' an erase shared by the pages of a block; WA write amplification; eta I/O efficiency:

- host: ``T = (b + g) P / (eta Br) + b P / (eta Bw) + P / rho``, where Br and Bw are the lower of the
  link and of all channels, and phases follow one another unless ``host.overlap``;
- in the drive: each unit occupies its die for D and its channel for X, so a channel completes
  ``min(W / (D + X), 1 / X)`` units in a second, and ``T = U / (C rate)``;
- controller: ``D = tR + (tPROG + tE') WA``, ``X = n x (1 + WA)``: states cross the bus in both
  directions;
- die: ``D`` is longer by ``q k d / r``, q passes over k words, d byte times each; ``X = x (g + w) / 4``:
  only the gradient and the new weight cross the bus;
- split: dies update the share of units for which both placements end at the same time.

With a second set of registers that the bus reaches (``unit.double_buffered``) a die processes another
unit while the bus works; with a set for the element (``unit.overlaps_array``) another while the element
computes. A unit then takes the longest of the phases that must follow one another instead of D + X.

Reads of garbage collection take no time, here and on the engines.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd import energy
from penstock.lab.ssd.device import PS_PER_S, WORD_BYTES, Device
from penstock.lab.ssd.energy import EnergyLedger
from penstock.lab.ssd.update import Gradient, Update, UpdateBytes, drive_bytes, host_bytes
from penstock.lab.ssd.wear import DriveWear, levelling_factor, wear_of

_NS: float = 1e-9
_CACHE_SHARE: Final = 0.01
"""Size of a write cache that may be ignored, as a share of the bytes that a step writes."""


class Placement(enum.StrEnum):
    """Place where states meet gradients."""

    HOST = "host"
    """Offloading: states go to the host's processor and back."""
    CONTROLLER = "controller"
    """Update in the drive's controller; states cross the channels."""
    DIE = "die"
    """Update beside the page registers, in processing elements of the flash dies."""
    SPLIT = "split"
    """Update of some units on the dies, of the others in the controller."""


@dataclass(frozen=True, slots=True)
class Step:
    """One weight update on one device."""

    device: str
    placement: Placement
    time_s: float
    busy_s: tuple[tuple[str, float], ...]
    """(resource, seconds for which it works), as the mean over the channels, or dies, of the drive."""
    on_die: float
    """Share of units that dies update."""
    moved: UpdateBytes
    ledger: EnergyLedger
    wear: DriveWear

    def use(self, resource: str) -> float:
        """Return the share of the time for which a resource works."""
        return dict(self.busy_s)[resource] / self.time_s

    @property
    def bound_by(self) -> str:
        """The resource that works longest."""
        return max(self.busy_s, key=lambda one: one[1])[0]


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds for which a unit occupies each resource."""

    bus: float
    die: float
    """Time of the array, and of the element if it has no registers of its own."""
    compute: float
    """Time of the element."""
    turn: float
    """Time of the phases that must follow one another on the die."""
    beside: float
    """Time of the element that overlaps those phases."""

    def mixed(self, other: _Work, share: float) -> _Work:
        """Return the mean unit, if ``share`` of the units are like this and the rest like ``other``."""
        return _Work(
            *(
                share * getattr(self, name) + (1 - share) * getattr(other, name)
                for name in _Work.__slots__
            )
        )

    def each(self, dies: int) -> float:
        """Return the time between two units of a channel."""
        return max(self.bus, self.turn / dies, self.beside / dies)


def step(
    device: Device, update: Update, placement: Placement, *, on_die: float | None = None
) -> Step:
    """Compute time, bytes, energy and wear of one step.

    Args:
        device: The SSD and its host.
        update: The weight update.
        placement: Place of the update.
        on_die: Share of units that dies update, for split; None for the best share by the formulas.

    Raises:
        ConfigError: A value is invalid, or no engine of weight updates supports a setting.
    """
    refuse_memory(device, update, placement)
    if placement is Placement.HOST:
        return _host(device, update)
    share = share_on_die(device, update, placement)
    if placement is Placement.SPLIT and on_die is not None:
        share = on_die
    return _in_drive(device, update, placement, share)


def share_on_die(device: Device, update: Update, placement: Placement) -> float:
    """Return the share of a step's units that dies update, for steps within the drive."""
    share = {Placement.DIE: 1.0, Placement.CONTROLLER: 0.0}.get(placement)
    if share is None:
        die, controller = _on_die(device, update), _in_controller(device, update)
        share = _best_share(workers(device), die, controller)
    return share


def refuse_memory(device: Device, update: Update, placement: Placement) -> None:
    """Refuse a map that is not all in memory, and a cache that matters, which no engine here supports.

    A write cache saves nothing in the long run for a host that writes more than it holds: what it took
    must be on flash before it takes more. At most, a step need not wait for as many bytes as the
    capacity.

    Raises:
        ConfigError: Such a setting; the message names the field, and what to do.
    """
    if device.ftl.map_cache_bytes:
        raise ConfigError(
            f"ftl.map_cache_bytes is {device.ftl.map_cache_bytes}; the engines of weight updates keep the"
            " whole map in memory: set it to 0, or simulate requests (penstock ssd run)"
        )
    capacity, written = device.cache.capacity_bytes, host_bytes(update).link_down
    if placement is Placement.HOST and capacity > _CACHE_SHARE * written:
        raise ConfigError(
            f"cache.capacity_bytes is {capacity}, more than a hundredth of the {written} bytes that a"
            " step on the host writes; the engines of weight updates have no write cache: set it to 0, or"
            " simulate requests (penstock ssd run)"
        )


def steps(device: Device, update: Update, placements: Sequence[Placement]) -> tuple[Step, ...]:
    """Compute ``step`` for each placement."""
    return tuple(step(device, update, each) for each in placements)


def read_bytes_per_s(device: Device) -> float:
    """Return the rate at which all channels read pages in sequence, without the link."""
    return _bytes_per_s(device, *_reading(device))


def program_bytes_per_s(device: Device) -> float:
    """Return the rate at which all channels program pages in sequence, including erases."""
    return _bytes_per_s(device, *_programming(device, 1.0))


def _bytes_per_s(device: Device, bus: float, held: float) -> float:
    each = max(bus, held / workers(device))
    geometry = device.geometry
    return geometry.channels * planes_at_once(device) * geometry.page_bytes / each


def _reading(device: Device) -> tuple[float, float]:
    """Return the seconds for which pages of all planes of a die occupy the bus, and the die.

    With a cache register the bus works while the die reads the next pages.
    """
    planes, channel = planes_at_once(device), device.channel
    bus = planes * device.page_bus_ps / PS_PER_S
    bus += (channel.read_command_ns + (planes - 1) * channel.read_plane_ns) * _NS
    array = device.cell.mean_read_ns * _NS
    return bus, array if device.channel.cache_read else array + bus


def _programming(device: Device, amplification: float) -> tuple[float, float]:
    """Return the same for programs; pages that garbage collection moves cross the bus twice."""
    planes, channel = planes_at_once(device), device.channel
    bus = planes * device.page_bus_ps / PS_PER_S * (2 * amplification - 1)
    bus += (channel.program_command_ns + (planes - 1) * channel.program_plane_ns) * _NS
    array = (device.cell.mean_program_ns * _NS + _erase_s(device)) * amplification
    return bus, array if device.channel.cache_program else array + bus


def planes_at_once(device: Device) -> int:
    """Return the number of planes of a die that read or program together."""
    return device.geometry.planes_per_die if device.channel.multi_plane else 1


def workers(device: Device) -> int:
    """Return W, the number of dies (or chips) that work at the same time on a channel."""
    geometry = device.geometry
    return (
        geometry.dies_per_channel if device.channel.dies_in_parallel else geometry.chips_per_channel
    )


def _erase_s(device: Device) -> float:
    """Return tE', the share of a page in erasing its block."""
    return device.cell.erase_ns * _NS / device.geometry.pages_per_block


def _host(device: Device, update: Update) -> Step:
    host, moved = device.host, host_bytes(update)
    bus_in, held_in = _reading(device)
    bus_out, held_out = _programming(device, update.write_amplification)
    up = min(device.link.up_bytes_per_s, _bytes_per_s(device, bus_in, held_in))
    down = min(device.link.down_bytes_per_s, _bytes_per_s(device, bus_out, held_out))
    reading = moved.link_up / (up * host.io_efficiency)
    writing = moved.link_down / (down * host.io_efficiency)
    computing = update.parameters / host.parameters_per_s
    time_s = reading + writing + computing
    channels = device.geometry.channels
    bus = moved.channel / channels / device.channel.bytes_per_s
    if host.overlap:
        # dies and channels are shared by pages in both directions
        rows = channels * planes_at_once(device) * device.geometry.page_bytes
        ins, outs = moved.link_up / rows, moved.link_down / rows
        shared = max(
            ins * bus_in + outs * bus_out, (ins * held_in + outs * held_out) / workers(device)
        )
        time_s = max(reading, writing, computing, shared / host.io_efficiency)
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


def _arrays_s(device: Device, moved: UpdateBytes) -> float:
    """Return the working time of a die's arrays, with as many planes as possible at once."""
    geometry, cell = device.geometry, device.cell
    at_once = geometry.channels * workers(device) * planes_at_once(device) * geometry.page_bytes
    reading = moved.flash_read * cell.mean_read_ns * _NS
    return (
        reading + moved.flash_written * (cell.mean_program_ns * _NS + _erase_s(device))
    ) / at_once


def _in_drive(device: Device, update: Update, placement: Placement, share: float) -> Step:
    die, controller = _on_die(device, update), _in_controller(device, update)
    units, channels = update.units(device), device.geometry.channels
    moved = drive_bytes(update, on_die=share)
    mean = die.mixed(controller, share)
    up = moved.link_up / device.link.up_bytes_per_s
    down = moved.link_down / device.link.down_bytes_per_s
    passes = len(update.rule.passes)
    words = (1 - share) * update.parameters * passes / device.unit.controller_words_per_s
    busy = (
        ("link up", up),
        ("link down", down),
        ("channel", units / channels * mean.bus),
        ("die", units / channels * mean.die / workers(device)),
        ("element", units / channels * mean.compute / workers(device)),
        ("controller", words),
    )
    flash = units / channels * mean.each(workers(device)) * levelling_factor(device, share)
    time_s = max(flash, up, down, words)
    return _finished(device, update, placement, time_s=time_s, busy=busy, share=share, moved=moved)


def _finished(
    device: Device,
    update: Update,
    placement: Placement,
    *,
    time_s: float,
    busy: tuple[tuple[str, float], ...],
    share: float,
    moved: UpdateBytes,
) -> Step:
    ledger = energy.ledger(
        device, update, moved, time_s=time_s, on_host=placement is Placement.HOST, on_die=share
    )
    wear = wear_of(device, update, time_s, on_die=share)
    return Step(device.name, placement, time_s, busy, share, moved, ledger, wear)


def _best_share(dies: int, die: _Work, controller: _Work) -> float:
    """Return the share of units on the die that makes the slowest resource as fast as possible.

    Each resource takes a time that is linear in the share, so the best is at an end or where two lines
    cross.
    """

    def ends(work: _Work) -> tuple[float, ...]:
        return work.bus, work.turn / dies, work.beside / dies

    lines = [(c, d - c) for d, c in zip(ends(die), ends(controller), strict=True)]
    candidates = [0.0, 1.0]
    for (low, slope), (other, its) in itertools.combinations(lines, 2):
        if slope != its and 0 < (crossing := (other - low) / (slope - its)) < 1:
            candidates.append(crossing)
    return min(candidates, key=lambda share: die.mixed(controller, share).each(dies))


def _in_controller(device: Device, update: Update) -> _Work:
    """Return D and X of a unit whose states go to the controller and back."""
    planes = device.geometry.planes_per_die
    array = _array(device, update, planes)
    page, wa = device.page_bus_ps / PS_PER_S, update.write_amplification
    pages = sum(size / WORD_BYTES for size in update.sizes)
    bus = pages * page * (1 + wa) + _commands(device, update, planes)
    if update.gradient is Gradient.PROGRAMMED:
        bus += update.gradient_bytes / WORD_BYTES * page * (1 + wa)
    return _Work(bus, array, 0.0, array + bus, 0.0)


def _on_die(device: Device, update: Update) -> _Work:
    """Return D and X of a unit that is updated beside its page registers.

    The gradient's plane holds no state. The interface clock is the channel's: d byte times for a word.
    """
    geometry, unit = device.geometry, device.unit
    planes = max(1, geometry.planes_per_die - 1)
    array = _array(device, update, planes)
    words = geometry.page_bytes // WORD_BYTES
    compute = len(update.rule.passes) * words * unit.divider / device.channel.bytes_per_s
    page = device.page_bus_ps / PS_PER_S
    bus = page * (update.gradient_bytes + update.returned_bytes) / WORD_BYTES
    bus += _commands(device, update, planes)
    die = array if unit.overlaps_array else array + compute
    turn = die if unit.double_buffered else die + bus
    return _Work(bus, die, compute, turn, compute if unit.overlaps_array else 0.0)


def rounds(device: Device, update: Update, planes: int) -> int:
    """Return the number of multi-plane operations that the pages of a unit's states need."""
    states = len(update.sizes)
    return -(-states // planes) if device.channel.multi_plane else states


def _array(device: Device, update: Update, planes: int) -> float:
    """Return ``tR + (tPROG + tE') WA`` for each round; less if states are shorter than a word."""
    wa, cell = update.write_amplification, device.cell
    program = (cell.mean_program_ns * _NS + _erase_s(device)) * wa
    share = max(update.sizes) / WORD_BYTES
    array = rounds(device, update, planes) * share * (cell.mean_read_ns * _NS + program)
    if update.gradient is Gradient.PROGRAMMED:
        array += update.gradient_bytes / WORD_BYTES * program
    return array


def _commands(device: Device, update: Update, planes: int) -> float:
    """Return the time for which the bus carries commands instead of pages."""
    channel, count = device.channel, rounds(device, update, planes)
    further = len(update.sizes) - count
    each = count * (channel.read_command_ns + channel.program_command_ns)
    each += further * (channel.read_plane_ns + channel.program_plane_ns)
    return each * max(update.sizes) / WORD_BYTES * _NS
