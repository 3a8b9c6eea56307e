"""Weight updates on the engines, by events or by timelines, and extrapolation from a part of an update.

Both run the same operations (:mod:`.operations`) and must give the same picoseconds. The link to the host
limits a step separately, as in the closed form: it delivers gradients one after the other, and weights
leave while others are updated.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.core.errors import ConfigError
from penstock.lab.ssd import closed_form, energy, timeline
from penstock.lab.ssd.closed_form import Placement, Step
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.graph import UpdatePhase
from penstock.lab.ssd.graph_events import ChannelRun
from penstock.lab.ssd.operations import phases, seconds
from penstock.lab.ssd.update import Update
from penstock.lab.ssd.wear import levelling_factor, wear_of

_TRIED = 8
"""Number of shares that are tried for a split."""


class SimulationEngine(enum.StrEnum):
    """Method that computes the time of a step."""

    CLOSED = "closed"
    """The bound of each resource."""
    TIMELINE = "timeline"
    """The fast path, with Numba."""
    PLAIN = "plain"
    """The fast path, in plain Python."""
    EVENTS = "events"
    """The reference."""


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Times of one phase, in ps."""

    end_ps: int
    bus_ps: int
    """Time for which buses work, over all channels."""
    die_ps: int


_RunChannel = Callable[..., tuple[int, int, int]]


def run_phase(phase: UpdatePhase, engine: SimulationEngine) -> UpdateTimes:
    """Run all units of a phase. Raises ConfigError for the closed form, which has no phases."""
    if engine is SimulationEngine.EVENTS:
        done = [ChannelRun(phase, number).run() for number in range(phase.channels)]
    elif engine is SimulationEngine.CLOSED:
        raise ConfigError("the closed form runs no phases")
    else:
        run = _kernel() if engine is SimulationEngine.TIMELINE else timeline.run_channel
        stages = np.array(
            [
                (s.resource, s.took_ps, s.port, s.keeps, s.fills)
                for kind in phase.kinds
                for s in kind
            ],
            np.int64,
        )
        begins = np.cumsum([0, *map(len, phase.kinds)], dtype=np.int64)
        pattern = np.array(phase.pattern, np.int64)
        done = [
            run(
                stages, begins, pattern, number, phase.units, phase.channels, phase.dies, phase.sets,
                phase.release_ps, phase.erase_ps, phase.erase_every,
            )
            for number in range(phase.channels)
        ]  # fmt: skip
    return UpdateTimes(
        max(int(end) for end, _, _ in done),
        sum(int(bus) for _, bus, _ in done),
        sum(int(die) for _, _, die in done),
    )


def channel_waits(phase: UpdatePhase) -> tuple[float, ...]:
    """Return the share of their time that units of each kind wait for the channel, by events."""
    runs = [ChannelRun(phase, number) for number in range(phase.channels)]
    for one in runs:
        one.run()
    return tuple(
        sum(one.waits_ps[kind] for one in runs) / sum(one.units_ps[kind] for one in runs)
        for kind in range(len(phase.kinds))
    )


def _kernel() -> _RunChannel:
    """Load Numba when it is first needed, because loading takes longer than most simulations."""
    run: _RunChannel = importlib.import_module("penstock.lab.ssd.timeline_kernel").run_channel
    return run


def simulate(
    device: Device, update: Update, placement: Placement, engine: SimulationEngine
) -> Step:
    """Compute a step like :func:`penstock.lab.ssd.step`, with the engine's time and use."""
    if engine is SimulationEngine.CLOSED:
        return closed_form.step(device, update, placement)
    share = best_share(device, update) if placement is Placement.SPLIT else None
    formula = closed_form.step(device, update, placement, on_die=share)
    graph = phases(device, update, placement, on_die=share)
    times = [run_phase(phase, engine) for phase in graph]
    return _with_times(device, update, formula, graph, times)


def extrapolate(
    device: Device,
    update: Update,
    placement: Placement,
    engine: SimulationEngine,
    *,
    periods: int = 4,
) -> tuple[Step, float]:
    """Extrapolate a step from its first units, which suffice once they repeat a pattern.

    Args:
        device: Device; a period is as many units as fill a block on every die.
        update: The step.
        placement: Place of the update.
        engine: Engine to simulate with.
        periods: Number of simulated periods, 4 or more; the first half is only a warm-up.

    Returns:
        The step, and its relative error: the difference between the rates of the last two quarters, or
        between the last and the best possible, because dies may wait less for each other in the long run.
    """
    if periods < 4 or periods % 4:
        raise ConfigError(f"periods is {periods}; it must be a multiple of 4")
    share = best_share(device, update) if placement is Placement.SPLIT else None
    graph = phases(device, update, placement, on_die=share)
    times, error = _extrapolated(graph, engine, periods)
    formula = closed_form.step(device, update, placement, on_die=share)
    return _with_times(device, update, formula, graph, times), error


def best_share(device: Device, update: Update) -> float:
    """Return the share of units on the die, for split, that is fastest on timelines.

    By the formulas buses and dies may both be busy all the time; but then they wait for each other, which
    costs more than the mix gains. So several shares are tried, on a part of the step.
    """
    formula = closed_form.share_on_die(device, update, Placement.SPLIT)
    tried = sorted({*(part / _TRIED for part in range(_TRIED + 1)), formula}, reverse=True)

    def rate(share: float) -> float:
        graph = phases(device, update, Placement.SPLIT, on_die=share)
        times, _ = _extrapolated(graph, SimulationEngine.TIMELINE, 4)
        return _with_times(
            *(device, update, closed_form.step(device, update, Placement.SPLIT, on_die=share)),
            *(graph, times),
        ).time_s

    return min(tried, key=rate)


def _extrapolated(
    graph: tuple[UpdatePhase, ...], engine: SimulationEngine, periods: int
) -> tuple[list[UpdateTimes], float]:
    times: list[UpdateTimes] = []
    error = 0.0
    for phase in graph:
        part = phase.erase_every * phase.dies * phase.channels * periods // 4
        if phase.units <= 4 * part:
            times.append(run_phase(phase, engine))
            continue
        half, more, whole = (
            run_phase(dataclasses.replace(phase, units=n * part), engine) for n in (2, 3, 4)
        )
        rate = (whole.end_ps - half.end_ps) / (2 * part)
        early, late = more.end_ps - half.end_ps, whole.end_ps - more.end_ps
        error = max(error, abs(late - early) / part / rate, abs(1 - phase.bound_ps / rate))
        scale = phase.units / (4 * part)
        times.append(
            UpdateTimes(
                whole.end_ps + round(rate * (phase.units - 4 * part)),
                round(whole.bus_ps * scale),
                round(whole.die_ps * scale),
            )
        )
    return times, error


def _with_times(
    device: Device,
    update: Update,
    formula: Step,
    graph: tuple[UpdatePhase, ...],
    times: list[UpdateTimes],
) -> Step:
    """Return the closed form's step with other times, and everything that depends on them."""
    busy = dict(formula.busy_s)
    on_host = formula.placement is Placement.HOST
    if on_host:
        time_s = _with_host(device, formula, times, busy)
    else:
        others = (busy[name] for name in ("link up", "link down", "controller"))
        time_s = max(seconds(times[0].end_ps) * levelling_factor(device, formula.on_die), *others)
    channels = graph[0].channels
    busy["channel"] = math.fsum(seconds(one.bus_ps) for one in times) / channels
    busy["die"] = math.fsum(seconds(one.die_ps) for one in times) / channels / graph[0].dies
    return dataclasses.replace(
        formula,
        time_s=time_s,
        busy_s=tuple(busy.items()),
        ledger=energy.ledger(
            device,
            update,
            formula.moved,
            time_s=time_s,
            on_host=on_host,
            on_die=formula.on_die,
        ),
        wear=wear_of(device, update, time_s, on_die=formula.on_die),
    )


def _with_host(
    device: Device, formula: Step, times: list[UpdateTimes], busy: dict[str, float]
) -> float:
    """Return the seconds of a step with the host's processor; add the reads to ``busy``."""
    share, link = device.host.io_efficiency, device.link
    up = formula.moved.link_up / link.up_bytes_per_s / share
    down = formula.moved.link_down / link.down_bytes_per_s / share
    flash = [seconds(one.end_ps) / share for one in times]
    if device.host.overlap:
        return max(*flash, up, down, busy["processor"])
    busy["read"], busy["write"] = max(flash[0], up), max(flash[1], down)
    return busy["read"] + busy["write"] + busy["processor"]
