"""The fast path: the units of one channel as two timelines, the bus's and the dies', without events.

Each die waits for the bus at most once at a time, and when it will is known before: so the die that asks
first is served first, and nothing has to be queued. This is the clear twin; :mod:`.timeline_kernel` is
the same by Numba, and must give the same picoseconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.ssd.operations import BUS

Times = npt.NDArray[np.int64]


def run_channel(  # noqa: PLR0917  (Numba knows no keywords, and inlines nothing here)
    resources: Times,
    took_ps: Times,
    first: int,
    units: int,
    stride: int,
    dies: int,
    release_ps: int,
    erase_ps: int,
    erase_every: int,
) -> tuple[int, int, int]:
    """All units of one channel.

    Args:
        resources: By stage, BUS or DIE.
        took_ps: By stage, for how long.
        first: The number of the channel's first unit; the others follow by ``stride``.
        units: In all.
        stride: Channels.
        dies: On the channel; its units go round them.
        release_ps: Unit ``u`` begins no sooner than ``(u + 1) * release_ps``.
        erase_ps: Added to the last stage of each unit that fills a block of its die.
        erase_every: Units of a die between two of these.

    Returns:
        (when the last is done, for how long the bus works, for how long all dies do), in ps.
    """
    stages = resources.size
    mine = (units - first + stride - 1) // stride if units > first else 0
    ready = np.zeros(dies, np.int64)  # when each die asks for the bus, or is done with all
    stage = np.zeros(dies, np.int64)
    number = np.zeros(dies, np.int64)  # of the die's unit, counted on the die
    waits = np.zeros(dies, np.bool_)
    bus_free = 0
    bus_busy = 0
    die_busy = 0
    last = 0
    served = -1
    begun = 0
    while True:
        # work through what needs no bus: at first on all dies, then on the one that was served
        low, high = (0, dies) if begun == 0 else (served, served + 1)
        begun = 1
        for die in range(low, high):
            waits[die] = False
            while number[die] * dies + die < mine:
                place = stage[die]
                if place == 0:
                    unit = first + (number[die] * dies + die) * stride
                    ready[die] = max(ready[die], (unit + 1) * release_ps)
                if resources[place] == BUS:
                    waits[die] = True
                    break
                took = took_ps[place]
                if place == stages - 1 and (number[die] + 1) % erase_every == 0:
                    took += erase_ps
                ready[die] += took
                die_busy += took
                last = max(last, ready[die])
                stage[die] = place + 1
                if place == stages - 1:
                    stage[die] = 0
                    number[die] += 1
        served = -1
        for die in range(dies):
            if waits[die] and (served < 0 or ready[die] < ready[served]):
                served = die
        if served < 0:
            return last, bus_busy, die_busy
        place = stage[served]
        took = took_ps[place]
        bus_free = max(bus_free, ready[served]) + took
        bus_busy += took
        ready[served] = bus_free
        last = max(last, bus_free)
        stage[served] = place + 1
        if place == stages - 1:
            stage[served] = 0
            number[served] += 1
