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
from collections.abc import Callable, Sequence
from contextlib import closing

import torch

from penstock.io.engine import Priority, Transfer
from penstock.io.pages import PageRange, around, huge_pages_within
from penstock.staging import bytes_of, copy_across, ready_event
from penstock.store.arena import Arena
from penstock.store.base import Tier
from penstock.store.pool import Block
from penstock.store.window import TransferWindow
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
            TransferError: A write failed. No write is running then, but their tickets are held.
        """
        with TransferWindow[None](
            limit_bytes=STAGED_BYTES, priority=Priority.WRITE_BEHIND
        ) as writes:
            self._send_devices([each for each in outgoing if each.held.pages is None], writes)
            small = list[tuple[SwappedStorage, PageRange]]()
            for each in outgoing:
                if each.held.pages is not None:
                    whole = huge_pages_within(each.held.pages)
                    if whole.nbytes:
                        send = self._sending((Part(each, whole),), *whole, each.held.storage)
                        writes.begin(None, send)
                    small += ((each, rest) for rest in around(whole, each.held.pages))
            while_writing()
            self._send_gathered(small)

    def _send_gathered(self, small: Sequence[tuple[SwappedStorage, PageRange]]) -> None:
        """Write small pages through buffers.

        Ahead of the queued writes: those block nothing, but these hold the buffers.
        """
        with (
            closing(Arena(BUFFERS * BUFFER_BYTES, owner="suspend")) as arena,
            TransferWindow[Block](release=Block.free, priority=Priority.PREFETCH) as writes,
        ):
            for parts in packed(small):
                block = writes.take(lambda: arena.allocate(BUFFER_BYTES, force=True))
                assert block is not None, "nothing is in flight, but buffers are in use"
                for _, pages, offset in parts:
                    assert pages is not None
                    ctypes.memmove(block.address + offset, *pages)
                    nbytes = offset + pages.nbytes
                writes.begin(block, self._sending(parts, block.address, nbytes, block))

    def _send_devices(
        self, outgoing: Sequence[SwappedStorage], writes: TransferWindow[None]
    ) -> None:
        """Write storages of devices through host memory, within the limit of the window."""
        for each in outgoing:
            storage = each.held.storage
            writes.make_room(storage.nbytes())
            source = torch.empty(storage.nbytes(), dtype=torch.uint8)
            copy_across(bytes_of(storage), source, ready_event(storage.device))
            send = self._sending((Part(each, None),), source.data_ptr(), source.nbytes, source)
            writes.begin(None, send, source.nbytes)
            del source, send

    def _sending(
        self, parts: tuple[Part, ...], address: int, nbytes: int, keep_alive: object
    ) -> Callable[[Priority], Transfer]:
        """Return a function that begins to write a batch."""
        first, last = parts[0].swapped.held.name, parts[-1].swapped.held.name
        label = first if first == last else f"{first} to {last}"

        def begin(priority: Priority) -> Transfer:
            ticket = self._tier.write(
                address, nbytes, keep_alive=keep_alive, label=label, priority=priority
            )
            self.batches.append(WriteBatch(parts, ticket))
            return ticket.written

        return begin
