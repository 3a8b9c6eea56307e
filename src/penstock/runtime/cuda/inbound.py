"""From flash and host memory back to a device. Why it is safe: [Note: streams] in ``cuda``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from penstock.core.errors import ClosedError
from penstock.core.locks import Lock
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.lanes import Copy, CopyLanes, Direction
from penstock.runtime.cuda.pinned import PinnedBlock, Slab, Waiting
from penstock.runtime.cuda.tickets import CudaTarget, CudaTicket, Fill
from penstock.store.base import Ticket, check_readable


class FlashRead:
    """A read from flash on its way to a target. Guarded by the mover's lock."""

    def __init__(
        self,
        lock: Lock,
        ticket: CudaTicket,
        on_flash: Ticket,
        target: CudaTarget,
        priority: Priority,
    ) -> None:
        self.ticket = ticket
        self.on_flash = on_flash
        self.target: CudaTarget | None = target
        """Held until the transfer is about to be settled."""
        self.priority = priority
        self.beyond = False
        """True if the buffer is outside the slab: to enqueue its copy takes as long as the copy."""
        self.promote_waiting: Callable[[Priority], None] | None = None
        """Raises the priority of the wait for a buffer, if there is one."""
        self.transfer = Transfer(ticket.nbytes, promote=self._promote)
        self._lock = lock
        self._inner: Transfer | None = None

    def begin(self, address: int, keep_alive: object) -> Transfer:
        """Begin the tier's own transfer to ``address``."""
        tier, asked = self.ticket.tier, self.priority
        inner = tier.read(self.on_flash, address, keep_alive=keep_alive, priority=asked)
        with self._lock:
            self._inner = inner
            promoted = self.priority < asked
        if promoted:
            inner.promote(self.priority)
        return inner

    def settle(self, error: BaseException | None = None) -> None:
        """Drop the target, and settle the transfer."""
        self.target = None
        self.transfer.settle(error)

    def _promote(self, transfer: Transfer, priority: Priority) -> None:
        with self._lock:
            self.priority = min(self.priority, priority)
            inner, promote_waiting = self._inner, self.promote_waiting
        if inner is not None:
            inner.promote(priority)
        elif promote_waiting is not None:
            promote_waiting(priority)


class Inbound:
    """Fills targets. Thread-safe; waits for nothing."""

    def __init__(
        self, *, lock: Lock, lanes: CopyLanes, recorder: Recorder, staging: Slab | None
    ) -> None:
        """Read nothing yet.

        Args:
            lock: Guards tickets.
            lanes: To copy on.
            recorder: Gets counters.
            staging: What comes from flash passes through it.
        """
        self.closing = False
        self._lock = lock
        self._lanes = lanes
        self._recorder = recorder
        self._staging = staging

    def read(self, ticket: CudaTicket, target: CudaTarget, priority: Priority) -> Transfer:
        """Begin to fill ``target``: from the ticket's buffer, or from flash."""
        with self._lock:
            check_readable(ticket, ticket.tier.spec)
            buffer, on_flash = ticket.buffer, ticket.on_flash
            if buffer is not None:
                buffer.slab.join(buffer)
        if buffer is not None:
            transfer = Transfer(ticket.nbytes)
            self._copy_in(ticket, target, (buffer, 0), transfer, _lane_for(priority))
            return transfer
        assert on_flash is not None, "bytes are on flash, but the tier has given no ticket"
        read = FlashRead(self._lock, ticket, on_flash, target, priority)
        self._begin(read)
        return read.transfer

    def _begin(self, read: FlashRead) -> None:
        """Take a buffer and begin to read from flash, or wait for one."""
        staging = self._staging
        assert staging is not None, "bytes are on flash, but nothing to stage them in is left"
        nbytes, priority = read.on_flash.window.nbytes, read.priority
        waiting = Waiting(nbytes, priority, partial(self.buffer_found, read))
        read.promote_waiting = partial(staging.promote, waiting)
        buffer, queued = staging.take_or_wait(waiting)
        if not queued:
            self._fetch(read, buffer)

    def buffer_found(self, read: FlashRead, buffer: PinnedBlock | None) -> None:
        """For the slab, in its thread or when the session ends."""
        if self.closing:
            read.promote_waiting = None
            if buffer is not None:
                buffer.slab.release(buffer)
                buffer.slab.leave(buffer)
            read.settle(ClosedError(f"{read.ticket.label}: the session was closed"))
            return
        try:
            self._fetch(read, buffer)
        except Exception as error:  # noqa: BLE001  (whoever waits for the bytes gets it)
            read.settle(error)

    def _fetch(self, read: FlashRead, buffer: PinnedBlock | None) -> None:
        """Begin to read from flash; to a buffer outside the slab, if there will be none inside."""
        read.promote_waiting = None  # or this cycle would keep the target alive
        if buffer is None:
            assert self._staging is not None, "a read without a staging memory"
            self._recorder.count("staging.beyond")
            buffer = self._staging.beyond(read.on_flash.window.nbytes)
            read.beyond = True
        buffer.slab.release(buffer)  # it is free after the copy to the device
        try:
            inner = read.begin(buffer.address, buffer)
        except BaseException:
            buffer.slab.leave(buffer)
            raise
        inner.add_done_callback(partial(self._fetched, read, buffer))

    def _fetched(self, read: FlashRead, buffer: PinnedBlock, inner: Transfer) -> None:
        """In a worker of the engine."""
        if inner.error is not None:
            buffer.slab.leave(buffer)
            read.settle(inner.error)
            return
        target = read.target
        assert target is not None, "a target was dropped before its read"
        source = buffer, read.on_flash.window.skew
        lane: Direction = "beyond" if read.beyond else _lane_for(read.priority)
        self._copy_in(read.ticket, target, source, read.transfer, lane)

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
