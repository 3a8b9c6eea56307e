"""From flash to a device, by an engine that is GPU-direct. Why it is safe: [Note: GPU-direct].

A tensor's way back: *fence* (what used the target's memory has ended), read, *digest*, compare.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

from penstock.core.errors import ChecksumError, ClosedError
from penstock.io.engine import Priority, Transfer
from penstock.runtime.cuda.digest import DIGEST_BYTES
from penstock.runtime.cuda.direct_outbound import DirectTicket, Sums
from penstock.runtime.cuda.inbound import Inbound
from penstock.runtime.cuda.lanes import Copy, Direction
from penstock.runtime.cuda.link import Event
from penstock.runtime.cuda.tickets import CudaTarget, CudaTicket
from penstock.store.base import Ticket


class DirectRead:
    """A read on its way. Guarded by the mover's lock."""

    def __init__(
        self,
        ticket: DirectTicket,
        on_flash: Ticket,
        target: CudaTarget,
        priority: Priority,
        inbound: DirectInbound,
    ) -> None:
        self.ticket = ticket
        self.on_flash = on_flash
        self.target: CudaTarget | None = target
        """Held until the transfer is about to be settled."""
        self.priority = priority
        self.inner: Transfer | None = None
        """The tier's own transfer, once begun."""
        self.transfer = Transfer(ticket.nbytes, promote=partial(inbound.hurry, self))


class DirectInbound(Inbound):
    """As :class:`Inbound`, but what is on flash is read to device memory. Thread-safe."""

    def read(self, ticket: CudaTicket, target: CudaTarget, priority: Priority) -> Transfer:
        """Begin to fill ``target``; if from flash, the transfer settles when it is filled."""
        with self._lock:
            on_flash = ticket.on_flash if ticket.buffer is None else None
            self._check_readable(ticket)
        if on_flash is None:
            return super().read(ticket, target, priority)
        assert isinstance(ticket, DirectTicket), "another mover's ticket"
        read = DirectRead(ticket, on_flash, target, priority, self)
        self._submit("fence-in", read, (target.ready,), partial(self._fenced, read))
        return read.transfer

    def hurry(self, read: DirectRead, transfer: Transfer, priority: Priority) -> None:
        """For the read's transfer: somebody waits for it."""
        with self._lock:
            read.priority = min(read.priority, priority)
            inner = read.inner
        if inner is not None:
            inner.promote(priority)

    def _fenced(self, read: DirectRead, fence: Copy) -> None:
        """In the thread of a lane: nothing uses the target's memory any more."""
        if fence.error is not None:
            self._settle(read, fence.error)
            return
        try:
            inner = self._begin(read)
        except Exception as error:  # noqa: BLE001  (whoever waits for the bytes gets it)
            self._settle(read, error.with_traceback(None))
            return
        inner.add_done_callback(partial(self._filled, read))

    def _begin(self, read: DirectRead) -> Transfer:
        assert read.target is not None, "a target was let go of before its read"
        storage, asked = read.target.storage, read.priority
        tier = read.ticket.tier
        inner = tier.read(read.on_flash, storage.data_ptr(), keep_alive=storage, priority=asked)
        with self._lock:
            read.inner = inner
            promoted = read.priority < asked
        if promoted:
            inner.promote(read.priority)
        return inner

    def _filled(self, read: DirectRead, inner: Transfer) -> None:
        """In a worker of the engine."""
        if inner.error is not None or read.ticket.digest is None:
            self._settle(read, inner.error)
            return
        sums: Sums = (ctypes.c_ubyte * DIGEST_BYTES)()
        try:
            self._submit("digest", read, (), partial(self._digested, read, sums), sums)
        except ClosedError as error:
            self._settle(read, error)

    def _digested(self, read: DirectRead, sums: Sums, copy: Copy) -> None:
        """In the thread of a lane."""
        self._settle(read, copy.error or _mismatch(read, bytes(sums)))

    def _submit(
        self,
        lane: Direction,
        read: DirectRead,
        after: tuple[Event, ...],
        landed: Callable[[Copy], None],
        sums: Sums | None = None,
    ) -> None:
        ticket, target = read.ticket, read.target
        assert target is not None, "a target was let go of before its end"
        storage = target.storage
        copy = Copy(storage, ticket.nbytes, after, ticket.label, ticket.tier.spec.name, landed)
        if sums is not None:
            copy.address = ctypes.addressof(sums)
        self._lanes.get(ticket.device, lane).submit(copy)

    def _settle(self, read: DirectRead, error: BaseException | None) -> None:
        read.target = None
        read.transfer.settle(error)


def _mismatch(read: DirectRead, found: bytes) -> ChecksumError | None:
    written, spec = read.ticket.digest, read.ticket.tier.spec
    if written is None or found == written:
        return None
    return ChecksumError(
        f"{read.ticket.label}: {read.ticket.nbytes} bytes read back from tier {spec.name}"
        f" ({spec.where}, {read.on_flash.place}) to {read.ticket.device} have digest {found.hex()},"
        f" written were {written.hex()}; the SSD, the device or the way between them is faulty: stop"
        " using it, or set PENSTOCK_GPU_DIRECT=off"
    )
