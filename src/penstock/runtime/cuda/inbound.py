"""From flash and host memory back to a device. Why it is safe: [Note: streams] in ``cuda``."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from penstock.core.errors import ClosedError, ConfigError
from penstock.core.locks import Lock, defer
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.lanes import Copy, CopyLanes, Direction
from penstock.runtime.cuda.link import CudaLink
from penstock.runtime.cuda.pinned import PinnedBlock, Slab, Waiting
from penstock.runtime.cuda.stream_table import StreamTable
from penstock.runtime.cuda.tickets import CudaTarget, CudaTicket, Fill, Where
from penstock.runtime.movers import RESTORED
from penstock.store.account import Account
from penstock.store.base import Ticket


class FlashRead:
    """A read whose bytes go from flash to a buffer first. Guarded by the mover's lock."""

    def __init__(
        self,
        ticket: CudaTicket,
        on_flash: Ticket,
        target: CudaTarget,
        priority: Priority,
        inbound: Inbound,
    ) -> None:
        self.ticket = ticket
        self.on_flash = on_flash
        self.target = target
        self.priority = priority
        self.beyond = False
        """True if the buffer is outside the slab: to enqueue its copy takes as long as the copy."""
        self.inner: Transfer | None = None
        """The tier's own transfer, once begun."""
        self.transfer = Transfer(ticket.nbytes, promote=partial(inbound.promote, self))
        begin = partial(inbound.buffer_found, self)
        self.waiting: Waiting | None = Waiting(on_flash.window.nbytes, priority, begin)
        """For a buffer; ``None`` from then on, or this cycle would keep the target alive."""


class Inbound:
    """Restores storages. Thread-safe; waits for nothing."""

    def __init__(
        self,
        *,
        link: CudaLink,
        lock: Lock,
        table: StreamTable,
        lanes: CopyLanes,
        recorder: Recorder,
        budget: Account,
        staging: Slab | None,
    ) -> None:
        """Restore nothing yet.

        Args:
            link: To the devices.
            lock: Guards tickets.
            table: Is told of what is restored.
            lanes: To copy on.
            recorder: Gets counters.
            budget: Targets are charged to it until they die.
            staging: What comes from flash passes through it.
        """
        self.closing = False
        self._link = link
        self._lock = lock
        self._lanes = lanes
        self._recorder = recorder
        self.budget_of: Callable[[torch.device], Account] = lambda device: budget
        self._staging = staging
        self._table = table

    # -- targets ----------------------------------------------------------------------------------

    def allocate(
        self, ticket: CudaTicket, *, force: bool, budget: Account | None = None
    ) -> CudaTarget | None:
        """Memory on the current stream of the ticket's device, charged until the storage dies."""
        nbytes, device = ticket.nbytes, ticket.device
        budget = budget or self.budget_of(device)
        if force:
            budget.force(nbytes, RESTORED)
        elif not budget.try_take(nbytes, RESTORED):
            return None
        try:
            storage = self._link.empty_target(nbytes, device)
        except BaseException as error:
            budget.free(nbytes, RESTORED)
            if force or not isinstance(error, torch.OutOfMemoryError):
                raise
            self._recorder.count("device.out_of_memory")
            return None
        weakref.finalize(storage, defer, budget.free, nbytes, RESTORED).atexit = False
        stream = self._link.current_stream(device)
        return CudaTarget(storage, self._link.record(stream), Fill(stream))

    def finish(self, target: CudaTarget) -> torch.UntypedStorage:
        """The target as a storage; who uses it comes after its copy."""
        self._table.restored(target.storage, target.fill)
        return target.storage

    def made(self, storage: torch.UntypedStorage) -> None:
        """Kernels of the current stream make a storage again: rule 7 of the note."""
        stream = self._link.current_stream(storage.device)
        self._table.restored(storage, Fill(stream, made=self._link.record(stream)))

    # -- reading ----------------------------------------------------------------------------------

    def read(self, ticket: CudaTicket, target: CudaTarget, priority: Priority) -> Transfer:
        """Begin to fill ``target``: from the ticket's buffer, or from flash by way of another."""
        with self._lock:
            buffer, on_flash = ticket.buffer, ticket.on_flash
            self._check_readable(ticket)
            if buffer is not None:
                buffer.slab.join(buffer)
        if buffer is not None:
            transfer = Transfer(ticket.nbytes)
            self._copy_in(ticket, target, (buffer, 0), transfer, _lane_for(priority))
            return transfer
        assert on_flash is not None, "bytes are on flash, but the tier has given no ticket"
        assert self._staging is not None, "bytes are on flash, but nothing to stage them in is left"
        read = FlashRead(ticket, on_flash, target, priority, self)
        assert read.waiting is not None, "a read that has not begun waits for nothing"
        found, queued = self._staging.take_or_wait(read.waiting)
        if not queued:
            self._fetch(read, found)
        return read.transfer

    def _check_readable(self, ticket: CudaTicket) -> None:
        if ticket.discarded or ticket.where not in (Where.STAGED, Where.ON_FLASH):
            state = "was discarded" if ticket.discarded else f"is {ticket.where.value}"
            raise ConfigError(
                f"{ticket.label}: read from tier {ticket.tier.spec.name}, but it {state};"
                " wait for ticket.written first, and discard it last"
            )

    def promote(self, read: FlashRead, transfer: Transfer, priority: Priority) -> None:
        """For the read's transfer: somebody waits for it."""
        with self._lock:
            read.priority = min(read.priority, priority)
            inner, waiting = read.inner, read.waiting
        if inner is not None:
            inner.promote(priority)
        elif waiting is not None and self._staging is not None:
            self._staging.promote(waiting, priority)

    def buffer_found(self, read: FlashRead, buffer: PinnedBlock | None) -> None:
        """For the slab, in its thread or when the session ends."""
        if self.closing:
            read.waiting = None
            if buffer is not None:
                buffer.slab.release(buffer)
                buffer.slab.leave(buffer)
            read.transfer.settle(ClosedError(f"{read.ticket.label}: the session was closed"))
            return
        try:
            self._fetch(read, buffer)
        except Exception as error:  # noqa: BLE001  (whoever waits for the bytes gets it)
            read.transfer.settle(error)

    def _fetch(self, read: FlashRead, buffer: PinnedBlock | None) -> None:
        """Begin to read from flash; if waiting for a buffer is in vain, to one outside the slab."""
        read.waiting = None
        if buffer is None:
            assert self._staging is not None, "a read without a staging memory"
            self._recorder.count("staging.beyond")
            buffer = self._staging.beyond(read.on_flash.window.nbytes)
            read.beyond = True
        buffer.slab.release(buffer)  # it is free after the copy to the device
        tier, asked = read.ticket.tier, read.priority
        try:
            inner = tier.read(read.on_flash, buffer.address, keep_alive=buffer, priority=asked)
        except BaseException:
            buffer.slab.leave(buffer)
            raise
        with self._lock:
            read.inner = inner
            promoted = read.priority < asked
        if promoted:
            inner.promote(read.priority)
        inner.add_done_callback(partial(self._fetched, read, buffer))

    def _fetched(self, read: FlashRead, buffer: PinnedBlock, inner: Transfer) -> None:
        """In a worker of the engine."""
        if inner.error is not None:
            buffer.slab.leave(buffer)
            read.transfer.settle(inner.error)
            return
        source = buffer, read.on_flash.window.skew
        lane: Direction = "beyond" if read.beyond else _lane_for(read.priority)
        self._copy_in(read.ticket, read.target, source, read.transfer, lane)

    def _copy_in(
        self,
        ticket: CudaTicket,
        target: CudaTarget,
        source: tuple[PinnedBlock, int],
        transfer: Transfer,
        lane: Direction,
    ) -> None:
        """Begin to copy from some bytes behind a buffer's address."""
        buffer, skew = source
        fill = target.fill
        copy = Copy(
            target.storage,
            ticket.nbytes,
            (target.ready,),
            ticket.label,
            ticket.tier.spec.name,
            partial(self._landed, fill, buffer, transfer),
            issued=partial(self._issued, fill, transfer),
            address=buffer.address + skew,
        )
        self._lanes.get(ticket.device, lane).submit(copy)

    def _issued(self, fill: Fill, transfer: Transfer, copy: Copy) -> None:
        if not fill.landed:
            fill.copy = copy
        transfer.settle()

    def _landed(self, fill: Fill, buffer: PinnedBlock, transfer: Transfer, copy: Copy) -> None:
        """In the lane's thread."""
        if copy.error is None:
            fill.landed, fill.copy = True, None
        buffer.slab.leave(buffer)
        if copy.end is None:  # it was never issued, so nobody knows
            transfer.settle(copy.error)


def _lane_for(priority: Priority) -> Direction:
    """Return the lane of a copy to a device: what somebody waits for overtakes what is read ahead."""
    return "demand" if priority is Priority.DEMAND else "in"
