"""The values of a session's summary, line by line."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe.foreseen import Prediction
from penstock.observe.suggestion import Suggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowLine:
    """What moved in one stage of one tier."""

    stage: str
    tier: str
    count: int
    nbytes: int
    busy_s: float
    """Time in which at least one transfer was under way."""
    bytes_per_s: float
    """``nbytes`` over ``busy_s``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StallLine:
    """Waits of the training thread, of one cause."""

    cause: str
    count: int
    total_ms: float
    per_step_ms: float | None
    """Of an optimizer step on average; ``None`` where none has ended."""
    share: float
    """Of the time of the run, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """How full one memory was."""

    memory: str
    peak_bytes: int
    average_bytes: int
    """Weighted by time."""
    current_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceLine:
    """Slots that share an action, a tier and a reason."""

    action: str
    tier: str
    reason: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecLine:
    """What one codec made of what went through it."""

    codec: str
    source_bytes: int
    frame_bytes: int
    """What went to the tiers instead."""
    ratio: float
    """``frame_bytes`` over ``source_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanLine:
    """Plans that were made for one reason."""

    reason: str
    """``"first"``; ``"drift"``: other slots were saved; ``"held"``: offloading freed nothing;
    ``"sampled"``: codecs were measured; ``"observed"``: it became known what can be made again;
    ``"demand"``: data loaders need more of flash, or less; ``"memory"``: less of the device's memory is
    left than before."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenLine:
    """What one client has written to flash."""

    client: str
    """``"activations"``, ``"optimizer states"``, ...: one of ``penstock.observe.clients.ON_FLASH``."""
    nbytes: int
    is_per_step: bool
    """Whether further steps write more of it: not of measurements, nor of indexes of data sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeLine:
    """Modules that were run again in backward."""

    count: int
    nbytes: int
    """What they made again."""
    busy_s: float
    """What that took, with waits for their inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryValues:
    """What a session did. Units are in the names of the fields."""

    policy: str
    device: str
    rank: int | None = None
    """The rank of the process; ``None``: it is the only one."""
    steps: int
    elapsed_s: float
    saved_peak_bytes: int
    """The most that autograd would have held at once, without Penstock."""
    flows: tuple[FlowLine, ...]
    """Per tier and direction; only those where something moved."""
    codecs: tuple[CodecLine, ...]
    """Those that encoded anything, by the counters ``ENCODED_SOURCE``; the most bytes first."""
    stalls: tuple[StallLine, ...]
    """The longest first."""
    memory: tuple[MemoryLine, ...]
    places: tuple[PlaceLine, ...]
    """What went and what stayed, and why; the most bytes first."""
    replans: tuple[ReplanLine, ...]
    """Plans that were made, by the reason."""
    triggers_moved: int
    """Times that reading a slot back was made to begin earlier, because it had come late."""
    window_grown_bytes: int
    """By how much reads may run further ahead than planned, for the same reason."""
    recomputed: RecomputeLine
    misses: int
    """Tensors that were needed before anybody had begun to bring them back (``MISSES``)."""
    fallbacks: int
    """Times that a tier which failed or was full made a tensor go elsewhere (``FALLBACKS``)."""
    counters: dict[str, int]
    ssd_written_bytes: int
    """Written to flash in all: the sum of ``ssd_written``."""
    ssd_written: tuple[WrittenLine, ...]
    """The same by client; the most bytes first."""
    tbw_bytes: int | None
    tbw_share: float | None
    """``ssd_written_bytes`` over ``tbw_bytes``; ``None`` where no TBW was stated."""
    steps_to_wear_out: int | None
    """Optimizer steps that write a whole TBW at this rate, without what is written once; ``None`` where
    unknown, or where steps write nothing."""
    prediction: Prediction | None
    """The plan in force, replayed, beside the steps that ran under it; ``None`` before there are any."""
    loaders_bytes_per_s: float
    """What data loaders that share its flash need of it."""
    loaders_planned_bytes_per_s: float
    """What the plan in force leaves to them."""
    suggestion: Suggestion | None
    """Device budgets that a run without one could have had; ``None`` where there is one, or no tier."""
    notes: tuple[str, ...]
    """Sentences for the user that call for nothing to be done."""
    warnings: tuple[str, ...]

    @property
    def stall_ms(self) -> float:
        """Waits of all causes."""
        return sum(line.total_ms for line in self.stalls)
