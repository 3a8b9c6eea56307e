"""Writing a job's memory to flash: huge pages directly, small pages gathered in buffers.

[Note: small pages]
    A direct transfer hands a list of pages to the device. With pages of 4 KiB, as in a virtual machine,
    it may take 1.5 times as long as with pages of 2 MiB, and every transfer has a fixed cost. The memory
    of a tensor seldom begins and ends at a huge page, so its head and tail, and all of a small tensor,
    are in small pages. These are copied to buffers of huge pages, many in one write, by the thread that
    would otherwise wait for the device, which already writes the huge pages.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing

import torch

from penstock.io.engine import Priority
from penstock.io.pages import PageRange, around, huge_pages_within
from penstock.staging import bytes_of, copy_across, ready_event
from penstock.store.arena import Arena
from penstock.store.base import Ticket, Tier
from penstock.store.pool import Block
from penstock.swap.write_batch import (
    BUFFER_BYTES,
    BUFFERS,
    STAGED_BYTES,
    Part,
    SwappedStorage,
    WriteBatch,
    packed,
)


class SwapOut:
    """Writes storages to a tier. Not thread-safe; for a single use.

    Attributes:
        batches: Batches that were submitted so far; after an error the caller discards their tickets.
    """

    def __init__(self, tier: Tier) -> None:
        """Write nothing yet."""
        self.batches: list[WriteBatch] = []
        self._tier = tier

    def run(self, outgoing: Sequence[SwappedStorage], while_writing: Callable[[], None]) -> None:
        """Write storages; return when all are written.

        Args:
            outgoing: Storages to write; they must not change before this returns.
            while_writing: Function called while most of the writes are running.

        Raises:
            TransferError: A write failed. Running writes read the memory until their tickets settle.
        """
        self._send_devices([each for each in outgoing if each.held.pages is None])
        small = list[tuple[SwappedStorage, PageRange]]()
        for each in outgoing:
            if each.held.pages is not None:
                whole = huge_pages_within(each.held.pages)
                if whole.nbytes:
                    self._send((Part(each, whole),), *whole, keep_alive=each.held.storage)
                small += ((each, rest) for rest in around(whole, each.held.pages))
        while_writing()
        with closing(Arena(BUFFERS * BUFFER_BYTES, owner="suspend")) as arena:
            sent = deque[Ticket]()
            for parts in packed(small):
                while (block := arena.allocate(BUFFER_BYTES, force=True)) is None:
                    sent.popleft().written.wait()
                sent.append(self._send_gathered(parts, block))
        for batch in self.batches:
            batch.ticket.written.wait()

    def _send_gathered(self, parts: tuple[Part, ...], block: Block) -> Ticket:
        try:
            for _, pages, offset in parts:
                assert pages is not None
                ctypes.memmove(block.address + offset, *pages)
                nbytes = offset + pages.nbytes
            # Ahead of the queued writes: those block nothing, but this one holds a buffer.
            ticket = self._send(
                parts, block.address, nbytes, keep_alive=block, priority=Priority.PREFETCH
            )
        except Exception:  # after Ctrl-C it may have begun: the block stays taken
            block.free()
            raise
        ticket.written.add_done_callback(lambda _: block.free())
        return ticket

    def _send_devices(self, outgoing: Sequence[SwappedStorage]) -> None:
        """Write storages of devices through host memory, within ``STAGED_BYTES``."""
        staged = deque[Ticket]()
        for each in outgoing:
            storage = each.held.storage
            source = torch.empty(storage.nbytes(), dtype=torch.uint8)
            copy_across(bytes_of(storage), source, ready_event(storage.device))
            parts = (Part(each, None),)
            staged.append(self._send(parts, source.data_ptr(), source.nbytes, keep_alive=source))
            del source
            while sum(one.nbytes for one in staged) > STAGED_BYTES:
                staged.popleft().written.wait()

    def _send(
        self,
        parts: tuple[Part, ...],
        address: int,
        nbytes: int,
        *,
        keep_alive: object,
        priority: Priority = Priority.WRITE_BEHIND,
    ) -> Ticket:
        first, last = parts[0].swapped.held.name, parts[-1].swapped.held.name
        label = first if first == last else f"{first} to {last}"
        ticket = self._tier.write(
            address, nbytes, keep_alive=keep_alive, label=label, priority=priority
        )
        self.batches.append(WriteBatch(parts, ticket))
        return ticket
