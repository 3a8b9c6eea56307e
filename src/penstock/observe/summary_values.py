"""The values of a session's summary."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.observe.forecast import Prediction
from penstock.observe.suggestion import Suggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowLine:
    """The transfers of one stage and one tier."""

    stage: str
    tier: str
    count: int
    nbytes: int
    busy_s: float
    """Time during which at least one transfer was running."""
    bytes_per_s: float
    """Ratio of ``nbytes`` to ``busy_s``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StallLine:
    """Waits of the training thread for one cause."""

    cause: str
    count: int
    total_ms: float
    per_step_ms: float | None
    """Average per optimizer step; ``None`` if none has ended."""
    share: float
    """Fraction of the run's time, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLine:
    """Use of one memory."""

    memory: str
    peak_bytes: int
    average_bytes: int
    """Average weighted by time."""
    current_bytes: int
    budget_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerLine:
    """Host memory of one part of Penstock."""

    owner: str
    """Name of the part: ``"saved tensors"``, ``"optimizer"``, ..."""
    peak_bytes: int
    current_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemoryUse:
    """Host memory of this process: what Penstock holds, and the rest. See ``memory`` of the settings."""

    limit_bytes: int | None
    """Limit of all that Penstock holds; ``None`` if there is none."""
    limit_source: str
    """Origin of the limit: ``"memory='8GiB'"``; empty without a limit."""
    usable_bytes: int | None
    """Limit of the whole process; ``None`` if it is not limited."""
    held_peak_bytes: int
    """Most that Penstock has held at any one time."""
    owners: tuple[OwnerLine, ...]
    """Parts of Penstock that have held memory; the most first."""
    rest_bytes: int
    """Most that the process has held beside: weights, gradients, work space, Python."""
    process_peak_bytes: int
    """Most memory that was resident at any one time, without pages of files."""
    without_bytes: int | None
    """Estimated memory of the same run without Penstock: the rest, all that autograd saves, and weights,
    optimizer states and gradients that are on flash. ``None`` if saved tensors are not in host memory, or
    have not been profiled."""

    @property
    def together_bytes(self) -> int:
        """Most that Penstock has held, and the rest."""
        return self.held_peak_bytes + self.rest_bytes


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
    """Total effect of one codec."""

    codec: str
    source_bytes: int
    frame_bytes: int
    """Bytes after encoding."""
    ratio: float
    """Ratio of ``frame_bytes`` to ``source_bytes``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanLine:
    """Number of plans that were made for one reason."""

    reason: str
    """Reason of the plans: ``"first"``; ``"drift"``: other slots were saved; ``"held"``: offloading freed
    nothing; ``"sampled"``: codecs were measured; ``"slow codecs"``: they were given up; ``"observed"``: a
    pass showed what can be recomputed; ``"demand"``: data loaders need more of flash, or less;
    ``"memory"``: less device memory is free."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenLine:
    """Bytes that one client has written to flash."""

    client: str
    """Kind of data: one of the values of ``penstock.observe.clients.ON_FLASH``."""
    nbytes: int
    is_per_step: bool
    """True if each step writes more; false for measurements and indexes of data sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeLine:
    """Modules that were recomputed in backward."""

    count: int
    nbytes: int
    """Recomputed bytes."""
    busy_s: float
    """Time of the recomputations, including waits for their inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryValues:
    """The values of a session's summary. Units are in the names of the fields."""

    policy: str
    device: str
    rank: int | None = None
    """Rank of the process; ``None`` if it is the only one."""
    local_rank: int | None = None
    """Its index among the processes on its machine; ``None`` if it is not known."""
    node: str | None = None
    """Name of its machine; ``None`` if the process is the only one."""
    steps: int
    elapsed_s: float
    saved_peak_bytes: int
    """Peak of the bytes that autograd would have held without Penstock."""
    flows: tuple[FlowLine, ...]
    """Traffic by tier and direction; only those with any."""
    codecs: tuple[CodecLine, ...]
    """Codecs that encoded anything, from the counters ``ENCODED_SOURCE``; the most bytes first."""
    stalls: tuple[StallLine, ...]
    """Stalls by cause; the longest first."""
    memory: tuple[MemoryLine, ...]
    host: HostMemoryUse | None = None
    """Host memory of the process; ``None`` if it is not known, as in the log of a killed run."""
    places: tuple[PlaceLine, ...]
    """Offloaded and resident tensors, with reasons; the most bytes first."""
    replans: tuple[ReplanLine, ...]
    """Number of plans, by reason."""
    triggers_moved: int
    """Number of times that the read of a slot was moved earlier because it had come late."""
    window_grown_bytes: int
    """Bytes by which the read window grew for the same reason."""
    recomputed: RecomputeLine
    misses: int
    """Number of tensors that were needed before a prefetch had begun (``MISSES``)."""
    fallbacks: int
    """Number of tensors that went elsewhere because a tier failed or was full (``FALLBACKS``)."""
    counters: dict[str, int]
    ssd_written_bytes: int
    """Total bytes written to flash: the sum of ``ssd_written``."""
    ssd_written: tuple[WrittenLine, ...]
    """Bytes written to flash, by client; the most bytes first."""
    tbw_bytes: int | None
    tbw_share: float | None
    """Ratio of ``ssd_written_bytes`` to ``tbw_bytes``; ``None`` if no TBW was stated."""
    steps_to_wear_out: int | None
    """Number of optimizer steps that write a whole TBW at this rate, without one-time writes; ``None`` if
    unknown, or if steps write nothing."""
    prediction: Prediction | None
    """Predicted and measured cost of the plan in force; ``None`` before a step has run under it."""
    loaders_bytes_per_s: float
    """Flash bandwidth that data loaders on the same flash need."""
    loaders_planned_bytes_per_s: float
    """Flash bandwidth that the plan in force leaves to data loaders."""
    suggestion: Suggestion | None
    """Suggested device budgets; ``None`` for a run that has a budget or no tier."""
    notes: tuple[str, ...]
    """Informative sentences for the user, which need no action."""
    warnings: tuple[str, ...]
