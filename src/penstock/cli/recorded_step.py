"""A step of a user's script, as it was recorded: the input of plans for it. Does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.plan.machine import Machine
from penstock.plan.profile import Profile
from penstock.plan.weights import ModuleWeights

MOST_PASSES: Final = 8
"""Passes that a plan of a whole step has at most; each takes time to replay."""


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """All forwards and backwards up to a step of an optimizer, whose update did not happen."""

    number: int
    """Number of the step, from 1."""
    kinds: Profile
    """One pass of each kind, as a session plans from; with samples of codecs if they were tried."""
    counts: tuple[int, ...]
    """Number of passes of the step that are like each pass of ``kinds``."""
    saved_bytes: int
    """Bytes of the slots that all passes saved."""
    slots: int
    """Number of these slots."""
    profile: Profile
    """The whole step, or its first ``MOST_PASSES`` passes."""
    weights: tuple[ModuleWeights, ...]
    """Weights of each module, and the operators of ``profile`` that use them."""
    tokens: int
    """Tokens in the inputs of the step; 0 if they are no tokens."""
    samples: int
    """Samples in the inputs of the step; 0 if that is not known."""
    optimizer: str
    """Name of the optimizer's class."""
    gradient_bytes: int
    state_bytes: int
    """Bytes of the optimizer's states in memory, which its first update makes; 0 if not known."""
    states: tuple[str, ...]
    """Names of these states, each with a value for each parameter."""
    states_unknown: str
    """Reason why the states are not known, or cannot be on flash; ``""`` if they can."""
    clips: bool
    """True if the script has clipped gradients by their norm, after the last backward."""
    process_peak_bytes: int
    """Most memory that the process has held until then; on CUDA that torch has held on the device."""
    machine: Machine
    """Size of each memory, and bandwidth of flash and on CUDA of the link, if they were measured."""

    @property
    def passes(self) -> int:
        """Number of passes (a forward graph and its backward) of the step."""
        return sum(self.counts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(one.nbytes + one.small_bytes for one in self.weights)

    @property
    def is_cpu(self) -> bool:
        """True if saved tensors are in host memory."""
        return self.device == "cpu"

    @property
    def device(self) -> str:
        """Kind of the device that the script computes on: ``"cpu"`` or ``"cuda"``."""
        return self.kinds.device.partition(":")[0]

    @property
    def units(self) -> int:
        """Tokens of the step, or samples if there are none, or else passes."""
        return self.tokens or self.samples or self.passes

    def per_step(self, nbytes: int | float) -> int:
        """Return what the step has of a figure of ``kinds``, which has each kind of pass once."""
        return round(nbytes * self.passes / max(1, len(self.counts)))
