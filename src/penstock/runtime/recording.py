"""Planner of a session that only records: it keeps everything, and remembers the passes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.plan.profile import Profile
from penstock.runtime.orders import Orders, PassRecord
from penstock.runtime.planner import Planner
from penstock.runtime.profiling import KnownPasses, profile_of


class RecordingPlanner(Planner):
    """Planner that makes no plan, so that every pass is observed as the first one is.

    If codecs may be chosen, all passes are sampled as well.

    Attributes:
        records: Records of the passes so far, in order.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """Record nothing yet. Arguments and errors as for ``Planner``."""
        super().__init__(*args, **options)
        self.orders = replace(self.orders, samples=self._codecs.chosen)
        self.records: list[PassRecord] = []

    def learn(self, record: PassRecord) -> Orders | None:
        """Keep the record of a pass that saved anything; the orders stay as they are."""
        if record.slots or record.small_count:
            self.records.append(record)
        return None

    def limit(self, device_bytes: int) -> Orders | None:
        """Plan for no limit; the orders stay as they are."""
        return None


class RecordedPasses:
    """Passes of a step, each timed as the last one of its kind: the first is slower than the others.

    Attributes:
        counts: Number of passes that are like each pass of ``kinds``.
    """

    def __init__(self, records: Sequence[PassRecord], *, device: str) -> None:
        """Find the kinds of all passes of a step, which ran on ``device``."""
        known, counts, orders = KnownPasses(device), dict[int, int](), Orders()
        for record in records:
            like = known.like(record)
            known.remember(record, orders)
            counts[record.index] = 1 + (0 if like is None else counts.pop(like.index))
        self._device = device
        self._records = tuple(records)
        self._known = known
        self._unrepeatable = frozenset[str]().union(*(one.unrepeatable for one in records))
        self.kinds = known.profile(self._unrepeatable)
        """Profile from which a session would plan, with one pass of each kind."""
        self.counts = tuple(counts[one.index] for one in self.kinds.passes)

    def step(self, most: int) -> Profile:
        """Return the profile of the step with all passes, or the first ``most``, one after the other."""
        placed: list[PassRecord] = []
        for index, record in enumerate(self._records[:most], start=1):
            begin_ns = placed[-1].end_ns if placed else 0
            placed.append(_placed(self._known.like(record) or record, index, begin_ns))
        return profile_of(placed, device=self._device, unrepeatable=self._unrepeatable)


def _placed(record: PassRecord, index: int, begin_ns: int) -> PassRecord:
    """Return a pass as if the module that saved first had been called at another time."""
    began_ns = min((one.start_ns for one in record.operators), default=record.start_ns)
    delta = begin_ns - min(began_ns, record.start_ns)
    backward_ns = record.backward_start_ns
    return replace(
        record,
        index=index,
        start_ns=record.start_ns + delta,
        backward_start_ns=None if backward_ns is None else backward_ns + delta,
        end_ns=record.end_ns + delta,
        slots=tuple(
            slot._replace(
                saved_at_ns=slot.saved_at_ns + delta,
                needed_at_ns=None if slot.needed_at_ns is None else slot.needed_at_ns + delta,
            )
            for slot in record.slots
        ),
        operators=tuple(
            one.moved(one.start_ns + delta, one.end_ns + delta) for one in record.operators
        ),
    )
