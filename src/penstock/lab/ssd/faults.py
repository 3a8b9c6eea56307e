"""Bit errors of flash, and their correction in the controller or on the die.

The raw error rate is a power law of cycles, of the time for which data have been kept, and of reads (Kim,
Choi and Min, "Design Tradeoffs for SSD Reliability", FAST 2019):

``e + a cycles^k + b cycles^m hours^n + g cycles^p reads^q``

A controller decodes LDPC: hard at first, then with more and more sensing of the same page as errors grow
(Zhao et al., "LDPC-in-SSD", FAST 2013). A die has no correction, as OptimStore proposes, or a light BCH
code. Assumptions are marked.
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
    """Error law of one kind of cell."""

    base: float
    wear: tuple[float, float]
    """Coefficients (a, k)."""
    retention: tuple[float, float, float]
    """Coefficients (b, m, n), for time in hours."""
    disturb: tuple[float, float, float]
    """Coefficients (g, p, q)."""
    source: str

    def rate(self, *, cycles: float, hours: float = 0.0, reads: float = 0.0) -> float:
        """Return the share of wrong bits, at most one half.

        Args:
            cycles: Programs and erases of the block.
            hours: Time for which the data have been kept.
            reads: Reads of the page since it was programmed.
        """
        for name, value in (("cycles", cycles), ("hours", hours), ("reads", reads)):
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value}; it must be zero or more")
        a, k = self.wear
        b, m, n = self.retention
        g, p, q = self.disturb
        kept = b * cycles**m * hours**n if hours else 0.0
        read = g * cycles**p * reads**q if reads else 0.0
        return min(0.5, float(self.base + a * cycles**k + kept + read))

    def scaled(self, factor: float, cycles: float, source: str) -> RawErrors:
        """Scale the errors by a factor, and let them occur after ``cycles`` times the cycles."""
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
"""Error laws by mode. Only TLC's is measured; the distance of the others is assumed, orders of
magnitude as Grupp, Davis and Swanson ("The Bleak Future of NAND Flash Memory", FAST 2012) found."""


def raw_rate(device: Device, *, life: float, days: float = 0.0, reads: float = 0.0) -> float:
    """Return the share of bits that a device reads wrong.

    Args:
        device: Device with its cells and rated cycles.
        life: Share of the rated cycles that its blocks have had.
        days: Time for which the data have been kept.
        reads: Reads of the page since it was programmed.
    """
    law = RAW[device.cell.mode]
    return law.rate(cycles=life * device.cell.cycles, hours=days * _DAY_HOURS, reads=reads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bch:
    """A code that corrects up to ``corrects`` wrong bits in a word, and leaves other words unchanged."""

    data_bits: int
    corrects: int

    def __post_init__(self) -> None:
        if self.data_bits < 1 or self.corrects < 0:
            raise ConfigError(f"{self}: a code needs data, and must correct 0 bits or more")

    @property
    def parity_bits(self) -> int:
        """Parity bits: ``m`` for each corrected bit, in a field of 2^m elements that fits the word."""
        if not self.corrects:
            return 0
        m = 1
        while (1 << m) - 1 < self.data_bits + m * self.corrects:
            m += 1
        return m * self.corrects

    @property
    def bits(self) -> int:
        """Bits of a whole word."""
        return self.data_bits + self.parity_bits

    def fails(self, rate: float) -> float:
        """Return the share of words with more wrong bits than the code corrects."""
        return math.fsum(share for _, share in self._tail(rate))

    def left(self, rate: float) -> float:
        """Return the share of wrong bits after correction."""
        return math.fsum(wrong * share for wrong, share in self._tail(rate)) / self.bits

    def _tail(self, rate: float) -> list[tuple[int, float]]:
        """Return (wrong bits, share of words) for words with too many."""
        if not 0 <= rate <= 0.5:
            raise ConfigError(f"a rate of errors is {rate}; it must be 0 to 0.5")
        if rate == 0:
            return []
        n, odds = self.bits, math.log(rate) - math.log1p(-rate)
        share = math.lgamma(n + 1) + n * math.log1p(-rate)
        found = []
        for wrong in range(self.corrects + 1, n + 1):
            logged = share - math.lgamma(wrong + 1) - math.lgamma(n - wrong + 1) + wrong * odds
            found.append((wrong, math.exp(logged)))
            if wrong > n * rate and logged < -80:
                break
        return found


NO_CODE: Final = Bch(data_bits=4096, corrects=0)
"""No correction, as on OptimStore's die."""
LIGHT: Final = Bch(data_bits=4096, corrects=4)
"""A code light enough for a die: four bits of 512 bytes, 52 bits of parity. Assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ldpc:
    """Decoding in the controller."""

    hard_rate: float = 4e-3
    """Highest error rate for hard decoding. Assumed, for a code with a tenth of parity."""
    level_rate: float = 1.5e-3
    """Increase of that rate by each further level of sensing. Assumed, after the shape in LDPC-in-SSD."""
    most_levels: int = 7
    decode_ns: int = 2_000
    """Decoding time of a page, for each sensing. Assumed."""

    def levels(self, rate: float) -> int:
        """Return the further levels of sensing that a page needs. Raises ConfigError if none suffice."""
        need = max(0, math.ceil((rate - self.hard_rate) / self.level_rate - 1e-9))
        if need > self.most_levels:
            best = self.hard_rate + self.most_levels * self.level_rate
            raise ConfigError(
                f"{rate:.3g} of the bits are wrong, and the controller's code corrects up to {best:.3g}:"
                " data is lost; use fewer cycles, or less time before data is read"
            )
        return need

    def read_ns(self, device: Device, rate: float) -> int:
        """Return the time of a page beyond its first sensing and transfer."""
        levels = self.levels(rate)
        each = device.cell.mean_read_ns + device.page_bus_ps / PS_PER_NS
        return round(levels * each + (1 + levels) * self.decode_ns)

    def pj_per_bit(self, device: Device, rate: float) -> float:
        """Return the energy of sensing and decoding beyond the first time."""
        cost = device.energy
        each = cost.read_pj_per_bit + cost.channel_pj_per_bit + cost.controller_ecc_pj_per_bit
        return self.levels(rate) * each


def aged(
    device: Device, *, life: float, days: float = 0.0, reads: float = 0.0, code: Ldpc | None = None
) -> Device:
    """Return the device with the cost of correction in its controller when its cells are worn.

    Any engine runs it. It is for placements whose data pass the controller: a die corrects nothing, or
    uses its own code. Repeated sensing also occupies the array, so it is in tR.

    Raises:
        ConfigError: The cells have more errors than the code can correct.
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
