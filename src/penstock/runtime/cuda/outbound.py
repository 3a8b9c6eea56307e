"""From a device to host memory, and on to flash. Why it is safe: [Note: streams] in ``cuda``.

[Note: the way through flash]
    A tensor is *staged* in a pinned buffer between device and flash. ``written`` is settled when it is
    there, so the write to flash may still fail. Then the buffer is where it rests, and nothing is lost
    but the room for other transfers: what finds none goes to another tier, or stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from penstock.core.errors import ClosedError, NoSpaceError
from penstock.core.locks import Lock
from penstock.core.units import round_up
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.lanes import Copy, CopyLanes, Direction
from penstock.runtime.cuda.link import Event
from penstock.runtime.cuda.pinned import PinnedBlock, Slab, Waiting
from penstock.runtime.cuda.tickets import CudaTicket, no_space
from penstock.store.base import Ticket, Tier

GRANULE_BYTES: Final = 4096
"""Buffers are whole multiples of this, so that a tier may widen what it writes."""
_STAGING_TAKEN: Final = "what flash has refused takes all staging memory; raise host_memory"


@dataclass(slots=True, eq=False)
class _Passage:
    """Bytes on their way through a buffer to a write of the caller's own."""

    begin: Callable[[int, object], Transfer]
    written: Transfer
    buffer: PinnedBlock | None = None


class Outbound:
    """Spills storages. Thread-safe; waits for nothing."""

    def __init__(
        self,
        *,
        lock: Lock,
        lanes: CopyLanes,
        recorder: Recorder,
        staging: Slab | None,
        host: Slab | None,
    ) -> None:
        """Spill nothing yet.

        Args:
            lock: Guards tickets.
            lanes: To copy on.
            recorder: Gets counters and marks.
            staging: What goes to flash passes through it.
            host: The host tier's bytes rest there.
        """
        self.closing = False
        self._lock = lock
        self._lanes = lanes
        self._recorder = recorder
        self._staging = staging
        self._host = host
        self._promised: dict[str, int] = {}
        self._room: dict[str, int] = {}

    def write(
        self, storage: torch.UntypedStorage, tier: Tier, label: str, after: tuple[Event, ...]
    ) -> CudaTicket:
        """Begin to spill a storage that is complete after some events. Raises NoSpaceError."""
        nbytes = storage.nbytes()
        ticket = CudaTicket(label, nbytes, storage.device, tier, Transfer(nbytes))
        landed = partial(self._copied, ticket)
        copy = Copy(storage, nbytes, after, label, tier.spec.name, landed)
        if tier.spec.kind == "host":
            ticket.buffer = buffer = self._take_host(ticket)  # nobody else has the ticket yet
            copy.address = buffer.address
            self._lanes.get(ticket.device, "out").submit(copy)
        else:
            self._begin(ticket, copy)
        return ticket

    def write_through(
        self,
        storage: torch.UntypedStorage,
        label: str,
        after: tuple[Event, ...],
        begin: Callable[[int, object], Transfer],
    ) -> Transfer:
        """Begin to copy a storage to a buffer, from which ``begin`` writes it: see the mover."""
        nbytes = storage.nbytes()
        passage = _Passage(begin, Transfer(nbytes))
        copy = Copy(storage, nbytes, after, label, "", partial(self._pass_on, passage))
        staging = self._staging
        assert staging is not None, (
            "bytes are to go to flash, but there is nothing to stage them in"
        )
        needed = round_up(nbytes, GRANULE_BYTES)
        begin_copy = partial(self._begin_passage, passage, copy, needed)
        buffer, queued = staging.take_or_wait(Waiting(needed, Priority.PREFETCH, begin_copy))
        if not queued:
            begin_copy(buffer)
        return passage.written

    def overwrite(
        self,
        storage: torch.UntypedStorage,
        tier: Tier,
        label: str,
        after: tuple[Event, ...],
        buffer: PinnedBlock,
    ) -> Transfer:
        """Begin to copy a storage to a buffer in which its bytes rest: see the mover."""
        nbytes = storage.nbytes()
        written = Transfer(nbytes)
        overwritten = partial(self._overwritten, written, buffer)
        copy = Copy(storage, nbytes, after, label, tier.spec.name, overwritten)
        copy.address = buffer.address
        buffer.slab.join(buffer)
        self._lanes.get(storage.device, "out").submit(copy)
        return written

    def _overwritten(self, written: Transfer, buffer: PinnedBlock, copy: Copy) -> None:
        """In the lane's thread."""
        buffer.slab.leave(buffer)
        written.settle(copy.error)

    def _begin_passage(
        self, passage: _Passage, copy: Copy, nbytes: int, buffer: PinnedBlock | None
    ) -> None:
        """Begin the copy to a buffer; to one outside the slab, if there will be none inside."""
        lane: Direction = "out"
        if buffer is None:
            if self.closing:
                copy.storage = None
                passage.written.settle(ClosedError(f"{copy.label}: the session was closed"))
                return
            assert self._staging is not None
            buffer, lane = self._staging.beyond(nbytes), "out-beyond"
        passage.buffer, copy.address = buffer, buffer.address
        buffer.slab.release(buffer)  # it is free after the write
        assert copy.storage is not None
        self._lanes.get(copy.storage.device, lane).submit(copy)

    def _pass_on(self, passage: _Passage, copy: Copy) -> None:
        """In the lane's thread."""
        buffer = passage.buffer
        assert buffer is not None, "a copy without a buffer has landed"
        try:
            if copy.error is not None:
                raise copy.error
            written = passage.begin(buffer.address, buffer)
        except Exception as error:  # noqa: BLE001  (whoever waits for the write gets it)
            buffer.slab.leave(buffer)
            passage.written.settle(error.with_traceback(None))
            return
        written.add_done_callback(partial(self._passed, passage, buffer))

    def _passed(self, passage: _Passage, buffer: PinnedBlock, written: Transfer) -> None:
        """In a worker of the engine."""
        buffer.slab.leave(buffer)
        passage.written.settle(written.error)

    # -- to a buffer ------------------------------------------------------------------------------

    def _take_host(self, ticket: CudaTicket) -> PinnedBlock:
        buffer = None if self._host is None else self._host.take(ticket.nbytes)
        if buffer is None:
            raise no_space(ticket, self._host, "the host tier is full; raise host_memory")
        return buffer

    def _begin(self, ticket: CudaTicket, copy: Copy) -> None:
        """Begin the copy to a buffer on the way to flash, or queue it for one."""
        staging, nbytes = self._staging, round_up(ticket.nbytes, GRANULE_BYTES)
        if staging is None or nbytes > staging.capacity_bytes:
            advice = "it is longer than the staging memory; raise host_memory"
            raise no_space(ticket, staging, advice)
        self._promise(ticket)
        begin = partial(self._staged_at_last, ticket, copy)
        waiting = Waiting(nbytes, Priority.WRITE_BEHIND, begin)
        withdraw = partial(self._withdraw, staging, waiting, ticket, copy)
        ticket.written = Transfer(ticket.nbytes, cancel=withdraw)
        buffer, queued = staging.take_or_wait(waiting)
        if buffer is not None:
            self._begin_copy(ticket, copy, buffer)
        elif not queued:
            self._give_up(ticket, copy)
            raise no_space(ticket, staging, _STAGING_TAKEN)

    def _withdraw(
        self, staging: Slab, waiting: Waiting, ticket: CudaTicket, copy: Copy, transfer: Transfer
    ) -> bool:
        if not staging.withdraw(waiting):
            return False
        self._give_up(ticket, copy)
        return True

    def _give_up(self, ticket: CudaTicket, copy: Copy) -> None:
        copy.storage = None
        self._fulfil(ticket)

    def _staged_at_last(self, ticket: CudaTicket, copy: Copy, buffer: PinnedBlock | None) -> None:
        """In the slab's thread, or when the session ends."""
        if buffer is not None:
            self._begin_copy(ticket, copy, buffer)
            return
        self._give_up(ticket, copy)
        if self.closing:
            ticket.written.settle(CancelledError())
        else:
            ticket.written.settle(no_space(ticket, self._staging, _STAGING_TAKEN))

    def _begin_copy(self, ticket: CudaTicket, copy: Copy, buffer: PinnedBlock) -> None:
        with self._lock:
            ticket.buffer = buffer
        copy.address = buffer.address
        self._lanes.get(ticket.device, "out").submit(copy)

    def _copied(self, ticket: CudaTicket, copy: Copy) -> None:
        """In the lane's thread: the source is not needed any more, or is still the only copy."""
        with self._lock:
            buffer = ticket.buffer
            wanted = copy.error is None and not ticket.discarded
        assert buffer is not None, "a copy without a buffer has landed"
        if not wanted:
            buffer.slab.release(buffer)
        ticket.written.settle(copy.error)
        if ticket.tier.spec.kind == "host":
            buffer.slab.leave(buffer)
        else:
            self._on_to_flash(ticket, buffer)

    # -- from the buffer to flash -----------------------------------------------------------------

    def _on_to_flash(self, ticket: CudaTicket, buffer: PinnedBlock) -> None:
        """The buffer is the caller's to ``leave``, and from here on the write's."""
        on_flash = None
        try:
            if ticket.written.error is None and not (ticket.discarded or self.closing):
                on_flash = self._write(ticket, buffer.address, buffer)
        except Exception as error:  # noqa: BLE001  (whatever it is, the bytes are safe where they are)
            self._rests(ticket, buffer, error)
            return
        finally:
            self._fulfil(ticket)
        if on_flash is None:
            buffer.slab.leave(buffer)
        else:
            on_flash.written.add_done_callback(partial(self._flashed, ticket, buffer))

    def _write(self, ticket: CudaTicket, address: int, keep_alive: object) -> Ticket:
        """Begin to write to flash; discard at once what was discarded meanwhile."""
        tier = ticket.tier
        on_flash = tier.write(address, ticket.nbytes, keep_alive=keep_alive, label=ticket.label)
        with self._lock:
            unwanted = ticket.discarded
            if not unwanted:
                ticket.on_flash = on_flash
        if unwanted:
            tier.discard(on_flash)
        return on_flash

    def _is_refused(self, ticket: CudaTicket, error: BaseException | None) -> bool:
        """Return whether a write has failed whose bytes are needed; discard what flash has."""
        with self._lock:
            if ticket.discarded or error is None:
                return False
            refused, ticket.on_flash = ticket.on_flash, None
        if refused is not None:
            ticket.tier.discard(refused)
        return True

    def _flashed(self, ticket: CudaTicket, buffer: PinnedBlock, transfer: Transfer) -> None:
        """In a worker of the engine: the bytes are on flash, or stay in the buffer."""
        if self._is_refused(ticket, transfer.error):
            self._rests(ticket, buffer, transfer.error)
            return
        with self._lock:
            if not ticket.discarded:
                ticket.buffer = None
        buffer.slab.release(buffer)
        buffer.slab.leave(buffer)

    def _rests(self, ticket: CudaTicket, buffer: PinnedBlock, error: BaseException | None) -> None:
        """Flash has not taken the bytes: the buffer keeps them until they are discarded."""
        if isinstance(error, NoSpaceError):
            self._note_full(ticket.tier)
        buffer.slab.leave(buffer)
        if not isinstance(error, ClosedError | CancelledError):  # else the session is ending
            self._report(ticket, error)

    def _report(self, ticket: CudaTicket, error: BaseException | None) -> None:
        tier, full = ticket.tier, isinstance(error, NoSpaceError)
        counter = f"spill.{'full' if full else 'failed'}.{tier.spec.name}"
        self._recorder.count(counter)
        self._recorder.mark("spill_failed", slot=ticket.label, error=str(error))
        self._recorder.warn(
            f"{counter}.pinned",
            f"{ticket.label} cannot be written to tier {tier.spec.name!r} and stays in pinned host"
            f" memory: {error}; further failures of this kind are only counted",
        )

    # -- room on flash ----------------------------------------------------------------------------

    def _note_full(self, tier: Tier) -> None:
        """Note that the tier cannot hold more than it does now, whatever its capacity is."""
        with self._lock:
            self._room[tier.spec.name] = tier.held_bytes

    def _promise(self, ticket: CudaTicket) -> None:
        """Refuse what would surely find the tier full, counting all that is on the way there.

        The tier itself is asked only when the bytes are staged, which is too late to say no.
        """
        tier = ticket.tier
        name = tier.spec.name
        with self._lock:
            promised = self._promised.get(name, 0) + round_up(ticket.nbytes, GRANULE_BYTES)
            room = self._room.get(name, tier.spec.capacity_bytes)
            if tier.held_bytes + promised > room:
                raise no_space(ticket, None, f"tier {name!r} is full; raise its capacity")
            self._promised[name] = promised

    def _fulfil(self, ticket: CudaTicket) -> None:
        """Settle a promise: the tier holds the bytes now, or never will."""
        with self._lock:
            self._promised[ticket.tier.spec.name] -= round_up(ticket.nbytes, GRANULE_BYTES)

    # -- the end ----------------------------------------------------------------------------------

    def discard(self, tier: Tier, ticket: CudaTicket) -> None:
        """Free what holds the bytes, once no transfer touches it. Also after the end."""
        with self._lock:
            if ticket.discarded:
                return
            ticket.discarded = True
            buffer, on_flash = ticket.buffer, ticket.on_flash
        if buffer is None and on_flash is None:
            ticket.written.cancel()
        if buffer is not None:
            buffer.slab.release(buffer)
        if on_flash is not None:
            tier.discard(on_flash)
