"""Bits that flash gets wrong, and what corrects them where.

The rate of raw errors is a power law of cycles, of the time that data has been kept, and of reads (Kim,
Choi and Min, "Design Tradeoffs for SSD Reliability", FAST 2019):

``e + a cycles^k + b cycles^m hours^n + g cycles^p reads^q``

A controller decodes LDPC: hard at first, then with more and more sensing of the same page as errors grow
(Zhao et al., "LDPC-in-SSD", FAST 2013). A die has no correction, as OptimStore proposes, or a light BCH
code. What is assumed is said beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import CellMode
from penstock.lab.ssd.device import PS_PER_NS, Device

_DAY_HOURS: Final = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class RawErrors:
    """The law of one kind of cell."""

    base: float
    wear: tuple[float, float]
    """(a, k)."""
    retention: tuple[float, float, float]
    """(b, m, n), the time in hours."""
    disturb: tuple[float, float, float]
    """(g, p, q)."""
    source: str

    def rate(self, *, cycles: float, hours: float = 0.0, reads: float = 0.0) -> float:
        """Share of bits that are wrong, one half at most.

        Args:
            cycles: Programs and erases that the block has had.
            hours: For which the data has been kept.
            reads: Of the page since it was programmed.
        """
        for name, value in (("cycles", cycles), ("hours", hours), ("reads", reads)):
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value}, it must be zero or more")
        a, k = self.wear
        b, m, n = self.retention
        g, p, q = self.disturb
        kept = b * cycles**m * hours**n if hours else 0.0
        read = g * cycles**p * reads**q if reads else 0.0
        return min(0.5, float(self.base + a * cycles**k + kept + read))

    def scaled(self, factor: float, cycles: float, source: str) -> RawErrors:
        """So many times the errors, and as many of them after ``cycles`` times the cycles."""
        a, k = self.wear
        b, m, n = self.retention
        g, p, q = self.disturb
        return RawErrors(
            base=self.base * factor,
            wear=(a * factor / cycles**k, k),
            retention=(b * factor / cycles**m, m, n),
            disturb=(g * factor / cycles**p, p, q),
            source=source,
        )


_TLC: Final = RawErrors(
    base=1.48e-3,
    wear=(3.90e-10, 2.05),
    retention=(6.28e-5, 0.14, 0.54),
    disturb=(3.73e-9, 0.33, 1.71),
    source="72-layer TLC, Kim, Choi and Min (FAST 2019), as public code repeats it; its time in hours",
)
RAW: Final[Mapping[CellMode, RawErrors]] = {
    CellMode.TLC: _TLC,
    CellMode.QLC: _TLC.scaled(
        3.0, 1 / 3, "assumed: three times TLC's, after a third of its cycles"
    ),
    CellMode.MLC: _TLC.scaled(0.1, 3.0, "assumed: a tenth of TLC's, after three times its cycles"),
    CellMode.PSLC: _TLC.scaled(
        1e-4, 10.0, "assumed: four orders below TLC's, after ten times its cycles (30 K for 3 K)"
    ),
    CellMode.SLC: _TLC.scaled(
        1e-5, 30.0, "assumed: five orders below TLC's, after thirty times its cycles"
    ),
}
"""By mode. Only TLC's is from a measurement; how far the others are from it is assumed, orders of
magnitude as Grupp, Davis and Swanson ("The Bleak Future of NAND Flash Memory", FAST 2012) found."""


def raw_rate(device: Device, *, life: float, days: float = 0.0, reads: float = 0.0) -> float:
    """Share of bits that a device reads wrong.

    Args:
        device: Its cells and rated cycles count.
        life: Share of the rated cycles that its blocks have had.
        days: For which the data has been kept.
        reads: Of the page since it was programmed.
    """
    law = RAW[device.cell.mode]
    return law.rate(cycles=life * device.cell.cycles, hours=days * _DAY_HOURS, reads=reads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bch:
    """A code that corrects so many wrong bits of a word, and leaves a word with more of them as it is."""

    data_bits: int
    corrects: int

    def __post_init__(self) -> None:
        if self.data_bits < 1 or self.corrects < 0:
            raise ConfigError(f"{self}: a code needs data, and corrects no bits or more")

    @property
    def parity_bits(self) -> int:
        """``m`` for each bit that it corrects, in a field of 2^m elements that has room for the word."""
        if not self.corrects:
            return 0
        m = 1
        while (1 << m) - 1 < self.data_bits + m * self.corrects:
            m += 1
        return m * self.corrects

    @property
    def bits(self) -> int:
        """Of a whole word."""
        return self.data_bits + self.parity_bits

    def fails(self, rate: float) -> float:
        """Share of words with more wrong bits than it corrects."""
        return math.fsum(share for _, share in self._tail(rate))

    def left(self, rate: float) -> float:
        """Share of bits that are wrong after it."""
        return math.fsum(wrong * share for wrong, share in self._tail(rate)) / self.bits

    def _tail(self, rate: float) -> list[tuple[int, float]]:
        """(wrong bits, share of words), where they are too many."""
        if not 0 <= rate <= 0.5:
            raise ConfigError(f"a rate of errors is {rate}, it must be 0 to 0.5")
        if rate == 0:
            return []
        n, odds = self.bits, math.log(rate) - math.log1p(-rate)
        share = math.lgamma(n + 1) + n * math.log1p(-rate)
        told = []
        for wrong in range(self.corrects + 1, n + 1):
            logged = share - math.lgamma(wrong + 1) - math.lgamma(n - wrong + 1) + wrong * odds
            told.append((wrong, math.exp(logged)))
            if wrong > n * rate and logged < -80:
                break
        return told


NO_CODE: Final = Bch(data_bits=4096, corrects=0)
"""As OptimStore has it on the die."""
LIGHT: Final = Bch(data_bits=4096, corrects=4)
"""Light enough for a die: four bits of 512 bytes, 52 bits of parity. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ldpc:
    """Decoding in the controller."""

    hard_rate: float = 4e-3
    """Up to which hard decoding does. Assumed, of a code with a tenth of parity."""
    level_rate: float = 1.5e-3
    """What each further level of sensing adds. Assumed, after the shape in LDPC-in-SSD."""
    most_levels: int = 7
    decode_ns: int = 2_000
    """Of a page, each time. Assumed."""

    def levels(self, rate: float) -> int:
        """Further levels of sensing that a page needs. Raises ConfigError where none are enough."""
        need = max(0, math.ceil((rate - self.hard_rate) / self.level_rate - 1e-9))
        if need > self.most_levels:
            best = self.hard_rate + self.most_levels * self.level_rate
            raise ConfigError(
                f"{rate:.3g} of the bits are wrong, the controller's code corrects up to {best:.3g}: data"
                " is lost; fewer cycles, or less time before it is read"
            )
        return need

    def read_ns(self, device: Device, rate: float) -> int:
        """What a page takes beside its first sensing and transfer."""
        levels = self.levels(rate)
        each = device.cell.mean_read_ns + device.page_bus_ps / PS_PER_NS
        return round(levels * each + (1 + levels) * self.decode_ns)

    def pj_per_bit(self, device: Device, rate: float) -> float:
        """Of sensing and decoding beyond the first time."""
        cost = device.energy
        each = cost.read_pj_per_bit + cost.channel_pj_per_bit + cost.controller_ecc_pj_per_bit
        return self.levels(rate) * each


def aged(
    device: Device, *, life: float, days: float = 0.0, reads: float = 0.0, code: Ldpc | None = None
) -> Device:
    """The same device with what correction in its controller takes when its cells are worn.

    Any engine runs it. It is for placements whose data pass the controller: a die corrects nothing, or
    with its own code. What is sensed again also occupies the array, so it is in tR.

    Raises:
        ConfigError: The cells are worse than the code can correct.
    """
    code = code or Ldpc()
    rate = raw_rate(device, life=life, days=days, reads=reads)
    more_ns, more_pj = code.read_ns(device, rate), code.pj_per_bit(device, rate)
    cell = dataclasses.replace(
        device.cell, read_ns=tuple(time_ns + more_ns for time_ns in device.cell.read_ns)
    )
    energy = dataclasses.replace(
        device.energy,
        controller_ecc_pj_per_bit=device.energy.controller_ecc_pj_per_bit + more_pj,
    )
    return dataclasses.replace(device, cell=cell, energy=energy)
