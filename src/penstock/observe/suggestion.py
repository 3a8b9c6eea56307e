"""Possible device budgets for a run without one, with their predicted costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SuggestedBudget:
    """A device budget with its predicted cost."""

    device_bytes: int
    slowdown: float
    """Ratio of the time of forward and backward in a replay to that without a budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Budgets for the profiled passes, from a replay on the measured machine."""

    budgets: tuple[SuggestedBudget, ...]
    """Half, a quarter and an eighth of the saved bytes, and the minimum budget; the largest first."""
    least_bytes: int | None
    """Minimum device budget for a whole step as profiled; ``None`` if it is not known."""
    is_host: bool = False
    """True if saved tensors are in host memory, so that ``memory`` limits them."""
    others_bytes: int = 0
    """Bytes that other parts of Penstock have held at their peak in the same memory."""
