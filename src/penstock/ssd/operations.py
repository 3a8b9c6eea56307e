"""A weight update as operations: what each unit does, in which order, and which resource that takes.

A unit goes through its stages one after the other on one die; a stage takes the die, or the channel.
Units go round the channels, then round the dies of a channel, and a die takes its next unit when it is
done with one. A channel serves the dies in the order in which they ask; of two at the same time the lower
number.

- die: the gradient comes over the channel; states are read; passes; the new weight goes over the channel;
  states are programmed, and with the last page of a block one is erased.
- controller: states are read, and go over the channel; they come back, and are programmed.
- host: one phase reads states and gradient, another programs states; the processor is between them. A
  unit is then what all planes of a die read, or program, at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.ssd.closed import Placement
from penstock.ssd.device import PS_PER_NS, PS_PER_S, WORD_BYTES, Device, duration_ps
from penstock.ssd.update import Gradient, Update

BUS: Final = 0
DIE: Final = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """One of a unit's."""

    name: str
    resource: int
    """BUS or DIE."""
    took_ps: int
    pages: int
    """Page operations of flash that it is: reads, programs, or none."""


@dataclass(frozen=True, slots=True)
class Phase:
    """All units of a step, or of a part of it, through the same stages."""

    name: str
    stages: tuple[Stage, ...]
    units: int
    channels: int
    dies: int
    """On each channel."""
    release_ps: int
    """From one gradient to the next on the link: a unit begins no sooner than its own."""
    erase_ps: int
    erase_every: int
    """Units of a die between two erases."""

    @property
    def bound_ps(self) -> float:
        """Of a unit, when neither buses nor dies ever wait."""
        bus = sum(stage.took_ps for stage in self.stages if stage.resource == BUS)
        turn = sum(stage.took_ps for stage in self.stages) + self.erase_ps / self.erase_every
        return max(bus, turn / self.dies, self.channels * self.release_ps) / self.channels

    @property
    def page_operations(self) -> int:
        """Of all units."""
        return self.units * sum(stage.pages for stage in self.stages)


def phases(device: Device, update: Update, placement: Placement) -> tuple[Phase, ...]:
    """The operation graph of a step.

    Raises:
        ConfigError: The engines do not know what is asked for; the closed form does.
    """
    _check(device, update, placement)
    pages, page_ps = len(update.sizes), device.page_bus_ps
    planes = device.geometry.planes_per_die
    channel = device.channel
    read, program = _ps(device.cell.mean_read_ns), _ps(device.cell.mean_program_ns)
    command = (channel.read_command_ns, channel.program_command_ns)
    extra = (channel.read_plane_ns, channel.program_plane_ns)

    def commands(kind: int, rounds: int) -> int:
        return (rounds * command[kind] + (pages - rounds) * extra[kind]) * PS_PER_NS

    if placement is Placement.DIE:
        rounds = _rounds(device, pages, max(1, planes - 1))
        words = device.geometry.page_bytes // WORD_BYTES
        passes = len(update.rule.passes) * duration_ps(
            words * device.unit.divider, channel.bytes_per_s
        )
        gradient = page_ps * update.gradient_bytes // WORD_BYTES + commands(0, rounds)
        weight = page_ps * update.weight_bytes // WORD_BYTES + commands(1, rounds)
        return (
            _phase(device, update, rounds, "update", (
                Stage("gradient in", BUS, gradient, 0),
                Stage("read states", DIE, rounds * read, pages),
                Stage("passes", DIE, passes, 0),
                Stage("weight out", BUS, weight, 0),
                Stage("program states", DIE, rounds * program, pages),
            )),
        )  # fmt: skip
    if placement is Placement.HOST:
        return _host(device, update)
    rounds = _rounds(device, pages, planes)
    stages = (
        Stage("read states", DIE, rounds * read, pages),
        Stage("states out", BUS, pages * page_ps + commands(0, rounds), 0),
        Stage("states in", BUS, pages * page_ps + commands(1, rounds), 0),
        Stage("program states", DIE, rounds * program, pages),
    )
    return (_phase(device, update, rounds, "update", stages),)


def _host(device: Device, update: Update) -> tuple[Phase, ...]:
    """Pages in sequence, as many planes at once as can; one register each, so no overlap in a die."""
    channel, cell = device.channel, device.cell
    planes = device.geometry.planes_per_die if channel.multi_plane else 1
    bus = planes * device.page_bus_ps

    def row(kind: str, command_ns: int, plane_ns: int, array_ns: float) -> tuple[Stage, Stage]:
        command = (command_ns + (planes - 1) * plane_ns) * PS_PER_NS
        array = Stage(kind, DIE, _ps(array_ns), planes)
        return array, Stage("over the channel", BUS, bus + command, 0)

    sense, out = row("read", channel.read_command_ns, channel.read_plane_ns, cell.mean_read_ns)
    program, back = row(
        "program", channel.program_command_ns, channel.program_plane_ns, cell.mean_program_ns
    )
    units = -(-update.parameters // (device.geometry.page_bytes // WORD_BYTES))
    pages = units * len(update.sizes)

    def phase(name: str, rounds: int, stages: tuple[Stage, ...], count: int) -> Phase:
        made = _phase(device, update, rounds, name, stages, released=False)
        return dataclasses.replace(made, units=-(-count // planes))

    return (
        phase("read", 0, (sense, out), pages + units),
        phase("write", 1, (back, program), pages),
    )


def _phase(
    device: Device,
    update: Update,
    rounds: int,
    name: str,
    stages: tuple[Stage, ...],
    *,
    released: bool = True,
) -> Phase:
    geometry = device.geometry
    words = geometry.page_bytes // WORD_BYTES
    parallel = device.channel.dies_in_parallel
    gradient = words * update.gradient_bytes
    return Phase(
        name=name,
        stages=stages,
        units=-(-update.parameters // words),
        channels=geometry.channels,
        dies=geometry.dies_per_channel if parallel else geometry.chips_per_channel,
        release_ps=duration_ps(gradient, device.link.down_bytes_per_s) if released else 0,
        erase_ps=rounds * device.cell.erase_ns * PS_PER_NS,
        erase_every=geometry.pages_per_block,
    )


def _check(device: Device, update: Update, placement: Placement) -> None:
    unknown = {
        "split placement": placement is Placement.SPLIT,
        "unit.double_buffered": device.unit.double_buffered,
        "unit.overlaps_array": device.unit.overlaps_array,
        "host.overlap": placement is Placement.HOST and device.host.overlap,
        "states shorter than a word": any(size != WORD_BYTES for size in update.sizes),
        "a gradient of another length": update.gradient_bytes != WORD_BYTES
        and placement is Placement.HOST,
        "a gradient that is programmed": update.gradient is Gradient.PROGRAMMED,
        "write amplification": update.write_amplification != 1,
    }
    for what, asked in unknown.items():
        if asked:
            raise ConfigError(f"the engines do not simulate {what}; the closed form tells it")


def _rounds(device: Device, pages: int, planes: int) -> int:
    return -(-pages // planes) if device.channel.multi_plane else pages


def _ps(ns: float) -> int:
    return round(ns * PS_PER_NS)


def seconds(ps: int) -> float:
    """Of picoseconds."""
    return ps / PS_PER_S
