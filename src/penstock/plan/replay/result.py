"""What a replay tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Interval: TypeAlias = tuple[int, int]
"""(start, end) in ns since the step began."""
Level: TypeAlias = tuple[int, int]
"""(from when in ns since the step began, bytes)."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """What one tier had to do."""

    written_bytes: int = 0
    """Of the writes that began; encoded, where the plan encodes."""
    read_bytes: int = 0
    peak_bytes: int = 0
    """The most that it held at once, in whole pages."""


class Residence(NamedTuple):
    """A time for which a slot was on the device, without a break."""

    start_ns: int
    end_ns: int
    """Of the step, if it stayed until then."""
    slot: int
    """By index into the profile's slots."""
    nbytes: int
    kept: bool
    """Whether the plan keeps it: it stays from its save to its use."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One step over time, to be drawn."""

    memory: Mapping[str, tuple[Level, ...]]
    """By ``"device"``, ``"host"`` and ``"flash"``."""
    busy: Mapping[str, tuple[Interval, ...]]
    """By ``"compute"``, ``"link_out"``, ``"link_in"``, ``"flash_write"``, ``"flash_read"`` and
    ``"codec"``. A transfer between device and flash occupies both, where flash is over the link."""
    residences: tuple[Residence, ...]
    """Of all slots, in order of time."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a plan on a machine, on paper. Times are integer nanoseconds.

    ``step_ns`` is the sum of ``ideal_ns``, ``lean_ns``, ``recompute_ns``, ``interference_ns`` and
    ``stall_ns``.
    """

    step_ns: int
    """The whole step, as far as the profile tells of it."""
    ideal_ns: int
    """The same with memory without end: the fastest algorithms, nothing moved, nothing computed twice,
    nothing waited for."""
    lean_ns: int
    """By how much longer the convolutions take whose workspace has a limit."""
    recompute_ns: int
    """Forwards that were run again."""
    interference_ns: int
    """By how much computing was slower because bytes moved meanwhile, and later because transfers were
    queued (``Machine.interference``, ``write_work_s``, ``read_work_s``)."""
    budget_ns: int
    """Waits for room, until writes or reads had ended (``StallCause.BUDGET``); and where layers wait for
    their writes (``Plan.joined``)."""
    demand_ns: int
    """Waits for reads that had not begun when backward asked (``StallCause.DEMAND``)."""
    late_ns: int
    """Waits for reads that had begun and were not done (``StallCause.LATE``)."""
    peak_bytes: int
    """The most device memory at once that is counted against the device budget."""
    average_bytes: int
    """The mean of the same over the step. Of a profile of a whole device with ``fixed_bytes`` and
    ``transients`` as they were at each moment, not the worst beside each slot."""
    host: TierUse
    flash: TierUse
    link_out_ns: int
    """How long the link from the device was busy; so of the next."""
    link_in_ns: int
    flash_write_ns: int
    flash_read_ns: int
    codec_ns: int
    """Encoding and decoding."""
    forwarded_bytes: int
    """Of slots that were needed before they had been written: they stayed."""
    feasible: bool
    """Whether the device budget and the tiers' capacities are kept."""
    trace: Trace | None = None

    @property
    def stall_ns(self) -> int:
        """All waits."""
        return self.budget_ns + self.demand_ns + self.late_ns

    @property
    def slowdown(self) -> float:
        """The step against the ideal one; 1 if there is nothing to compute."""
        return self.step_ns / self.ideal_ns if self.ideal_ns else 1.0
