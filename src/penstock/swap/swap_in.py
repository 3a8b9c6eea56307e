"""Restoring a suspended job's memory: pages are opened, supplied by the system, filled and checked."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Final, NamedTuple

import torch

from penstock.core.errors import PenstockError
from penstock.core.units import round_up
from penstock.io import pages as memory
from penstock.io.engine import Priority, Transfer
from penstock.io.pages import PageRange
from penstock.io.prefault import Prefault
from penstock.staging import bytes_of, copy_across, ready_event
from penstock.store.arena import Arena
from penstock.store.base import Tier
from penstock.store.pool import Block
from penstock.store.window import TransferWindow
from penstock.swap.recall import Recall
from penstock.swap.write_batch import (
    BUFFER_BYTES,
    BUFFERS,
    STAGED_BYTES,
    Part,
    SwappedStorage,
    WriteBatch,
)

_NO_PAGES: Final = PageRange(0, 0)


class _Read(NamedTuple):
    batch: WriteBatch
    wanted: Sequence[Part]
    address: int
    keep_alive: object
    block: Block | None = None
    """Buffer from which small pages are filled."""
    staged: torch.Tensor | None = None
    """Host memory from which a device's storage is filled."""


class SwapIn:
    """Restores storages at their old addresses. Not thread-safe; for a single use.

    Attributes:
        failed: Errors of storages that could not be restored, by name.
    """

    def __init__(
        self,
        wanted: Sequence[SwappedStorage],
        batches: Sequence[WriteBatch],
        *,
        tier: Tier,
        recall: Recall | None,
    ) -> None:
        """Read nothing yet.

        Args:
            wanted: Storages to restore; their pages are closed.
            batches: Batches in which the tier has them; they may contain parts of others too.
            tier: Tier with all storages that no checkpoint has.
            recall: Checkpoint with all others; None if there are none.
        """
        self.failed: dict[str, BaseException] = {}
        self._wanted = wanted
        self._batches = batches
        self._tier = tier
        self._recall = recall
        self._arena = Arena(BUFFERS * BUFFER_BYTES, owner="resume")
        self._reads = TransferWindow[_Read](
            complete=self._deliver,
            fail=self._read_failed,
            release=self._free,
            limit_bytes=STAGED_BYTES,
        )
        self._to_come = Counter[SwappedStorage]()

    def run(self) -> None:
        """Restore the storages. Then those with ``restored`` set are open, and no transfer is running."""
        opened = list[SwappedStorage]()
        try:
            for each in self._in_order():
                opened.append(each)  # first, so that it is closed again if this is interrupted
                if each.held.pages is not None and not self._open(each, each.held.pages):
                    opened.pop()
            numbers = {each: number for number, each in enumerate(opened)}
            with (
                closing(self._arena),
                Prefault([each.held.pages or _NO_PAGES for each in opened]) as supply,
                self._reads,
            ):
                for each, number in numbers.items():
                    if each.recalled:
                        supply.wait_for(number)
                        self._recall_one(each)
                for last, batch, parts in self._wanted_batches(numbers):
                    supply.wait_for(last)
                    self._begin(batch, parts)
        finally:
            lost = [each.held.pages for each in opened if not each.restored]
            memory.protect_and_free(each for each in lost if each is not None)

    def _in_order(self) -> Sequence[SwappedStorage]:
        """Return the wanted storages, those in a checkpoint first, in the order of its files."""
        ordered = [each for each in self._wanted if each.recalled]
        if self._recall is not None:
            place_of = self._recall.place_of
            ordered.sort(key=lambda each: place_of(each.held))
        return ordered + [each for each in self._wanted if not each.recalled]

    def _wanted_batches(
        self, numbers: Mapping[SwappedStorage, int]
    ) -> list[tuple[int, WriteBatch, list[Part]]]:
        """Return batches with their wanted parts, in the order in which their last part is supplied."""
        found = []
        for batch in self._batches:
            if parts := [each for each in batch.parts if each.swapped in numbers]:
                self._to_come.update(each.swapped for each in parts)
                found.append((max(numbers[each.swapped] for each in parts), batch, parts))
        return sorted(found, key=lambda one: one[0])

    def _open(self, swapped: SwappedStorage, pages: PageRange) -> bool:
        try:
            memory.unprotect_for_refill(pages)
        except PenstockError as refused:
            self.failed[swapped.held.name] = refused
            return False
        return True

    def _recall_one(self, swapped: SwappedStorage) -> None:
        assert self._recall is not None
        try:
            self._recall.restore(swapped.held)
        except (PenstockError, OSError) as error:
            self.failed[swapped.held.name] = error
        else:
            swapped.restored = True

    def _begin(self, batch: WriteBatch, wanted: Sequence[Part]) -> None:
        def submit(priority: Priority) -> Transfer:
            return self._tier.read(
                batch.ticket, read.address, keep_alive=read.keep_alive, priority=priority
            )

        try:
            read = self._prepare(batch, wanted)
            self._reads.begin(read, submit, 0 if read.staged is None else read.staged.nbytes)
        except (PenstockError, OSError) as error:
            self._fail(wanted, error)

    def _prepare(self, batch: WriteBatch, wanted: Sequence[Part]) -> _Read:
        """Return a read to the pages themselves, or to a buffer; may complete earlier reads for it."""
        ticket, (swapped, pages, _) = batch.ticket, batch.parts[0]
        if len(batch.parts) > 1:
            block = self._reads.take(lambda: self._arena.allocate(BUFFER_BYTES, force=True))
            assert block is not None, "nothing is in flight, but buffers are in use"
            return _Read(batch, wanted, block.address, block, block=block)
        if pages is not None:
            return _Read(batch, wanted, pages.address, swapped.held.storage)
        granule = self._tier.spec.granule_bytes
        self._reads.make_room(ticket.window.nbytes)
        buffer = torch.empty(ticket.window.nbytes + granule, dtype=torch.uint8)
        start = round_up(buffer.data_ptr(), granule) - buffer.data_ptr()
        target = buffer[start : start + ticket.window.nbytes]
        return _Read(batch, wanted, target.data_ptr(), target, staged=target)

    def _deliver(self, read: _Read) -> None:
        ticket, storage = read.batch.ticket, read.wanted[0].swapped.held.storage
        if read.staged is not None:
            skew = ticket.window.skew
            storage.resize_(ticket.nbytes)
            staged = read.staged[skew : skew + ticket.nbytes]
            copy_across(staged, bytes_of(storage), ready_event(storage.device))
        for swapped, pages, offset in read.wanted:
            if read.block is not None:
                assert pages is not None
                ctypes.memmove(pages.address, read.block.address + offset, pages.nbytes)
            self._to_come[swapped] -= 1
            swapped.restored = not self._to_come[swapped]

    def _free(self, read: _Read) -> None:
        if read.block is not None:
            read.block.free()

    def _read_failed(self, read: _Read, error: Exception) -> None:
        """Note why storages are not restored. A device may be full: then torch raises RuntimeError."""
        if not isinstance(error, (PenstockError, OSError, RuntimeError)):
            raise error
        self._fail(read.wanted, error)

    def _fail(self, wanted: Sequence[Part], error: BaseException) -> None:
        for part in wanted:
            self.failed[part.swapped.held.name] = error
