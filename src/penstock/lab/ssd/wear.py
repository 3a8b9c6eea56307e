"""Wear of a drive by steps, and its write amplification.

Fewer bytes of state cause less wear. The place of the update does not change the amount that is
programmed, but where it is programmed: a die that updates its states keeps each in a plane of its own,
and the plane in whose register the gradient waits is never programmed (OptimStore, HPCA 2023, layout of
a super-page). With Adam three planes of four wear, so the drive's life is three quarters of its life on
a host, unless wear is levelled within the die.
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
"""Share of a step's time that levelling within the die adds: the 2.6 % of a public note on OptimStore
(HPCA 2023), which does not say of what; time is assumed."""


@dataclass(frozen=True, slots=True)
class DriveWear:
    """Wear by one step, and life of a drive that does nothing else."""

    written_bytes: int
    """Bytes programmed in a step: ``b P WA``, and the gradient if that is programmed too."""
    erases_per_block: float
    """Erases in a step of a block of the die's plane that wears most."""
    evenness: float
    """Mean erases of a block over those: 1 if all planes wear alike, 3/4 for Adam on dies of four planes
    without levelling."""
    steps_rated: float
    """Steps until that plane's blocks have had their rated cycles, at the rated retention."""
    steps_credited: float
    """Steps until then with the credit for data that is kept for days only."""
    steps_until_tbw: float | None
    """Steps until the data sheet's bytes are written; None if it states none."""
    days_rated: float
    days_credited: float
    """Days until then at the step's pace, without pause."""


def wear_of(device: Device, update: Update, time_s: float, *, on_die: float = 0.0) -> DriveWear:
    """Compute the wear of steps of ``time_s`` each; dies update the share ``on_die`` of the units."""
    rated = device.endurance
    gradient = update.gradient_bytes if update.gradient is Gradient.PROGRAMMED else 0
    asked = (update.states_bytes + gradient) * update.parameters
    written = round(asked * update.write_amplification)
    even = _wear_evenness(device, update, on_die)
    erases = written / rated.capacity_bytes / even
    steps = device.cell.cycles / erases
    credited = steps * rated.retention_credit
    return DriveWear(
        written_bytes=written,
        erases_per_block=erases,
        evenness=even,
        steps_rated=steps,
        steps_credited=credited,
        steps_until_tbw=rated.tbw_bytes / asked if rated.tbw_bytes else None,
        days_rated=steps * time_s / _DAY_S,
        days_credited=credited * time_s / _DAY_S,
    )


def levelling_factor(device: Device, on_die: float) -> float:
    """Return the factor of a step's time if wear is levelled within the dies; 1 if it is not."""
    return 1 + _LEVELLING_COST * on_die if device.ftl.levels_planes else 1.0


def _wear_evenness(device: Device, update: Update, on_die: float) -> float:
    """Return the mean bytes of a plane over those of the plane that gets most.

    States go in turn to all planes but the gradient's. States that the host or the controller updates may
    be anywhere, and are spread over all planes.
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
    """Compute the principal branch of W(x) e^W(x) = x, for x >= -1/e, by Halley's method.

    Raises:
        ConfigError: ``x`` is below -1/e, where there is no value.
    """
    if x < -math.exp(-1):
        raise ConfigError(f"Lambert's W has no value at {x}; it must be at least -1/e")
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
    """Return the amplification of uniform random overwrites with blocks cleaned in FIFO order.

    ``WA = a / (a + W0(-a e^-a))`` with a the physical pages for each valid one (Desnoyers, SYSTOR 2012).

    Args:
        utilisation: Valid pages for each physical one, 1 / a; above 0, below 1.
    """
    if not 0 < utilisation < 1:
        raise ConfigError(f"utilisation is {utilisation}; it must be above 0 and below 1")
    a = 1 / utilisation
    return a / (a + lambert_w0(-a * math.exp(-a)))
