"""What steps cost a drive, and how much more it writes than it is told to.

Fewer bytes of state wear less. Where the update runs makes no difference to how much is programmed, but
to where: a die that updates its states keeps each in a plane of its own, and the plane in whose register
the gradient waits is never programmed (OptimStore, HPCA 2023, layout of a super-page). Of Adam three
planes of four wear, so that life is three quarters of what it is on a host, unless wear is levelled
within the die.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.update import Gradient, Update

_DAY_S: Final = 86_400
_LEVELLING_COST: Final = 0.026
"""Of a step's time, what levelling within the die adds: the 2.6 % that a public note on OptimStore (HPCA
2023) has. It does not say of what; time is taken."""


@dataclass(frozen=True, slots=True)
class Wear:
    """Of one step, and of a drive that does nothing else."""

    written_bytes: int
    """Programmed in a step: ``b P WA``, and the gradient where that is programmed too."""
    erases_per_block: float
    """In a step, of a block of the plane of a die that wears most."""
    evenness: float
    """Erases of a block on average, over those: 1 if all planes wear alike, 3/4 for Adam on dies of four
    planes whose wear is not levelled."""
    steps_rated: float
    """Until that plane's blocks have had their rated cycles, data kept as long as the rating wants."""
    steps_credited: float
    """The same with the credit for data that is kept for days."""
    steps_until_tbw: float | None
    """Until the data sheet's bytes are written; None: it states none."""
    days_rated: float
    days_credited: float
    """At the step's pace, day and night, with nothing in between."""


def wear_of(device: Device, update: Update, time_s: float, *, on_die: float = 0.0) -> Wear:
    """Of steps that take ``time_s`` each; dies update the share ``on_die`` of the units."""
    rated = device.endurance
    gradient = update.gradient_bytes if update.gradient is Gradient.PROGRAMMED else 0
    asked = (update.states_bytes + gradient) * update.parameters
    written = round(asked * update.write_amplification)
    even = _evenness(device, update, on_die)
    erases = written / rated.capacity_bytes / even
    steps = device.cell.cycles / erases
    credited = steps * rated.retention_credit
    return Wear(
        written_bytes=written,
        erases_per_block=erases,
        evenness=even,
        steps_rated=steps,
        steps_credited=credited,
        steps_until_tbw=rated.tbw_bytes / asked if rated.tbw_bytes else None,
        days_rated=steps * time_s / _DAY_S,
        days_credited=credited * time_s / _DAY_S,
    )


def levelled_time(device: Device, on_die: float) -> float:
    """By how much a step within the drive takes longer if wear is levelled within the dies: 1 if not."""
    return 1 + _LEVELLING_COST * on_die if device.ftl.levels_planes else 1.0


def _evenness(device: Device, update: Update, on_die: float) -> float:
    """Bytes that a plane gets on average, over those of the plane that gets most.

    States go to the planes beside the gradient's in turn, as many as there are. What the host or the
    controller updates may lie anywhere, and is spread over all.
    """
    planes = device.geometry.planes_per_die
    if device.ftl.levels_planes or planes == 1:
        return 1.0
    each = [0] * planes
    for number, nbytes in enumerate(update.sizes):
        each[number % (planes - 1)] += nbytes
    if update.gradient is Gradient.PROGRAMMED:
        each[-1] += update.gradient_bytes
    mean = sum(each) / planes
    return mean / (on_die * max(each) + (1 - on_die) * mean)


def lambert_w0(x: float) -> float:
    """The principal branch of W(x) e^W(x) = x, for x >= -1/e, by Halley's method.

    Raises:
        ConfigError: Below -1/e, where there is none.
    """
    if x < -math.exp(-1):
        raise ConfigError(f"Lambert's W has no value at {x}: it must be at least -1/e")
    w = math.log1p(x) if x > 0 else math.sqrt(max(0.0, 2 * (math.e * x + 1))) - 1
    for _ in range(60):
        e = math.exp(w)
        error = w * e - x
        if error == 0:
            break
        slope = e * (w + 1) - (w + 2) * error / (2 * w + 2) if w != -1 else 1.0
        change = error / slope
        w -= change
        if abs(change) <= 1e-15 * max(1.0, abs(w)):
            break
    return w


def write_amplification(utilisation: float) -> float:
    """Of uniform random overwrites, blocks cleaned in the order in which they were filled.

    ``WA = a / (a + W0(-a e^-a))`` with a the physical pages for each valid one (Desnoyers, SYSTOR 2012).

    Args:
        utilisation: Valid pages for each physical one, 1 / a; over 0, below 1.
    """
    if not 0 < utilisation < 1:
        raise ConfigError(f"utilisation is {utilisation}, it must be over 0 and below 1")
    a = 1 / utilisation
    return a / (a + lambert_w0(-a * math.exp(-a)))
