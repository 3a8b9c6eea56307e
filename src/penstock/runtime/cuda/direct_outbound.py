"""From a device to flash, by an engine that is GPU-direct. Why it is safe: [Note: GPU-direct].

A tensor's way out: *fence* (what uses it has ended), *digest* (unless ``PENSTOCK_VERIFY=0``), write.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from penstock.core import knobs
from penstock.core.errors import ClosedError, NoSpaceError
from penstock.io.engine import Transfer
from penstock.runtime.cuda.digest import DIGEST_BYTES, WORD_BYTES
from penstock.runtime.cuda.lanes import Copy
from penstock.runtime.cuda.link import Event
from penstock.runtime.cuda.outbound import Outbound
from penstock.runtime.cuda.pinned import PinnedBlock
from penstock.runtime.cuda.tickets import CudaTicket, Where, no_space
from penstock.store.base import Ticket, Tier

Sums: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"


@dataclass(slots=True, eq=False)
class DirectTicket(CudaTicket):
    """A claim on bytes that went to flash as they were: QUEUED until the write is begun."""

    digest: bytes | None = None
    """Digest by the device; ``None`` if nothing is compared."""


@dataclass(slots=True, eq=False)
class Leaving:
    """A storage on its way out, held until ``written`` is about to be settled."""

    ticket: DirectTicket
    storage: torch.UntypedStorage | None


class DirectOutbound(Outbound):
    """As :class:`Outbound`, but flash is written from device memory. Thread-safe."""

    def write(
        self, storage: torch.UntypedStorage, tier: Tier, label: str, after: tuple[Event, ...]
    ) -> CudaTicket:
        """Begin to spill a storage that is complete after some events. Raises NoSpaceError."""
        if not tier.spec.gpu_direct:
            return super().write(storage, tier, label, after)
        nbytes = storage.nbytes()
        ticket = DirectTicket(label, nbytes, storage.device, tier, Transfer(nbytes))
        if storage.data_ptr() % WORD_BYTES:
            advice = (
                f"it begins at no multiple of {WORD_BYTES} bytes, so it is not torch's own memory"
            )
            raise no_space(ticket, None, advice)
        self._promise(ticket)
        ticket.written = Transfer(nbytes, cancel=partial(self._call_off, ticket))
        fenced = partial(self._fenced, Leaving(ticket, storage))
        fence = Copy(storage, nbytes, after, label, tier.spec.name, fenced)
        self._lanes.get(ticket.device, "fence-out").submit(fence)
        return ticket

    def _call_off(self, ticket: DirectTicket, transfer: Transfer) -> bool:
        """Before the write is begun it need not be, but the source is held until the fence is over."""
        with self._lock:
            if ticket.where is Where.QUEUED:
                ticket.where = Where.NOWHERE
            on_flash = ticket.on_flash
        return on_flash is not None and on_flash.written.cancel()

    # -- in the threads of lanes ------------------------------------------------------------------

    def _fenced(self, leaving: Leaving, fence: Copy) -> None:
        """Nothing writes to the source any more."""
        ticket = leaving.ticket
        if fence.error is not None or self._unwanted(ticket) or knobs.verify() == "off":
            self._go(leaving, fence.error)
            return
        sums: Sums = (ctypes.c_ubyte * DIGEST_BYTES)()
        digested = partial(self._digested, leaving, sums)
        copy = Copy(
            leaving.storage, ticket.nbytes, (), ticket.label, ticket.tier.spec.name, digested
        )
        copy.address = ctypes.addressof(sums)
        try:
            self._lanes.get(ticket.device, "digest").submit(copy)
        except ClosedError as error:
            self._go(leaving, error)

    def _digested(self, leaving: Leaving, sums: Sums, copy: Copy) -> None:
        leaving.ticket.digest = bytes(sums)
        self._go(leaving, copy.error)

    def _unwanted(self, ticket: DirectTicket) -> bool:
        return ticket.discarded or ticket.where is Where.NOWHERE or self.closing

    def _go(self, leaving: Leaving, error: BaseException | None) -> None:
        """Begin to write, unless it is too late for that; the promise is kept, or void."""
        ticket, on_flash = leaving.ticket, None
        with self._lock:
            if error is None and self._unwanted(ticket):
                error = CancelledError()
            ticket.where = Where.COPYING if error is None else Where.NOWHERE
        try:
            if error is None:
                on_flash = self._begin(leaving)
        except Exception as refused:  # noqa: BLE001  (whatever it is, the bytes are still in the source)
            error = refused.with_traceback(None)  # whose frames would keep the storage alive
        finally:
            self._fulfil(ticket)
        if on_flash is not None:
            on_flash.written.add_done_callback(partial(self._ended, leaving))
        elif isinstance(error, OSError):
            self._refused(leaving, error)
        else:
            self._settle(leaving, error)

    def _begin(self, leaving: Leaving) -> Ticket:
        ticket, storage = leaving.ticket, leaving.storage
        assert storage is not None, "a storage was let go of before its write"
        address, nbytes = storage.data_ptr(), ticket.nbytes
        on_flash = ticket.tier.write(address, nbytes, keep_alive=storage, label=ticket.label)
        with self._lock:
            unwanted = ticket.discarded
            if not unwanted:
                ticket.on_flash = on_flash
        if unwanted:
            ticket.tier.discard(on_flash)
        return on_flash

    # -- in a worker of the engine ----------------------------------------------------------------

    def _ended(self, leaving: Leaving, transfer: Transfer) -> None:
        """The bytes are on flash, or still only in the source."""
        ticket, error = leaving.ticket, transfer.error
        refused: Ticket | None = None
        with self._lock:
            if not ticket.discarded:
                if error is None:
                    ticket.where = Where.ON_FLASH
                else:
                    refused, ticket.on_flash = ticket.on_flash, None
        if refused is not None:
            ticket.tier.discard(refused)
        if isinstance(error, OSError):
            self._refused(leaving, error)
        else:
            self._settle(leaving, error)

    def _refused(self, leaving: Leaving, error: OSError) -> None:
        """Flash has not taken the bytes: they go on to pinned memory, if there is room, or stay."""
        ticket, storage = leaving.ticket, leaving.storage
        if isinstance(error, NoSpaceError):
            self._note_full(ticket.tier)
        buffer = None
        if self._host is not None and not self._unwanted(ticket):
            buffer = self._host.take(ticket.nbytes)
        if buffer is None:
            del storage
            self._settle(leaving, error)
            return
        self._report(ticket, error)
        leaving.storage = None  # the copy holds it
        copied = partial(self._copied, ticket)
        copy = Copy(storage, ticket.nbytes, (), ticket.label, ticket.tier.spec.name, copied)
        try:
            self._begin_copy(ticket, copy, buffer)
        except ClosedError as closed:
            buffer.slab.release(buffer)
            buffer.slab.leave(buffer)
            copy.storage = None
            del storage
            self._settle(leaving, closed)

    def _on_to_flash(self, ticket: CudaTicket, buffer: PinnedBlock) -> None:
        """Keep in the buffer, until it is discarded, what flash refused."""
        buffer.slab.leave(buffer)

    def _settle(self, leaving: Leaving, error: BaseException | None) -> None:
        leaving.storage = None  # first: who hears of the end may look whether the storage is dead
        with self._lock:
            if error is not None:
                leaving.ticket.where = Where.NOWHERE
        leaving.ticket.written.settle(error)
