"""Names of counters and marks that both who counts and who tells must know."""

from __future__ import annotations

from typing import Final

PLANS: Final = "plan"
"""Plans that were made, below it by the reason: ``first``, ``drift``, ``held``, ``sampled``, ..."""
UNKNOWN: Final = "unknown_slots"
"""Slots that a given plan does not know."""
MOVED_EARLIER: Final = "prefetch.moved_earlier"
"""Places at which reads begin that were moved, because the reads had come late."""
WINDOW_GROWN: Final = "prefetch.window_grown_bytes"
"""Bytes by which the window of reads has grown, because it held up reads that came late."""
REFUSED: Final = "budget.refused"
"""Tensors for which there was no room in the device budget: each was a BudgetError."""
SESSION: Final = "session"
"""The mark that a session begins with; its fields are those of ``RunFacts`` that are known then."""
