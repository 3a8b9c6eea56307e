"""The plan of a whole training step as a value: its memory, its bounds, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.plan.machine import Machine
from penstock.plan.plan import Plan
from penstock.plan.replay.step_walk import ReplayedStep
from penstock.plan.weights import WeightsChoice


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of a step in bytes, by what it is for."""

    kept: int
    """Weights that stay."""
    cached: int
    """Optimizer records that stay."""
    window: int
    """Weights that come and go, gradients, and updates on their way to flash."""
    rings: int
    """Buffers of transfers."""
    saved: int
    """Saved tensors; on an accelerator everything else on the device, too."""
    gradients: int = 0
    """Gradients that wait for ``step()``, or for what other backwards add to them."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.kept + self.cached + self.window + self.rings + self.saved + self.gradients


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Times in ns that a step cannot be shorter than, each for one resource."""

    compute: int
    """Forward and backward; on a CPU with the arithmetic of updates, which uses the same cores."""
    reads: int
    """Reads from flash."""
    writes: int
    """Writes to flash."""
    shared: bool
    """True if reads and writes share one bandwidth, so that their sum counts."""
    update: int
    """Arithmetic of updates."""
    link: int
    """The busier direction of the link; 0 if flash is not behind it."""
    network: int = 0
    """Weights that are gathered and gradients that are reduced; 0 if there is none, or its bandwidth is
    not known."""

    @property
    def flash(self) -> int:
        """Time that flash takes."""
        return self.reads + self.writes if self.shared else max(self.reads, self.writes)

    @property
    def step(self) -> int:
        """The largest."""
        return max(self.compute, self.flash, self.update, self.link, self.network)

    @property
    def binds(self) -> str:
        """Name of the largest: ``"compute"``, ``"flash"``, ``"link"``, ``"update"`` or ``"network"``."""
        bounds = {
            "compute": self.compute,
            "flash": self.flash,
            "link": self.link,
            "update": self.update,
            "network": self.network,
        }
        return max(bounds, key=bounds.__getitem__)


@dataclass(frozen=True)
class StepPlan:
    """Plan of one training step with weights on flash, and what it costs."""

    machine: str
    """Name of the machine."""
    saved: Plan
    """Plan for saved tensors, within ``memory.saved``."""
    kept: tuple[str, ...]
    """Modules whose weights stay in memory, in the order of the module tree."""
    cached: tuple[str, ...]
    """Modules whose optimizer records stay in memory."""
    choice: WeightsChoice
    """The same, and which weights stay from one use to the next."""
    order: tuple[str, ...]
    """Modules in the order in which their weights are read or gathered, once for each use."""
    memory: StepMemory
    memory_bytes: int
    """The memory that was given."""
    least_bytes: int
    """Least memory for this step."""
    disk_bytes: int
    """Bytes on flash: all weights (unless they never leave memory, or rest in host memory), all records,
    gradients that wait there, and the most saved tensors at once. With several ranks, those of one."""
    parameters: int
    """Number of trained parameters, of all ranks together."""
    weights_stay: bool
    """True if weights never leave memory."""
    in_step: bool
    """True if ``step()`` updates weights, after backward."""
    weight_bytes: int
    """Bytes of all weights, of all ranks together."""
    host_weight_bytes: int
    """Bytes of those of one rank that rest in host memory; the next are of those that rest on flash."""
    home_bytes: int
    bounds: StepBounds
    replayed: ReplayedStep
    hidden_factor: float | None
    """How many times as many tokens a step (images, sequences) would just hide the flash behind compute;
    1 or less: it is hidden. None: no number would, since saved tensors take longer to move than to
    compute. Updates in ``step()`` come after that, and are not hidden."""
    network_factor: float
    """The same for the network, whose bytes do not grow with the tokens; 0 if it takes no time."""

    @property
    def written_bytes(self) -> int:
        """Bytes written to flash in a step."""
        return self.replayed.moved.written + self.replayed.activations_written

    @property
    def read_bytes(self) -> int:
        """Bytes read from flash in a step."""
        return self.replayed.moved.read + self.replayed.activations_read


def hidden_factor(found: ReplayedStep, machine: Machine, in_step: tuple[int, int]) -> float | None:
    """Return the factor on tokens at which compute just hides flash.

    Compute and saved tensors grow with the tokens; weights, records and gradients do not. On a CPU the
    update takes its time from compute. What is read and written ``in_step`` comes after compute.
    """
    moved = found.moved
    reads, more_reads = _times(
        found.read_ns, moved.read - in_step[0], found.activations_read, moved.read
    )
    writes, more_writes = _times(
        found.write_ns, moved.written - in_step[1], found.activations_written, moved.written
    )
    grows = found.compute_ns
    if machine.flash_shared:
        return _ratio(reads + writes, grows - more_reads - more_writes)
    one = _ratio(reads, grows - more_reads)
    other = _ratio(writes, grows - more_writes)
    return None if one is None or other is None else max(one, other)


def _times(
    took_ns: int, fixed_bytes: int, activation_bytes: int, moved_bytes: int
) -> tuple[float, float]:
    """Return the parts of a time for bytes that do not grow with the tokens, and for those that do."""
    whole_bytes = max(1, moved_bytes + activation_bytes)
    return took_ns * fixed_bytes / whole_bytes, took_ns * activation_bytes / whole_bytes


def _ratio(fixed_ns: float, left_ns: float) -> float | None:
    if left_ns <= 0:
        return None if fixed_ns or left_ns else 0.0
    return fixed_ns / left_ns
