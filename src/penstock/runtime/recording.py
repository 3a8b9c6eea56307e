"""Planner of a session that only records: it keeps everything, and remembers the passes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.plan.profile import Profile
from penstock.runtime.orders import Orders, PassRecord
from penstock.runtime.planner import Planner
from penstock.runtime.profiling import KnownPasses, profile_of


class RecordingPlanner(Planner):
    """Planner that makes no plan, so that every pass is observed as the first one is.

    Attributes:
        records: Records of the passes so far, in order.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Record nothing yet. Arguments and errors as for ``Planner``."""
        super().__init__(*args, **options)
        self.records: list[PassRecord] = []

    def learn(self, record: PassRecord) -> Orders | None:
        """Keep the record of a pass that saved anything; the orders stay as they are."""
        if record.slots or record.small_count:
            self.records.append(record)
        return None

    def limit(self, device_bytes: int) -> Orders | None:
        """Plan for no limit; the orders stay as they are."""
        return None


def kinds_of(records: Sequence[PassRecord], *, device: str) -> tuple[Profile, tuple[int, ...]]:
    """Return the profile from which a session would plan, with one pass of each kind.

    Args:
        records: All passes of a step.
        device: Device that they ran on.

    Returns:
        The profile, whose passes are the last of their kind, and how many passes of the step are like
        each of them.
    """
    known, counts, orders = KnownPasses(device), dict[int, int](), Orders()
    for record in records:
        like = known.like(record)
        known.remember(record, orders)
        counts[record.index] = 1 + (0 if like is None else counts.pop(like.index))
    profile = known.profile(_unrepeatable(records))
    return profile, tuple(counts[one.index] for one in profile.passes)


def whole_step_of(records: Sequence[PassRecord], *, device: str) -> Profile:
    """Return the profile of a step with all of its passes."""
    return profile_of(records, device=device, unrepeatable=_unrepeatable(records))


def _unrepeatable(records: Sequence[PassRecord]) -> frozenset[str]:
    return frozenset().union(*(one.unrepeatable for one in records))
