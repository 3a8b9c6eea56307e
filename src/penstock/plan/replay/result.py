"""Results of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Interval: TypeAlias = tuple[int, int]
"""(start, end) in ns since the step began."""
Level: TypeAlias = tuple[int, int]
"""(start in ns since the step began, bytes from then on)."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """Traffic and peak of one tier."""

    written_bytes: int = 0
    """Bytes of the writes that began; encoded where the plan encodes."""
    read_bytes: int = 0
    peak_bytes: int = 0
    """Most bytes held at once, in whole pages."""


class Residence(NamedTuple):
    """Period for which a slot was on the device without a break."""

    start_ns: int
    end_ns: int
    """End of the period; that of the step if the slot stayed until then."""
    slot: int
    """Index into the profile's slots."""
    nbytes: int
    kept: bool
    """True if the plan keeps the slot from its save to its use."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Timelines of one step, for plots."""

    memory: Mapping[str, tuple[Level, ...]]
    """Bytes over time in ``"device"``, ``"host"`` and ``"flash"``; in ``"staging"`` if there is any."""
    busy: Mapping[str, tuple[Interval, ...]]
    """Busy intervals of ``"compute"``, ``"link_out"``, ``"link_in"``, ``"flash_write"``,
    ``"flash_read"`` and ``"codec"``. A transfer between device and flash occupies the link as well if
    flash is reached over it."""
    residences: tuple[Residence, ...]
    """Residences of all slots, in order of time."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a plan on a machine, on paper. Times are integer nanoseconds.

    ``step_ns`` is the sum of ``ideal_ns``, ``lean_ns``, ``recompute_ns``, ``interference_ns`` and
    ``stall_ns``.
    """

    step_ns: int
    """Time of the whole step, as far as the profile covers it."""
    ideal_ns: int
    """Time of the step with unlimited memory: the fastest algorithms, no moves, no recomputation and no
    waits."""
    lean_ns: int
    """Additional time of convolutions whose workspace has a limit."""
    recompute_ns: int
    """Time of recomputed forwards."""
    interference_ns: int
    """Compute time lost because bytes moved meanwhile or because transfers were queued
    (``Machine.interference``, ``write_work_s``, ``read_work_s``)."""
    budget_ns: int
    """Waits for room until writes or reads ended (``StallCause.BUDGET``), and waits of layers for their
    writes (``Plan.joined``)."""
    demand_ns: int
    """Waits for reads that had not begun when backward asked (``StallCause.DEMAND``)."""
    late_ns: int
    """Waits for reads that had begun and were not done (``StallCause.LATE``)."""
    peak_bytes: int
    """Most device memory at once that counts against the device budget."""
    average_bytes: int
    """Mean of the same over the step. For a profile of a whole device it includes ``fixed_bytes`` and
    ``transients`` as they were at each moment, not the worst beside each slot."""
    host: TierUse
    flash: TierUse
    link_out_ns: int
    """Time for which the link from the device was busy; the next three are the same for others."""
    link_in_ns: int
    flash_write_ns: int
    flash_read_ns: int
    codec_ns: int
    """Time of encoding and decoding."""
    forwarded_bytes: int
    """Bytes of slots that were needed before they had been written, so they stayed, or were copied back
    from staging memory."""
    feasible: bool
    """True if the device budget and the tiers' capacities are kept."""
    staging_peak_bytes: int = 0
    """Most bytes of staging memory in use at once."""
    trace: Trace | None = None

    @property
    def stall_ns(self) -> int:
        """Total of all waits."""
        return self.budget_ns + self.demand_ns + self.late_ns

    @property
    def slowdown(self) -> float:
        """Step time divided by the ideal one; 1 if there is nothing to compute."""
        return self.step_ns / self.ideal_ns if self.ideal_ns else 1.0
