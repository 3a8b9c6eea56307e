"""Names of counters, marks and owners that both the code that counts and reports use."""

from __future__ import annotations

from typing import Final

PLANS: Final = "plan"
"""Plans that were made; the reason follows: ``first``, ``drift``, ``held``, ``sampled``, ..."""
UNKNOWN: Final = "unknown_slots"
"""Slots that a user plan does not contain."""
MOVED_EARLIER: Final = "prefetch.moved_earlier"
"""Slots whose reads begin earlier than planned, because they had come late."""
WINDOW_GROWN: Final = "prefetch.window_grown_bytes"
"""Bytes by which the read window has grown, because it had delayed reads that came late."""
REFUSED: Final = "budget.refused"
"""Tensors that did not fit the device budget: each raised a BudgetError."""
SESSION: Final = "session"
"""Mark of a session's beginning, with the fields of ``RunFacts`` that are known then."""
SAVED_TENSORS: Final = "saved tensors"
"""Owner of saved tensors in the host account."""
