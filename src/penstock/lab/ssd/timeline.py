"""The fast path: the units of one channel as timelines of its bus, dies and elements, without events.

Of all claims of a channel's units, the earliest is examined next. So a resource that is free then, or
known to be free later, goes to that claim, and nothing has to be queued; only a unit that needs a die
that another holds while it waits for the bus is skipped until that is resolved. This is the readable
version; :mod:`.timeline_kernel` is the same with Numba, and must give the same picoseconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.lab.ssd.graph import BUS, DIE

Numbers = npt.NDArray[np.int64]


def run_channel(  # noqa: PLR0912, PLR0915, PLR0917  (Numba has no keywords, and inlines nothing here)
    stages: Numbers,
    begins: Numbers,
    pattern: Numbers,
    first: int,
    units: int,
    stride: int,
    dies: int,
    sets: int,
    release_ps: int,
    erase_ps: int,
    erase_every: int,
) -> tuple[int, int, int]:
    """Run all units of one channel.

    Args:
        stages: A row for each stage of each kind: resource, duration in ps, port, keeps, fills.
        begins: First row of each kind, and the end of the last.
        pattern: Kinds of the units of a die, in turn.
        first: Number of the channel's first unit; the others follow by ``stride``.
        units: Number of units of all channels.
        stride: Number of channels.
        dies: Dies on the channel; its units go round them.
        sets: Sets of registers of a die.
        release_ps: Unit ``u`` begins no sooner than ``(u + 1) * release_ps``.
        erase_ps: Added to every ``erase_every``-th stage of a die that fills blocks.
        erase_every: Number of such stages between two erases.

    Returns:
        (end of the last unit, working time of the bus, working time of all dies), in ps.
    """
    mine = (units - first + stride - 1) // stride if units > first else 0
    period = pattern.size
    slots = dies * sets
    asks = np.zeros(slots, np.int64)  # time at which the unit in each set claims its next resource
    number = np.zeros(slots, np.int64)  # number of that unit on its die
    row = np.zeros(slots, np.int64)  # row of its next stage; -1 if the set is done
    end = np.zeros(slots, np.int64)
    holds = np.zeros(slots, np.bool_)  # True if it holds its die between stages, or for the bus
    held = np.zeros(dies, np.bool_)
    die_free = np.zeros(dies, np.int64)
    element_free = np.zeros(dies, np.int64)
    filled = np.zeros(dies, np.int64)
    bus_free = bus_busy = die_busy = last = 0
    for slot in range(slots):
        die = slot // sets
        number[slot] = slot % sets
        row[slot] = -1
        if number[slot] * dies + die < mine:
            kind = pattern[(number[slot] + die * period // dies) % period]
            row[slot], end[slot] = begins[kind], begins[kind + 1]
            asks[slot] = (first + (number[slot] * dies + die) * stride + 1) * release_ps
    while True:
        chosen = -1
        for slot in range(slots):
            at = row[slot]
            if at < 0:
                continue
            needs_die = stages[at, 0] == DIE or stages[at, 2]
            if needs_die and held[slot // sets] and not holds[slot]:
                continue
            if (
                chosen < 0
                or asks[slot] < asks[chosen]
                or (
                    asks[slot] == asks[chosen]
                    and slot // sets == chosen // sets
                    and number[slot] < number[chosen]
                )
            ):
                chosen = slot
        if chosen < 0:
            return last, bus_busy, die_busy
        die = chosen // sets
        at = row[chosen]
        took = stages[at, 1]
        if stages[at, 2] and not holds[chosen]:
            asks[chosen] = max(asks[chosen], die_free[die])
            holds[chosen] = held[die] = True
            continue
        if stages[at, 0] == BUS:
            done = max(bus_free, asks[chosen]) + took
            bus_free = done
            bus_busy += took
            if stages[at, 2]:
                die_free[die] = done
        elif stages[at, 0] == DIE:
            if stages[at, 4]:
                filled[die] += 1
                if filled[die] % erase_every == 0:
                    took += erase_ps
            done = max(die_free[die], asks[chosen]) + took
            die_free[die] = done
            die_busy += took
        else:
            done = max(element_free[die], asks[chosen]) + took
            element_free[die] = done
        if stages[at, 0] == DIE or stages[at, 2]:
            holds[chosen] = held[die] = stages[at, 3] != 0
        last = max(last, done)
        asks[chosen] = done
        row[chosen] = at + 1
        if at + 1 == end[chosen]:
            number[chosen] += sets
            row[chosen] = -1
            if number[chosen] * dies + die >= mine:
                if holds[chosen]:
                    holds[chosen] = held[die] = False
                    die_free[die] = max(die_free[die], done)
            else:
                kind = pattern[(number[chosen] + die * period // dies) % period]
                row[chosen], end[chosen] = begins[kind], begins[kind + 1]
                release = (first + (number[chosen] * dies + die) * stride + 1) * release_ps
                asks[chosen] = max(done, release)
