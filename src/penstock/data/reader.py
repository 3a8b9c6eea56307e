"""Samples to memory: where they lie becomes extents, extents become one batch of the engine's.

1. :meth:`Reader.plan`: which extents (:mod:`.extents`): pure.
2. :meth:`Reader.start`: memory is taken, and the reads begin; None if there is no room now.
3. :meth:`Pending.wait`: the samples have arrived; those that could not be read are in ``bad``.
4. :meth:`SampleGroup.free`: whoever used the group has copied, or decoded, what it needs.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from penstock.core.errors import BudgetError, ChecksumError, DatasetError, renewed
from penstock.core.locks import Lock
from penstock.core.process import fork_guard
from penstock.core.units import format_bytes, round_up
from penstock.data.build import Opened
from penstock.data.extents import GRANULE, ReadPlan, distinct, plan_of
from penstock.data.group import ReadBlock, ReadMemory, SampleGroup
from penstock.data.permutation import Numbers
from penstock.io.engine import Engine, Priority, ReadBatch, Transfer
from penstock.io.files import DirectFile, open_path
from penstock.store import checksums

Policy = Literal["raise", "skip"]

ENTRY_BYTES: Final = 1 << 20
"""Longer reads are cut: several at once fill the device's queue."""
_SURCHARGE: Final = 1.1
"""Head-room when more memory is advised: not all of it goes to the read memory."""
_MOST_OPEN: Final = 256
GROUP_PART: Final = 6
"""Groups that fit the read memory, unless one batch is longer: a batch in use keeps its group, and others
are read meanwhile."""
LENT_PART: Final = 5
"""Groups, blocks and gaps included, that must fit for batches to be lent."""


@dataclass(slots=True)
class ReadCounts:
    """Totals of reads; they may outlive a reader."""

    read_bytes: int = 0
    """Bytes that were read of the device."""
    wanted_bytes: int = 0
    """Bytes of samples among them: reads are of whole blocks, and gaps between neighbours are read."""


class Reader:
    """Reads samples of one data set into one read memory. Thread-safe; not inherited by fork.

    Attributes:
        opened: The data set.
        counts: Totals of its reads.
        memory_bytes: What the user gave.
        lends: Whether batches may be memory of the read memory, until ``renew``.
    """

    def __init__(
        self,
        opened: Opened,
        memory: ReadMemory,
        engine: Engine,
        *,
        verify: bool = True,
        priority: Priority = Priority.BACKGROUND,
        memory_bytes: int | None = None,
        counts: ReadCounts | None = None,
    ) -> None:
        """Read by an engine, which is not closed here.

        Args:
            opened: The data set.
            memory: Memory.
            engine: Moves bytes; may be shared with others, whose demands go first.
            verify: Compare checksums, where the format has them.
            priority: Of reads that nobody waits for yet.
            memory_bytes: What the user gave, of which the read memory is a part; for messages.
            counts: Totals to add to; new ones if None.
        """
        self.opened = opened
        self.memory = memory
        self.counts = ReadCounts() if counts is None else counts
        self.memory_bytes = memory.limit_bytes if memory_bytes is None else memory_bytes
        self.lends = True
        self._engine = engine
        self._verify = verify and len(opened.index.sums) > 0
        self._priority = priority
        self._lock = Lock()
        self._files = OrderedDict[int, DirectFile]()
        self._guard = fork_guard()

    @property
    def is_direct(self) -> bool:
        """Return whether the first file is read past the page cache. Raises as ``start``."""
        return self._open(0).direct

    def plan(self, samples: Numbers) -> ReadPlan:
        """Return the extents that some samples need."""
        return plan_of(self.opened.index, samples)

    def start(self, plan: ReadPlan) -> Pending | None:
        """Begin to read; return None if the read memory has no room now.

        Raises:
            BudgetError: It never will; names the longest sample, and the least that would do.
            DatasetError: A file is missing.
            TransferError: A file cannot be opened.
        """
        if self._guard.in_child:
            raise self._guard.error("this reader", "make one here")
        with self._lock:
            if plan.total_bytes > self.memory.limit_bytes:
                raise self.too_small(plan)
            places = self.memory.take(plan.nbytes)
            if places is None and not self.memory.used_bytes:
                places = self.memory.take(plan.nbytes)  # batches may have been dropped since
                if places is None:
                    raise self.too_small(plan)
            if places is None:
                return None
            self.counts.read_bytes += plan.total_bytes
            self.counts.wanted_bytes += int(np.maximum(plan.ranges.nbytes, 0).sum())
        try:
            return self._start(plan, *places)
        except BaseException:
            places[1].clear()  # or whoever keeps the error keeps the memory
            raise

    def read(self, samples: Numbers, policy: Policy) -> SampleGroup:
        """Read samples and wait for them; raises as ``start`` and ``Pending.wait``."""
        pending = self.start(self.plan(samples))
        assert pending is not None, "who reads one group at a time finds the read memory empty"
        return pending.wait(policy)

    def renew(self) -> None:
        """Leave lent memory to the batches that keep it, take new memory, and lend no more.

        Nothing may be under way. See [Note: lent memory].
        """
        with self._lock:
            self.lends = False
            self.memory.renew()

    def too_small(self, plan: ReadPlan) -> BudgetError:
        """Return the error to raise because these samples do not fit."""
        totals = np.maximum(plan.ranges.nbytes, 0).sum(axis=1)
        row = int(totals.argmax())
        room, needed = self.memory.limit_bytes, plan.total_bytes
        slot = f"sample {int(plan.samples[row])}"
        if needed <= room:
            what = f"{slot} and others that are read with it"
            return self.memory.account.refusal(needed, what, "make batches smaller")
        least = self.memory_bytes + round_up(int((needed - room) * _SURCHARGE), GRANULE)
        where = self._where(int(plan.samples[row]), int(plan.ranges.file[row]))
        return BudgetError(
            f"{len(plan.samples)} samples that are needed together take {needed} bytes of memory, and"
            f" of {self.memory_bytes} ({format_bytes(self.memory_bytes)}) there are {room} for them;"
            f" the longest is {where}, {int(totals[row])} bytes: give at least {least} bytes, or make"
            " batches smaller",
            slot=slot,
            limit_bytes=self.memory_bytes,
            least_bytes=least,
        )

    def close(self) -> None:
        """Close the files. Nothing may be under way."""
        self._files.clear()

    def _start(self, plan: ReadPlan, offsets: Numbers, blocks: list[ReadBlock]) -> Pending:
        base = np.append(offsets - plan.begin, 0)  # the last: of a range without bytes
        group = SampleGroup(
            samples=plan.samples,
            offset=np.where(plan.extent < 0, 0, plan.ranges.offset + base[plan.extent]),
            nbytes=plan.ranges.nbytes,
            file=plan.ranges.file,
            memory=self.memory,
            blocks=blocks,
            lends=self.lends
            and plan.apart
            and plan.total_bytes <= self.memory.limit_bytes // LENT_PART,
        )
        if not len(plan.nbytes):
            transfer = Transfer(0)
            transfer.settle()
            return Pending(self, plan, group, None, transfer)
        address = self.memory.arena.address + offsets
        batch = self._batch(group, plan.file, plan.begin, plan.nbytes, address)
        return Pending(self, plan, group, batch, self._engine.submit_batch(batch))

    def _batch(
        self, group: SampleGroup, file: Numbers, begin: Numbers, nbytes: Numbers, address: Numbers
    ) -> ReadBatch:
        """Return the reads of some extents; long ones are cut into entries."""
        pieces = -(-nbytes // ENTRY_BYTES)
        of = np.repeat(np.arange(len(nbytes)), pieces)
        first = np.cumsum(pieces) - pieces
        skip = (np.arange(len(of)) - first[of]) * ENTRY_BYTES
        length = np.minimum(nbytes[of] - skip, ENTRY_BYTES)
        numbers, which = distinct(file)
        sizes = self.opened.index.files.sizes[file[of]]
        return ReadBatch(
            files=[self._open(int(number)) for number in numbers],
            which=which[of],
            offset_bytes=begin[of] + skip,
            address=address[of] + skip,
            nbytes=length,
            least_bytes=np.clip(sizes - begin[of] - skip, 0, length),
            keep_alive=tuple(group.blocks),
            priority=self._priority,
        )

    def _open(self, number: int) -> DirectFile:
        """Return a file, opened if it is not; the one used least recently may be closed."""
        with self._lock:
            file = self._files.get(number)
            if file is None:
                path = os.path.join(self.opened.root, self.opened.index.files.name(number))
                file = self._files[number] = _open(path)
                if len(self._files) > _MOST_OPEN:
                    self._files.popitem(last=False)
            self._files.move_to_end(number)
            return file

    def _where(self, sample: int, file: int) -> str:
        name = self.opened.index.files.name(file)
        return f"sample {sample} of {os.path.join(self.opened.root, name)!r}"

    # -- for what is pending ----------------------------------------------------------------------

    def _ask_again(self, plan: ReadPlan, group: SampleGroup, batch: ReadBatch) -> None:
        """Read each sample of extents that failed by itself, so that a bad one does not fail others."""
        spans = [
            (int(batch.address[e]), int(batch.address[e] + batch.nbytes[e])) for e in batch.errors
        ]
        begin = self.memory.arena.address + group.offset
        for row in range(len(group.samples)):
            for column in np.flatnonzero(group.nbytes[row] > 0):
                start = int(begin[row, column])
                stop = start + int(group.nbytes[row, column])
                if any(start < high and stop > low for low, high in spans):
                    self._ask_for(plan, group, row, int(column))

    def _ask_for(self, plan: ReadPlan, group: SampleGroup, row: int, column: int) -> None:
        offset, nbytes = int(plan.ranges.offset[row, column]), int(group.nbytes[row, column])
        begin = offset // GRANULE * GRANULE
        length = -(-(offset + nbytes) // GRANULE) * GRANULE - begin
        address = self.memory.arena.address + int(group.offset[row, column]) - (offset - begin)
        places = (np.array([n]) for n in (plan.file_of(row), begin, length, address))
        batch = self._batch(group, *places)
        self._engine.submit_batch(batch).wait()
        for error in batch.errors.values():
            where = self._where(int(plan.samples[row]), plan.file_of(row))
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            failure.add_note(f"reading {where}")
            group.bad[row] = failure

    def _check_sums(self, group: SampleGroup) -> None:
        if not self._verify:
            return
        sums = self.opened.index.sums[group.samples]
        lengths = np.maximum(group.nbytes, 0).sum(axis=1)
        absent = len(self.memory.bytes)
        first = np.where(group.nbytes > 0, group.offset, absent).min(axis=1)
        starts = self.memory.arena.address + first
        for row, (address, nbytes) in enumerate(
            zip(starts.tolist(), lengths.tolist(), strict=True)
        ):
            if row in group.bad or not nbytes:
                continue
            found = checksums.mismatch(("full", int(sums[row])), address, nbytes)
            if found is not None:
                where = self._where(int(group.samples[row]), int(group.file[row]))
                group.bad[row] = ChecksumError(
                    f"{where}, {nbytes} bytes: their checksum is {found:#018x}, packed were"
                    f" {int(sums[row]):#018x}; the file is damaged: copy it again, or skip bad samples"
                    ' (on_error="skip")'
                )


class Pending:
    """Samples that are being read.

    Attributes:
        plan: Their extents.
        transfer: Ends when all have arrived; settled if they have no bytes.
    """

    def __init__(
        self,
        reader: Reader,
        plan: ReadPlan,
        group: SampleGroup,
        batch: ReadBatch | None,
        transfer: Transfer,
    ) -> None:
        """Describe a read that has begun; for the reader."""
        self.plan = plan
        self.transfer = transfer
        self._reader = reader
        self._group = group
        self._batch = batch

    def urge(self) -> None:
        """Raise the priority of the read to that of a demand, because training waits for it."""
        self.transfer.promote(Priority.DEMAND)

    def wait(self, policy: Policy, *, urgent: bool = True) -> SampleGroup:
        """Wait until all has arrived.

        Args:
            policy: ``raise`` the error of a sample that cannot be read, or leave it in ``bad``.
            urgent: Go before all that nobody waits for.

        Raises:
            TransferError: A sample cannot be read; with a note that names it.
            ChecksumError: A sample is damaged.
        """
        if urgent:
            self.urge()
        try:
            self._wait()
        except BaseException:
            self._group.free()
            raise
        if self._group.bad and policy == "raise":
            self._group.free()
            raise renewed(next(iter(self._group.bad.values())))  # the group keeps that one
        return self._group

    def _wait(self) -> None:
        self.transfer.wait()
        batch, self._batch = self._batch, None  # which keeps the group's blocks
        if batch is not None and batch.errors:
            self._reader._ask_again(self.plan, self._group, batch)
        self._reader._check_sums(self._group)

    def free(self) -> None:
        """Free the memory of samples that nobody wants any more, once the transfer has ended."""
        self._group.free()


def _open(path: str) -> DirectFile:
    try:
        return open_path(path, "r")
    except FileNotFoundError as error:
        raise DatasetError(
            f"{path!r} is missing: it was there when the data set was opened"
        ) from error
    except OSError as error:
        if getattr(error, "errno", None) == 2:
            raise DatasetError(
                f"{path!r} is missing: it was there when the data set was opened"
            ) from error
        raise
