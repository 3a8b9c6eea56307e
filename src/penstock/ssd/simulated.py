"""A weight update on the engines: by events, or by timelines; and how far to go on from a part of it.

Both run the same operations (:mod:`.operations`) and must give the same picoseconds. The link to the host
bounds a step beside them, as in the closed form: it delivers gradients one after the other, and weights
leave while others are updated.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError
from penstock.ssd import closed, energy, timeline
from penstock.ssd.closed import Placement, Step
from penstock.ssd.device import Device
from penstock.ssd.events import Events
from penstock.ssd.operations import BUS, Phase, phases, seconds
from penstock.ssd.update import Update
from penstock.ssd.wear import wear_of


class Engine(enum.StrEnum):
    """What tells how long a step takes."""

    CLOSED = "closed"
    """The bound of each resource."""
    TIMELINE = "timeline"
    """The fast path, by Numba."""
    TWIN = "twin"
    """The same, plain."""
    EVENTS = "events"
    """The reference."""


@dataclass(frozen=True, slots=True)
class Times:
    """Of one phase, in ps."""

    end_ps: int
    bus_ps: int
    """For which buses work, over all channels."""
    die_ps: int


_RunChannel = Callable[..., tuple[int, int, int]]


def run_phase(phase: Phase, engine: Engine) -> Times:
    """All units of a phase. Raises ConfigError for the closed form, which has none."""
    if engine is Engine.EVENTS:
        done = [_Channel(phase, number).run() for number in range(phase.channels)]
    elif engine is Engine.CLOSED:
        raise ConfigError("the closed form runs no phases")
    else:
        run = _kernel() if engine is Engine.TIMELINE else timeline.run_channel
        resources = np.array([stage.resource for stage in phase.stages], np.int64)
        took = np.array([stage.took_ps for stage in phase.stages], np.int64)
        done = [
            run(
                resources, took, number, phase.units, phase.channels, phase.dies,
                phase.release_ps, phase.erase_ps, phase.erase_every,
            )
            for number in range(phase.channels)
        ]  # fmt: skip
    return Times(
        max(int(end) for end, _, _ in done),
        sum(int(bus) for _, bus, _ in done),
        sum(int(die) for _, _, die in done),
    )


def _kernel() -> _RunChannel:
    """Numba is loaded when it is first needed: it takes longer to load than most of what is asked."""
    run: _RunChannel = importlib.import_module("penstock.ssd.timeline_kernel").run_channel
    return run


def simulate(device: Device, update: Update, placement: Placement, engine: Engine) -> Step:
    """One step, as :func:`penstock.ssd.step` tells it, with the engine's time and use.

    Raises:
        ConfigError: The engine does not know what is asked for; the closed form does.
    """
    formula = closed.step(device, update, placement)
    if engine is Engine.CLOSED:
        return formula
    graph = phases(device, update, placement)
    times = [run_phase(phase, engine) for phase in graph]
    return _told(device, update, formula, graph, times)


def extrapolate(
    device: Device, update: Update, placement: Placement, engine: Engine, *, periods: int = 4
) -> tuple[Step, float]:
    """The same from the first units only, which are as good as all once a rhythm is found.

    Args:
        device: Of which a period is as many units as fill a block on every die.
        update: The step.
        placement: Where it runs.
        engine: What simulates.
        periods: How many are simulated, 4 or more; the first half only to find the rhythm.

    Returns:
        The step, and its error, a share: by how much the rates of the last two quarters differ, or the
        last from what it could become at best, for dies may wait for each other less in the long run.
    """
    if periods < 4 or periods % 4:
        raise ConfigError(f"periods is {periods}, it must be a multiple of 4")
    times, error = [], 0.0
    graph = phases(device, update, placement)
    for phase in graph:
        part = phase.erase_every * phase.dies * phase.channels * periods // 4
        if phase.units <= 4 * part:
            times.append(run_phase(phase, engine))
            continue
        half, more, whole = (run_phase(_first(phase, n * part), engine) for n in (2, 3, 4))
        rate = (whole.end_ps - half.end_ps) / (2 * part)
        early, late = more.end_ps - half.end_ps, whole.end_ps - more.end_ps
        error = max(error, abs(late - early) / part / rate, abs(1 - phase.bound_ps / rate))
        scale = phase.units / (4 * part)
        times.append(
            Times(
                whole.end_ps + round(rate * (phase.units - 4 * part)),
                round(whole.bus_ps * scale),
                round(whole.die_ps * scale),
            )
        )
    formula = closed.step(device, update, placement)
    return _told(device, update, formula, graph, times), error


def _first(phase: Phase, units: int) -> Phase:
    return dataclasses.replace(phase, units=units)


def _told(
    device: Device, update: Update, formula: Step, graph: tuple[Phase, ...], times: list[Times]
) -> Step:
    """The closed form's step with other times; what depends on them is reckoned anew."""
    busy = dict(formula.busy_s)
    on_host = formula.placement is Placement.HOST
    if on_host:
        reading, writing = (seconds(one.end_ps) for one in times)
        up = formula.moved.link_up / device.link.up_bytes_per_s
        down = formula.moved.link_down / device.link.down_bytes_per_s
        share = device.host.io_efficiency
        busy["read"], busy["write"] = max(reading, up) / share, max(writing, down) / share
        time_s = busy["read"] + busy["write"] + busy["processor"]
    else:
        others = (busy[name] for name in ("link up", "link down", "controller"))
        time_s = max(seconds(times[0].end_ps), *others)
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
        wear=wear_of(device, update, time_s),
    )


class _Channel:
    """One channel, event by event: a queue before the bus, and dies that go through stages."""

    def __init__(self, phase: Phase, number: int) -> None:
        self._phase = phase
        self._number = number
        self._mine = len(range(number, phase.units, phase.channels))
        self._events = Events()
        self._queue: list[tuple[int, int]] = []  # (when it asked, die)
        self._granted = False
        self._unit = [0] * phase.dies
        self._stage = [0] * phase.dies
        self._bus_ps = self._die_ps = self._end_ps = 0

    def run(self) -> tuple[int, int, int]:
        """(end, bus, dies) as the timeline's."""
        for die in range(self._phase.dies):
            self._begin(die)
        self._events.run()
        return self._end_ps, self._bus_ps, self._die_ps

    def _begin(self, die: int) -> None:
        """The next unit of a die, once its gradient is there."""
        order = self._unit[die] * self._phase.dies + die
        if order >= self._mine:
            return
        unit = self._number + order * self._phase.channels
        release = (unit + 1) * self._phase.release_ps
        self._events.at(max(self._events.now_ps, release), self._enter, die)

    def _enter(self, die: Any) -> None:
        """A die's stage begins, or asks for the bus."""
        stage = self._phase.stages[self._stage[die]]
        if stage.resource == BUS:
            heapq.heappush(self._queue, (self._events.now_ps, die))
            self._ask()
            return
        took = stage.took_ps
        last = self._stage[die] == len(self._phase.stages) - 1
        if last and (self._unit[die] + 1) % self._phase.erase_every == 0:
            took += self._phase.erase_ps
        self._die_ps += took
        self._events.at(self._events.now_ps + took, self._over, die)

    def _ask(self) -> None:
        """Have the bus given away after all else that happens now, so that the lowest die is first."""
        if not self._granted and self._queue:
            self._granted = True
            self._events.at(self._events.now_ps, self._settle, None)

    def _settle(self, _: Any) -> None:
        self._events.at(self._events.now_ps, self._grant, None)

    def _grant(self, _: Any) -> None:
        _, die = heapq.heappop(self._queue)
        took = self._phase.stages[self._stage[die]].took_ps
        self._bus_ps += took
        self._events.at(self._events.now_ps + took, self._bus_over, die)

    def _bus_over(self, die: Any) -> None:
        self._granted = False
        self._over(die)
        self._ask()

    def _over(self, die: Any) -> None:
        """A stage is done."""
        self._end_ps = self._events.now_ps
        self._stage[die] += 1
        if self._stage[die] < len(self._phase.stages):
            self._enter(die)
            return
        self._stage[die] = 0
        self._unit[die] += 1
        self._begin(die)
