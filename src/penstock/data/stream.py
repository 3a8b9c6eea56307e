"""Batches that are read and decoded ahead, by one thread, of the thread that trains.

[Note: groups]
    Batches are read in *groups*, whose samples are planned together, so that neighbours are read at
    once: as many batches as make some MiB, or all of a window. A group's memory is given back when its
    last batch is decoded, or, where batches are that very memory, dropped. Groups begin, in order, as
    long as fewer batches than :class:`Depth` says are under way or ready, and the read memory has room.

[Note: lumps]
    To hand over a batch costs two threads a tenth of a millisecond, in which flash delivers more than a
    batch of a few hundred KiB. So small batches are decoded and handed over several at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from penstock.core.locks import condition
from penstock.data.assemble import Assembler
from penstock.data.depth import Depth
from penstock.data.extents import ReadPlan, distinct
from penstock.data.group import SampleGroup
from penstock.data.order import Epoch, RankBatch
from penstock.data.reader import GROUP_PART, Pending, Policy, Reader
from penstock.io.engine import Transfer
from penstock.observe.clock import Clock, RealClock
from penstock.store.window import TransferWindow

GROUP_BYTES: Final = 8 << 20
"""Of a group that is no window, where there is memory enough."""
_MOST_FILES: Final = 256


@dataclass(slots=True)
class Tally:
    """Totals of a loader; they outlive its streams."""

    batches: int = 0
    samples: int = 0
    data_bytes: int = 0
    waited_s: float = 0.0
    skipped: int = 0
    """Samples that could not be read, and were left out."""
    last_errors: list[str] = field(default_factory=list)
    """Messages of the first 16 of them."""

    def skip(self, error: Exception) -> None:
        """Count a sample that is left out."""
        self.skipped += 1
        if len(self.last_errors) < 16:
            self.last_errors.append(" ".join([str(error), *getattr(error, "__notes__", ())]))


@dataclass(frozen=True, slots=True)
class Delivery:
    """One batch, decoded."""

    step: RankBatch
    value: Any
    """Its contents; None if no sample of it could be read."""
    samples: int
    data_bytes: int


@dataclass(slots=True)
class _Fetch:
    steps: list[RankBatch]
    pending: Pending
    begun_ns: int
    arrived_ns: int = 0


class Stream:
    """One pass over some steps. One thread takes its batches; it is closed once."""

    def __init__(
        self,
        reader: Reader,
        epoch: Epoch,
        steps: Iterator[RankBatch],
        assemble: Assembler,
        *,
        depth: Depth,
        tally: Tally,
        policy: Policy = "raise",
        ready: int = 2,
        lump: int = 1,
        on_value: Callable[[Any], Any] = lambda value: value,
        clock: Clock | None = None,
    ) -> None:
        """Begin to read.

        Args:
            reader: Reads; not used by others meanwhile.
            epoch: Says which samples stand at which positions.
            steps: What to deliver.
            assemble: Decodes.
            depth: How far ahead; kept by the caller from stream to stream.
            tally: Where counts go.
            policy: What to do about a sample that cannot be read.
            ready: Most lumps of decoded batches to have waiting.
            lump: Batches to decode together, see [Note: lumps].
            on_value: Applied to each batch, in the thread of the stream.
            clock: Tells the time.
        """
        self._reader, self._epoch, self._steps = reader, epoch, steps
        self._assemble, self._depth, self._tally = assemble, depth, tally
        self._policy, self._lump, self._on_value = policy, lump, on_value
        self._most_before = (ready - 1) * lump  # that wait already, for a lump to join them
        self._clock = RealClock() if clock is None else clock
        self._changed = condition()
        self._ready = deque[list[Delivery]]()  # lumps
        self._taken = deque[Delivery]()  # what is left of one; theirs who take
        self._error: BaseException | None = None
        self._over = self._stopping = False
        self._reads = TransferWindow[_Fetch](release=lambda fetch: fetch.pending.free())
        self._next_step: RankBatch | None = next(steps, None)
        self._candidate: tuple[list[RankBatch], ReadPlan] | None = None
        self._under_way = 0
        self._awaited: Pending | None = None  # by the thread of the stream
        self._waiting = False  # whoever takes, for a batch
        self._full = False  # the memory, when a group was to begin last; and what was used then
        self._used_bytes = 0
        self._arrived_ns = 0
        self._taken_ns = 0
        self._thread = threading.Thread(target=self._run, name="penstock-data", daemon=True)
        self._thread.start()

    def take(self) -> Delivery | None:
        """Return the next batch; None if there is no more. Raises what reading or decoding it raised."""
        asked_ns = self._clock.now_ns()
        found = self._taken.popleft() if self._taken else self._take_lump()
        if found is None:
            if self._error is not None:
                raise self._error
            return None
        now_ns = self._clock.now_ns()
        waited_s = (now_ns - asked_ns) / 1e9
        if self._taken_ns:
            self._depth.stepped((now_ns - self._taken_ns) / 1e9, waited_s)
        self._taken_ns = now_ns
        self._tally.batches += 1
        self._tally.samples += found.samples
        self._tally.data_bytes += found.data_bytes
        self._tally.waited_s += waited_s
        return found

    def _take_lump(self) -> Delivery | None:
        """Wait for a lump and return its first batch; None at the end."""
        with self._changed:
            while not self._ready and not self._over:
                self._waiting = True
                if self._awaited is not None:
                    self._awaited.urge()
                self._changed.notify_all()  # what was left of the last one is gone
                self._changed.wait()
            self._waiting = False
            self._taken.extend(self._ready.popleft() if self._ready else ())
            found = self._taken.popleft() if self._taken else None
            self._changed.notify_all()
        return found

    def stop(self) -> None:
        """Ask the thread to end; return at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """End, and wait until no memory is written to any more."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._ready.clear()
        self._taken.clear()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._go_on()
            while self._reads and not self._stopping:
                self._deliver(self._reads.pop())
                self._go_on()
        except BaseException as error:  # noqa: BLE001  (whoever takes the next batch gets it)
            self._error = error
        self._reads.cancel()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _go_on(self) -> None:
        """Begin groups. If none is in flight and batches hold all of the read memory, renew it first."""
        self._fill()
        if self._full and not (self._reads or self._stopping):
            self._reader.renew()
            self._full = False
            self._fill()
            if self._full and self._candidate is not None and not self._reads:
                raise self._reader.too_small(self._candidate[1])

    def _deliver(self, fetch: _Fetch) -> None:
        with self._changed:
            self._awaited, urgent = fetch.pending, self._waiting
        group = fetch.pending.wait(self._policy, urgent=urgent)
        self._awaited = None
        try:
            since = max(fetch.begun_ns, self._arrived_ns)
            self._arrived_ns = max(self._arrived_ns, fetch.arrived_ns)
            self._depth.arrived(max(0, fetch.arrived_ns - since) / 1e9)
            for error in group.bad.values():
                self._tally.skip(error)
            counts = [step.stop - step.start for step in fetch.steps]
            firsts = np.cumsum([0, *counts[:-1]])
            sizes = np.maximum(group.nbytes, 0).sum(axis=1)
            nbytes = np.add.reduceat(sizes, firsts)  # no step is empty
            rows = [range(a, a + n) for a, n in zip(firsts.tolist(), counts, strict=True)]
            facts = list(zip(fetch.steps, rows, nbytes.tolist(), strict=True))
            for start in range(0, len(facts), self._lump):
                if not self._deliver_lump(group, facts[start : start + self._lump]):
                    return
                self._fill()
        finally:
            group.free()

    def _deliver_lump(
        self, group: SampleGroup, facts: Sequence[tuple[RankBatch, range, int]]
    ) -> bool:
        made = [
            Delivery(step, value, count, nbytes)
            for (step, _, nbytes), (value, count) in zip(
                facts, self._values(group, [rows for _, rows, _ in facts]), strict=True
            )
        ]
        with self._changed:
            while self._ready_batches > self._most_before and not self._stopping:
                self._changed.wait()
            self._under_way -= len(made)
            self._ready.append(made)
            self._changed.notify_all()
            return not self._stopping

    @property
    def _ready_batches(self) -> int:
        return len(self._taken) + sum(map(len, self._ready))

    def _values(self, group: SampleGroup, spans: Sequence[range]) -> list[tuple[Any, int]]:
        """Return value and number of samples of each; the value is None where there is no sample."""
        if not group.bad:
            values = self._assemble.batches(group, spans)
            return [
                (self._on_value(value), len(rows))
                for value, rows in zip(values, spans, strict=True)
            ]
        good = [[row for row in rows if row not in group.bad] for rows in spans]
        return [
            (self._on_value(self._assemble(group, rows)) if rows else None, len(rows))
            for rows in good
        ]

    def _fill(self) -> None:
        """Begin groups, as far ahead as it pays."""
        used_bytes = self._reader.memory.used_bytes
        if self._full and used_bytes == self._used_bytes:
            return
        self._full = False
        while not self._stopping:
            with self._changed:
                ahead = self._under_way + self._ready_batches
            if self._under_way and ahead >= self._depth.batches:
                return
            if self._candidate is None:
                self._candidate = self._next_group()
            if self._candidate is None:
                return
            steps, plan = self._candidate
            used_bytes = self._reader.memory.used_bytes  # before: batches may be dropped meanwhile
            pending = self._reader.start(plan)
            if pending is None:
                self._full, self._used_bytes = True, used_bytes
                return
            self._begin(_Fetch(steps, pending, self._clock.now_ns()))
            self._candidate = None

    def _begin(self, fetch: _Fetch) -> None:
        def arrived(_: Transfer) -> None:
            fetch.arrived_ns = self._clock.now_ns()

        fetch.pending.transfer.add_done_callback(arrived)
        self._reads.add(fetch, fetch.pending.transfer)
        self._under_way += len(fetch.steps)

    def _next_group(self) -> tuple[list[RankBatch], ReadPlan] | None:
        steps = self._next_steps()
        if not steps:
            return None
        plan = self._plan(steps)
        while len(steps) > 1 and self._too_much(plan):
            half = len(steps) // 2
            self._steps = _chain(steps[half:], self._next_step, self._steps)
            self._next_step = next(self._steps, None)
            steps = steps[:half]
            plan = self._plan(steps)
        return steps, plan

    def _next_steps(self) -> list[RankBatch]:
        """Return the steps of a window, or of some MiB."""
        index, memory = self._reader.opened.index, self._reader.memory
        mean = max(1, index.data_bytes // index.samples)
        edge = self._epoch.edge(self._next_step.start) if self._next_step is not None else 0
        window = self._epoch.order.kind == "window" and self._epoch.order.chunk_samples > 1
        room = memory.limit_bytes if window else min(GROUP_BYTES, memory.limit_bytes // GROUP_PART)
        steps = list[RankBatch]()
        while (step := self._next_step) is not None:
            length = max(1, step.stop - step.start) * mean
            if steps and (room < length or (window and step.start >= edge)):
                break
            room -= length
            self._next_step = next(self._steps, None)
            if step.stop > step.start:
                steps.append(step)
        return steps

    def _plan(self, steps: list[RankBatch]) -> ReadPlan:
        samples = self._epoch.samples
        if all(each.stop == after.start for each, after in pairwise(steps)):
            positions = np.arange(steps[0].start, steps[-1].stop) % samples  # as each by itself
        else:
            positions = np.concatenate([step.positions(samples) for step in steps])
        return self._reader.plan(self._epoch.at(positions))

    def _too_much(self, plan: ReadPlan) -> bool:
        limit = self._reader.memory.limit_bytes
        return plan.total_bytes > limit // 2 or (
            len(plan.file) > _MOST_FILES and len(distinct(plan.file)[0]) > _MOST_FILES
        )


def _chain(
    first: list[RankBatch], second: RankBatch | None, rest: Iterator[RankBatch]
) -> Iterator[RankBatch]:
    yield from first
    if second is not None:
        yield second
    yield from rest
