"""How a job's memory is written to flash: huge pages from where they lie, small ones gathered.

[Note: small pages]
    A direct transfer hands a list of pages to the device. Where those are of 4 KiB, as in a virtual
    machine, it may take half as long again as with pages of 2 MiB, and every transfer has a price of its
    own. The memory of a tensor seldom begins and ends at a huge page, so its head and tail, and a small
    one as a whole, lie in small pages. These are copied to buffers of huge pages, many in one write, by
    the thread that would but wait for the device; what lies in huge pages is on its way before.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing

import torch

from penstock.io.arena import Arena, Block
from penstock.io.engine import Priority
from penstock.io.pages import Pages, around, huge_pages_within
from penstock.staging import bytes_of, copy_across, ready_event
from penstock.swap.write_batch import (
    BUFFER_BYTES,
    BUFFERS,
    STAGED_BYTES,
    Part,
    SwappedStorage,
    WriteBatch,
    packed,
)
from penstock.tier.base import Ticket, Tier


class SwapOut:
    """Writes some storages to a tier. Not thread-safe; serves once.

    Attributes:
        parcels: What was handed over so far; whoever has no use for it discards their tickets.
    """

    def __init__(self, tier: Tier) -> None:
        """Write nothing yet."""
        self.parcels: list[WriteBatch] = []
        self._tier = tier

    def run(self, leaving: Sequence[SwappedStorage], meanwhile: Callable[[], None]) -> None:
        """Write them; returns when all is written.

        Args:
            leaving: They are read only, and may not change before this returns.
            meanwhile: Called when much is on its way.

        Raises:
            TransferError: Something could not be written. What is on its way still reads their memory
                until its ticket has settled.
        """
        self._send_devices([each for each in leaving if each.held.pages is None])
        small = list[tuple[SwappedStorage, Pages]]()
        for each in leaving:
            if each.held.pages is not None:
                whole = huge_pages_within(each.held.pages)
                if whole.nbytes:
                    self._send((Part(each, whole),), *whole, keep_alive=each.held.storage)
                small += ((each, rest) for rest in around(whole, each.held.pages))
        meanwhile()
        with closing(Arena(BUFFERS * BUFFER_BYTES, owner="suspend")) as arena:
            sent = deque[Ticket]()
            for parts in packed(small):
                while (block := arena.allocate(BUFFER_BYTES)) is None:
                    sent.popleft().written.wait()
                sent.append(self._send_gathered(parts, block))
        for parcel in self.parcels:
            parcel.ticket.written.wait()

    def _send_gathered(self, parts: tuple[Part, ...], block: Block) -> Ticket:
        try:
            for _, pages, offset in parts:
                assert pages is not None
                ctypes.memmove(block.address + offset, *pages)
                nbytes = offset + pages.nbytes
            # Before what waits already: that is in nobody's way, and this holds a buffer.
            ticket = self._send(
                parts, block.address, nbytes, keep_alive=block, priority=Priority.PREFETCH
            )
        except Exception:  # after Ctrl-C it may have begun: the block stays taken
            block.free()
            raise
        ticket.written.add_done_callback(lambda _: block.free())
        return ticket

    def _send_devices(self, leaving: Sequence[SwappedStorage]) -> None:
        """Through host memory, of which there is no more than so much at once."""
        staged = deque[Ticket]()
        for each in leaving:
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
        first, last = parts[0].away.held.name, parts[-1].away.held.name
        label = first if first == last else f"{first} to {last}"
        ticket = self._tier.write(
            address, nbytes, keep_alive=keep_alive, label=label, priority=priority
        )
        self.parcels.append(WriteBatch(parts, ticket))
        return ticket
