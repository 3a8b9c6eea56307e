"""Energy by component in joules, within three boundaries that are never added up.

- *movement*: bits read, programmed, erased, corrected and carried, up to the host's memory;
- *ssd*: energy of the drive: its flash, channels, memory, elements, its end of the link, its controller;
- *system*: the drive, and the host with its memory, for the time of the step.

Each is the sum of its entries, and an entry names its boundaries, so nothing is counted twice.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from penstock.lab.ssd.device import Device
from penstock.lab.ssd.update import Update, UpdateBytes

_PJ: Final = 1e-12
_BITS: Final = 8


class Boundary(enum.StrEnum):
    """Boundary within which joules are counted."""

    MOVEMENT = "movement"
    SSD = "ssd"
    SYSTEM = "system"


_ALL: Final = frozenset(Boundary)
_DRIVE: Final = frozenset({Boundary.SSD, Boundary.SYSTEM})
_MOVED: Final = frozenset({Boundary.MOVEMENT})
_HOST: Final = frozenset({Boundary.SYSTEM})
STATIC: Final = "controller, static"


@dataclass(frozen=True, slots=True)
class EnergyEntry:
    """Energy of one component in one activity."""

    component: str
    joules: float
    boundaries: frozenset[Boundary]


@dataclass(frozen=True, slots=True)
class EnergyLedger:
    """All energy entries of a step."""

    entries: tuple[EnergyEntry, ...]
    time_s: float

    def joules(self, boundary: Boundary) -> float:
        """Return the sum of the entries within a boundary."""
        return math.fsum(e.joules for e in self.entries if boundary in e.boundaries)

    def within(self, boundary: Boundary) -> dict[str, float]:
        """Return joules by component within a boundary."""
        return {e.component: e.joules for e in self.entries if boundary in e.boundaries}

    @property
    def ssd_w(self) -> float:
        """Mean power of the drive."""
        return self.joules(Boundary.SSD) / self.time_s

    @property
    def ssd_dynamic_w(self) -> float:
        """Mean power of the drive without the controller's static power."""
        return self.ssd_w - self.within(Boundary.SSD)[STATIC] / self.time_s


def ledger(
    device: Device,
    update: Update,
    moved: UpdateBytes,
    *,
    time_s: float,
    on_host: bool,
    on_die: float,
) -> EnergyLedger:
    """Compute the energy of a step.

    Args:
        device: Device with the constants.
        update: Update with the passes.
        moved: Bytes of the whole step.
        time_s: Time of the step.
        on_host: True if the host's processor updates; its arithmetic is then within its power.
        on_die: Share of the units that dies update; only the die corrects their states.
    """
    cost, host = device.energy, device.host
    link = _joules(moved.link_up + moved.link_down, cost.link_pj_per_bit)
    arithmetic = 0.0 if on_host else _arithmetic_pj(device, update) * update.parameters * _PJ
    ecc = on_die * cost.die_ecc_pj_per_bit + (1 - on_die) * cost.controller_ecc_pj_per_bit
    host_w = host.busy_w if on_host else host.idle_w
    return EnergyLedger(
        (
            EnergyEntry("flash, read", _joules(moved.flash_read, cost.read_pj_per_bit), _ALL),
            EnergyEntry(
                "flash, program", _joules(moved.flash_written, cost.program_pj_per_bit), _ALL
            ),
            EnergyEntry("flash, erase", _joules(moved.flash_written, cost.erase_pj_per_bit), _ALL),
            EnergyEntry("channel", _joules(moved.channel, cost.channel_pj_per_bit), _ALL),
            EnergyEntry("error correction", _joules(moved.flash_read, ecc), _ALL),
            # the host's data are buffered: written once and read once
            EnergyEntry(
                "controller's memory",
                _joules(2 * moved.link_down, cost.controller_dram_pj_per_bit),
                _DRIVE,
            ),
            EnergyEntry("link, the drive's end", link / 2, _ALL),
            EnergyEntry("link, the host's end", link / 2, _MOVED),
            EnergyEntry(
                "host's memory", _joules(moved.host_dram, cost.host_dram_pj_per_bit), _MOVED
            ),
            EnergyEntry("arithmetic", arithmetic, _DRIVE),
            EnergyEntry(STATIC, cost.controller_static_w * time_s, _DRIVE),
            EnergyEntry("host", host_w * time_s, _HOST),
        ),
        time_s,
    )


def _joules(nbytes: int, pj_per_bit: float) -> float:
    return nbytes * _BITS * pj_per_bit * _PJ


def _arithmetic_pj(device: Device, update: Update) -> float:
    """Return the energy of all passes for one parameter."""
    cost = device.energy
    return math.fsum(
        one.multiplications * cost.multiply_pj + one.additions * cost.add_pj
        for one in update.rule.passes
    )
