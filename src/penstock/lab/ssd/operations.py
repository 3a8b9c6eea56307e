"""A weight update as operations: the phases of a step, and the stages of their units.

- die: the gradient crosses the channel; states are read; passes; the new weight crosses the channel;
  states are programmed, and a block is erased with its last page.
- controller: states are read, and cross the channel; they come back, and are programmed.
- split: units of both kinds, mixed evenly.
- host: one phase reads states and gradient, another programs states; the processor works between them. A
  unit is then one read, or program, of all planes of a die together. A host that overlaps has one phase
  with both kinds of units.

A unit holds as many parameters as values of the longest state fit in a page. A gradient that is
programmed is another stage. Garbage collection, which a write amplification above 1 implies, adds
programs to some of the units; its reads take no time, as in the closed form.
"""

from __future__ import annotations

import math
from typing import Final

from penstock.lab.ssd import closed_form
from penstock.lab.ssd.closed_form import Placement
from penstock.lab.ssd.device import PS_PER_NS, PS_PER_S, Device, duration_ps
from penstock.lab.ssd.graph import BUS, DIE, ELEMENT, UnitStage, UpdatePhase, spread
from penstock.lab.ssd.update import Gradient, Update

_Stages = tuple[UnitStage, ...]
_EVEN: Final = 1e-9


def phases(
    device: Device, update: Update, placement: Placement, *, on_die: float | None = None
) -> tuple[UpdatePhase, ...]:
    """Return the operation graph of a step; ``on_die`` as in :func:`penstock.lab.ssd.step`."""
    if placement is Placement.HOST:
        return _host(device, update)
    share = closed_form.share_on_die(device, update, placement)
    if placement is Placement.SPLIT and on_die is not None:
        share = on_die
    kinds: list[_Stages] = []
    shares: list[float] = []
    for part, made in ((share, _on_die), (1 - share, _in_controller)):
        for of_them, extra in _collections(update.write_amplification):
            if part * of_them > _EVEN:
                kinds.append(made(device, update, extra))
                shares.append(part * of_them)
    unit = device.unit
    sets = 1 + (unit.double_buffered + unit.overlaps_array if share else 0)
    rounds = _rounds(device, update, share)
    if update.gradient is Gradient.PROGRAMMED:
        rounds += update.gradient_bytes / max(update.sizes)
    words = _words(device, update)
    return (
        UpdatePhase(
            name="update",
            kinds=tuple(kinds),
            pattern=spread(shares),
            units=-(-update.parameters // words),
            channels=device.geometry.channels,
            dies=closed_form.workers(device),
            sets=sets,
            release_ps=duration_ps(words * update.gradient_bytes, device.link.down_bytes_per_s),
            erase_ps=_erase_ps(device, rounds * update.write_amplification),
            erase_every=device.geometry.pages_per_block,
        ),
    )


def _collections(amplification: float) -> tuple[tuple[float, int], ...]:
    """Return (share of units, programs of garbage collection for each of their own)."""
    fewer = math.floor(amplification) - 1
    more = amplification - 1 - fewer
    return (1 - more, fewer), (more, fewer + 1)


def _words(device: Device, update: Update) -> int:
    """Return the number of parameters of a unit."""
    return max(1, device.geometry.page_bytes // max(update.sizes))


def _page_ps(device: Device, update: Update, nbytes: float) -> int:
    """Return the time for which ``nbytes`` for each parameter of a unit cross the channel."""
    return round(device.page_bus_ps * nbytes / max(update.sizes))


def _on_die(device: Device, update: Update, extra: int) -> _Stages:
    """Return the stages beside the page registers; pages moved by garbage collection stay on the die."""
    unit, cell, count = device.unit, device.cell, len(update.sizes)
    planes = max(1, device.geometry.planes_per_die - 1)  # one plane is the gradient's
    rounds = closed_form.rounds(device, update, planes)
    into, back = _commands_ps(device, count, rounds)
    program = round(rounds * cell.mean_program_ns * PS_PER_NS)
    passes = len(update.rule.passes) * duration_ps(
        _words(device, update) * unit.divider, device.channel.bytes_per_s
    )
    # one set of registers belongs to the array, and to the bus with it, the other to the element: results
    # of the element are sent and programmed, and its set is refilled, before the two change places
    port = unit.overlaps_array and not unit.double_buffered
    element = ELEMENT if unit.overlaps_array else DIE
    arrives = _page_ps(device, update, update.gradient_bytes) + into
    leaves = _page_ps(device, update, update.weight_bytes) + back
    read = round(rounds * cell.mean_read_ns * PS_PER_NS)
    return (
        UnitStage("gradient in", BUS, arrives, 0, port, keeps=port),
        *_spilled(device, update, extra, keeps=port),
        UnitStage("read states", DIE, read, count),
        UnitStage("passes", element, passes, 0),
        UnitStage("weight out", BUS, leaves, 0, port, keeps=port),
        UnitStage(
            "program states", DIE, (1 + extra) * program, (1 + extra) * count, keeps=port, fills=True
        ),
    )  # fmt: skip


def _in_controller(device: Device, update: Update, extra: int) -> _Stages:
    """Return the stages over the channel, which pages moved by garbage collection cross again."""
    cell, count = device.cell, len(update.sizes)
    rounds = closed_form.rounds(device, update, device.geometry.planes_per_die)
    out, back = _commands_ps(device, count, rounds)
    gradient: _Stages = ()
    states = update.states_bytes
    if update.gradient is Gradient.PROGRAMMED:
        arrives = _page_ps(device, update, update.gradient_bytes * (1 + extra))
        gradient = (
            UnitStage("gradient in", BUS, arrives, 0, True),
            *_spilled(device, update, extra, keeps=False),
        )
        out += _page_ps(device, update, update.gradient_bytes)
    program = round(rounds * cell.mean_program_ns * PS_PER_NS)
    return (
        *gradient,
        UnitStage("read states", DIE, round(rounds * cell.mean_read_ns * PS_PER_NS), count),
        UnitStage("states out", BUS, _page_ps(device, update, states) + out, 0, True),
        UnitStage("states in", BUS, _page_ps(device, update, states * (1 + extra)) + back, 0, True),
        UnitStage("program states", DIE, (1 + extra) * program, (1 + extra) * count, fills=True),
    )


def _spilled(device: Device, update: Update, extra: int, *, keeps: bool) -> _Stages:
    """Return the stages of a gradient in a page of its own, which is read beside the states."""
    if update.gradient is Gradient.REGISTER:
        return ()
    pages = update.gradient_bytes / max(update.sizes) * (1 + extra)
    took = round(pages * device.cell.mean_program_ns * PS_PER_NS)
    return (UnitStage("program gradient", DIE, took, 1 + extra, keeps=keeps),)


def _commands_ps(device: Device, pages: int, rounds: int) -> tuple[int, int]:
    """Return the times for which the channel carries the commands of reads, and of programs."""
    channel, further = device.channel, pages - rounds
    read = rounds * channel.read_command_ns + further * channel.read_plane_ns
    program = rounds * channel.program_command_ns + further * channel.program_plane_ns
    return read * PS_PER_NS, program * PS_PER_NS


def _rounds(device: Device, update: Update, share: float) -> float:
    """Return the multi-plane programs of a unit, on average over both kinds."""
    planes = device.geometry.planes_per_die
    on_die, in_controller = (
        closed_form.rounds(device, update, count) for count in (max(1, planes - 1), planes)
    )
    return share * on_die + (1 - share) * in_controller


def _erase_ps(device: Device, count: float) -> int:
    return round(count * device.cell.erase_ns * PS_PER_NS)


def _host(device: Device, update: Update) -> tuple[UpdatePhase, ...]:
    """Return phases of pages in sequence, with as many planes at once as possible."""
    page = device.geometry.page_bytes
    planes = closed_form.planes_at_once(device)
    states = -(-update.states_bytes * update.parameters // page)
    gradients = -(-update.gradient_bytes * update.parameters // page)
    reads, writes = -(-(states + gradients) // planes), -(-states // planes)
    cached = device.channel.cache_read, device.channel.cache_program
    if device.host.overlap:
        share = reads / (reads + writes)
        parts: list[tuple[float, _Stages]] = [(share, _read(device))]
        for of_them, extra in _collections(update.write_amplification):
            parts.append(((1 - share) * of_them, _write(device, extra)))
        units = reads + writes
        return (_phase(device, update, "both", parts, units=units, cached=any(cached)),)
    write = [(of, _write(device, extra)) for of, extra in _collections(update.write_amplification)]
    return (
        _phase(device, update, "read", [(1.0, _read(device))], units=reads, cached=cached[0]),
        _phase(device, update, "write", write, units=writes, cached=cached[1]),
    )


def _read(device: Device) -> _Stages:
    channel, planes = device.channel, closed_form.planes_at_once(device)
    command = (channel.read_command_ns + (planes - 1) * channel.read_plane_ns) * PS_PER_NS
    port = not channel.cache_read
    return (
        UnitStage("read", DIE, round(device.cell.mean_read_ns * PS_PER_NS), planes),
        UnitStage("out", BUS, planes * device.page_bus_ps + command, 0, port),
    )


def _write(device: Device, extra: int) -> _Stages:
    """Return the stages of a write, with garbage collection's pages over the channel both ways."""
    channel, planes = device.channel, closed_form.planes_at_once(device)
    command = (channel.program_command_ns + (planes - 1) * channel.program_plane_ns) * PS_PER_NS
    program = (1 + extra) * round(device.cell.mean_program_ns * PS_PER_NS)
    moved = (1 + 2 * extra) * planes * device.page_bus_ps
    port = not channel.cache_program
    return (
        UnitStage("in", BUS, moved + command, 0, port),
        UnitStage("program", DIE, program, (1 + extra) * planes, fills=True),
    )


def _phase(
    device: Device,
    update: Update,
    name: str,
    parts: list[tuple[float, _Stages]],
    *,
    units: int,
    cached: bool,
) -> UpdatePhase:
    parts = [part for part in parts if part[0] > _EVEN]
    return UpdatePhase(
        name=name,
        kinds=tuple(stages for _, stages in parts),
        pattern=spread([share for share, _ in parts]),
        units=units,
        channels=device.geometry.channels,
        dies=closed_form.workers(device),
        sets=2 if cached else 1,
        release_ps=0,
        erase_ps=_erase_ps(device, update.write_amplification),
        erase_every=device.geometry.pages_per_block,
    )


def seconds(ps: int) -> float:
    """Convert picoseconds to seconds."""
    return ps / PS_PER_S
