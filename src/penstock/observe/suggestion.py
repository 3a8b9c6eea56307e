"""Device budgets that a run without one could do with, and what they would cost: predicted, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SuggestedBudget:
    """One budget."""

    device_bytes: int
    slowdown: float
    """Time of forward and backward in a replay, over the same without a budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Budgets for the passes that were profiled, by a replay on the measured machine."""

    budgets: tuple[SuggestedBudget, ...]
    """The largest first; a half, a quarter and an eighth of what is saved, and the least that does."""
    least_bytes: int | None
    """The least device budget that does for a whole step as profiled; ``None``: none is known."""
