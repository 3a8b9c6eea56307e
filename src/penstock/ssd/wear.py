"""What steps cost a drive, and how much more it writes than it is told to.

Where the update runs makes no difference to wear: fewer bytes of state do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.ssd.device import Device
from penstock.ssd.update import Gradient, Update

_DAY_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class Wear:
    """Of one step, and of a drive that does nothing else."""

    written_bytes: int
    """Programmed in a step: ``b P WA``, and the gradient where that is programmed too."""
    erases_per_block: float
    """In a step, spread evenly over the rated capacity."""
    steps_rated: float
    """Until every block has had its rated cycles, data kept as long as the rating wants."""
    steps_credited: float
    """The same with the credit for data that is kept for days."""
    steps_until_tbw: float | None
    """Until the data sheet's bytes are written; None: it states none."""
    days_rated: float
    days_credited: float
    """At the step's pace, day and night, with nothing in between."""


def wear_of(device: Device, update: Update, time_s: float) -> Wear:
    """Of steps that take ``time_s`` each."""
    rated = device.endurance
    gradient = update.gradient_bytes if update.gradient is Gradient.PROGRAMMED else 0
    asked = (update.states_bytes + gradient) * update.parameters
    written = round(asked * update.write_amplification)
    erases = written / rated.capacity_bytes
    steps = device.cell.cycles / erases
    credited = steps * rated.retention_credit
    return Wear(
        written_bytes=written,
        erases_per_block=erases,
        steps_rated=steps,
        steps_credited=credited,
        steps_until_tbw=rated.tbw_bytes / asked if rated.tbw_bytes else None,
        days_rated=steps * time_s / _DAY_S,
        days_credited=credited * time_s / _DAY_S,
    )


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
