"""How a suspended job's memory comes back: opened, supplied by the system, filled, proven."""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Final, NamedTuple

import torch

from penstock.core.errors import PenstockError
from penstock.core.units import round_up
from penstock.io import pages as memory
from penstock.io.arena import Arena, Block
from penstock.io.engine import Transfer
from penstock.io.pages import Pages
from penstock.io.supply import Supply
from penstock.staging import bytes_of, copy_across, ready_event
from penstock.swap.recall import Recall
from penstock.swap.write_batch import (
    BUFFER_BYTES,
    BUFFERS,
    STAGED_BYTES,
    Part,
    SwappedStorage,
    WriteBatch,
)
from penstock.tier.base import Tier

_NO_PAGES: Final = Pages(0, 0)


class _Read(NamedTuple):
    parcel: WriteBatch
    wanted: Sequence[Part]
    transfer: Transfer
    block: Block | None = None
    """From which small pages are filled."""
    staged: torch.Tensor | None = None
    """Host memory from which a device's storage is filled."""


class SwapIn:
    """Brings some storages back to where they were. Not thread-safe; serves once.

    Attributes:
        failed: Why some are not back, by name.
    """

    def __init__(
        self,
        wanted: Sequence[SwappedStorage],
        parcels: Sequence[WriteBatch],
        *,
        tier: Tier,
        recall: Recall | None,
    ) -> None:
        """Touch nothing yet.

        Args:
            wanted: What is to come; their pages are closed.
            parcels: In which the tier has them; of others they may have parts too.
            tier: Has all that no checkpoint has.
            recall: Has all others; None: there are none.
        """
        self.failed: dict[str, BaseException] = {}
        self._wanted = wanted
        self._parcels = parcels
        self._tier = tier
        self._recall = recall
        self._arena = Arena(BUFFERS * BUFFER_BYTES, owner="resume")
        self._reads: deque[_Read] = deque()
        self._staged_bytes = 0
        self._to_come = Counter[SwappedStorage]()

    def run(self) -> None:
        """Fill them. What is ``back`` then is open, all else is closed, and nothing is on its way."""
        opened = list[SwappedStorage]()
        try:
            for each in self._in_order():
                opened.append(each)  # first, so that it is closed again should this be interrupted
                if each.held.pages is not None and not self._open(each, each.held.pages):
                    opened.pop()
            numbers = {each: number for number, each in enumerate(opened)}
            with (
                closing(self._arena),
                Supply([each.held.pages or _NO_PAGES for each in opened]) as supply,
            ):
                for each, number in numbers.items():
                    if each.recalled:
                        supply.wait_for(number)
                        self._recall_one(each)
                for last, parcel, parts in self._coming(numbers):
                    supply.wait_for(last)
                    self._begin(parcel, parts)
                while self._reads:
                    self._end()
        finally:
            for read in self._reads:  # after Ctrl-C
                read.transfer.cancel()
                with suppress(Exception):
                    read.transfer.wait()
                if read.block is not None:
                    read.block.free()
            lost = [each.held.pages for each in opened if not each.back]
            memory.protect_and_free(each for each in lost if each is not None)

    def _in_order(self) -> Sequence[SwappedStorage]:
        """What a checkpoint has comes first, in the order of its files."""
        ordered = [each for each in self._wanted if each.recalled]
        if self._recall is not None:
            place_of = self._recall.place_of
            ordered.sort(key=lambda each: place_of(each.held))
        return ordered + [each for each in self._wanted if not each.recalled]

    def _coming(
        self, numbers: Mapping[SwappedStorage, int]
    ) -> list[tuple[int, WriteBatch, list[Part]]]:
        """Parcels with parts that are wanted, in the order in which the last of those is supplied."""
        coming = []
        for parcel in self._parcels:
            if parts := [each for each in parcel.parts if each.away in numbers]:
                self._to_come.update(each.away for each in parts)
                coming.append((max(numbers[each.away] for each in parts), parcel, parts))
        return sorted(coming, key=lambda one: one[0])

    def _open(self, away: SwappedStorage, pages: Pages) -> bool:
        try:
            memory.unprotect_for_refill(pages)
        except PenstockError as refused:
            self.failed[away.held.name] = refused
            return False
        return True

    def _recall_one(self, away: SwappedStorage) -> None:
        assert self._recall is not None
        try:
            self._recall.bring_back(away.held)
        except (PenstockError, OSError) as error:
            self.failed[away.held.name] = error
        else:
            away.back = True

    def _begin(self, parcel: WriteBatch, wanted: Sequence[Part]) -> None:
        try:
            self._reads.append(self._read(parcel, wanted))
        except (PenstockError, OSError) as error:
            self._fail(wanted, error)
        while self._staged_bytes > STAGED_BYTES:
            self._end()

    def _read(self, parcel: WriteBatch, wanted: Sequence[Part]) -> _Read:
        ticket, (away, pages, _) = parcel.ticket, parcel.parts[0]
        if len(parcel.parts) > 1:
            while (block := self._arena.allocate(BUFFER_BYTES)) is None:
                self._end()
            try:
                transfer = self._tier.read(ticket, block.address, keep_alive=block)
            except Exception:  # after Ctrl-C it may have begun: the block stays taken
                block.free()
                raise
            return _Read(parcel, wanted, transfer, block=block)
        if pages is not None:
            transfer = self._tier.read(ticket, pages.address, keep_alive=away.held.storage)
            return _Read(parcel, wanted, transfer)
        granule = self._tier.spec.granule_bytes
        buffer = torch.empty(ticket.window.nbytes + granule, dtype=torch.uint8)
        start = round_up(buffer.data_ptr(), granule) - buffer.data_ptr()
        target = buffer[start : start + ticket.window.nbytes]
        transfer = self._tier.read(ticket, target.data_ptr(), keep_alive=target)
        self._staged_bytes += target.nbytes
        return _Read(parcel, wanted, transfer, staged=target)

    def _end(self) -> None:
        """Wait for the first of the reads."""
        read = self._reads[0]
        try:
            read.transfer.wait()
            self._deliver(read)
        except (
            PenstockError,
            OSError,
            RuntimeError,
        ) as error:  # a device may be full: RuntimeError
            self._fail(read.wanted, error)
        self._reads.popleft()
        if read.block is not None:
            read.block.free()
        if read.staged is not None:
            self._staged_bytes -= read.staged.nbytes

    def _deliver(self, read: _Read) -> None:
        ticket, storage = read.parcel.ticket, read.wanted[0].away.held.storage
        if read.staged is not None:
            skew = ticket.window.skew
            storage.resize_(ticket.nbytes)
            staged = read.staged[skew : skew + ticket.nbytes]
            copy_across(staged, bytes_of(storage), ready_event(storage.device))
        for away, pages, offset in read.wanted:
            if read.block is not None:
                assert pages is not None
                ctypes.memmove(pages.address, read.block.address + offset, pages.nbytes)
            self._to_come[away] -= 1
            away.back = not self._to_come[away]

    def _fail(self, wanted: Sequence[Part], error: BaseException) -> None:
        for part in wanted:
            self.failed[part.away.held.name] = error
