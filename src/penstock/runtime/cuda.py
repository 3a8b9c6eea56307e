"""Between CUDA devices and tiers: copies on streams of their own, through pinned host memory.

[Note: streams]
    The device runs behind the interpreter, so "done" has two meanings, and each rule below says which
    it needs (TRAPS rule 15). *Compute stream* is whichever stream is current at the call (never one
    that was looked up before), since backward runs in other threads than forward.

    1. Out: an event is recorded on the compute stream at ``write``, and on every other stream that is
       known to have worked with saved storages: one that is spilled late may have been produced
       elsewhere. The copy comes after these events, even if it is issued much later.
    2. The source is held until the *host* has seen the end of its copy; only then is ``written``
       settled. Nothing waits for that: not the compute stream, not the caller.
    3. Host memory changes hands only when the host has seen the end of the copy that touches it. So a
       write to flash reads whole bytes, and a buffer is never refilled under a running copy.
    4. Back: a target is allocated on the compute stream, and an event recorded there at once: kernels
       that used the memory before may still be running. The copy comes after it.
    5. A read settles when its copy has been *enqueued*. Whoever then uses the storage says ``use``
       first, in its own thread: its current stream waits for the copy, the interpreter does not.
    6. The target is held until the end of its copy, or until somebody has used it: then that stream
       comes after the copy, and so does whatever reuses the memory. If it is another stream than the
       one it was allocated on, the allocator is told so (``record_stream``, which is otherwise
       avoided, because it makes memory come free late).

    No cycle can arise: a copy waits only for events that were recorded before it was issued, and a
    stream waits for a copy only after that.

[Note: the way through flash]
    A tensor is *staged* in a pinned buffer between device and flash. ``written`` is settled when it is
    there, so the write to flash may still fail. Then the buffer is where it rests, and nothing is lost
    but the room for other transfers: what finds none is kept in device memory, or goes to another tier.
"""

from __future__ import annotations

import enum
import errno as errnos
import os
import warnings
import weakref
from collections.abc import Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from penstock.core.budget import Budget
from penstock.core.errors import ClosedError, ConfigError, HookError, NoSpaceError, PenstockWarning
from penstock.core.locks import Lock, defer
from penstock.core.units import MIB, format_bytes, round_up
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda_lanes import Copy, Lane, StartThread, start_daemon
from penstock.runtime.cuda_link import Event, Link, Stream
from penstock.runtime.movers import RESTORED, Mover
from penstock.runtime.pinned import Buffer, Slab, Waiting
from penstock.tier.base import Ticket, Tier

GRANULE_BYTES: Final = 4096
"""Buffers are whole multiples of this, so that a tier may widen what it writes."""
PROBE_BYTES: Final = 64 * MIB


class Where(enum.Enum):
    """Where the bytes of a ticket are."""

    QUEUED = "queued"
    """In the source, which is held; there is no buffer for them yet."""
    COPYING = "copying"
    """In the source, which is held; a buffer is being filled from it."""
    STAGED = "staged"
    """In a buffer: on the way to flash, or at rest after flash has failed, or in the host tier."""
    ON_FLASH = "on flash"
    """On flash alone."""
    NOWHERE = "nowhere"
    """Cancelled, failed, or discarded."""


@dataclass(slots=True, eq=False)
class CudaTicket:
    """A claim on the bytes of a device's storage. Guarded by the mover's lock; for reading only."""

    label: str
    nbytes: int
    device: torch.device
    tier: Tier
    written: Transfer
    """Settled when the source is no longer needed."""
    where: Where = Where.QUEUED
    buffer: Buffer | None = None
    on_flash: Ticket | None = None
    """The flash tier's own ticket, from the begin of the write."""
    discarded: bool = False


@dataclass(slots=True, eq=False)
class Fill:
    """How far a target is on its way. It has no reference to the memory, so that the table may keep it."""

    stream: Stream
    """What the memory is allocated on."""
    copy: Copy | None = None
    """The copy that fills it, once it is issued; ``None`` again when it has landed."""
    landed: bool = False


@dataclass(slots=True, eq=False)
class CudaTarget:
    """Device memory on its way to becoming a restored storage."""

    storage: torch.UntypedStorage
    ready: Event
    """Reached when what used the memory before is done with it."""
    fill: Fill


@dataclass(slots=True, eq=False)
class FlashRead:
    """A read from flash, of which the first half goes to a buffer."""

    ticket: CudaTicket
    on_flash: Ticket
    target: CudaTarget
    priority: Priority
    transfer: Transfer
    waiting: Waiting | None = None
    inner: Transfer | None = None


class CudaMover(Mover):
    """Moves storages of every CUDA device of this process. See [Note: streams]. Thread-safe.

    Attributes:
        device: Where the pinned memory was registered; storages of others are moved as well.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        budget: Budget,
        recorder: Recorder,
        link: Link,
        staging: Slab | None,
        host: Slab | None,
        start_thread: StartThread = start_daemon,
    ) -> None:
        """Move nothing yet.

        Args:
            device: The session's.
            budget: Device memory for restored storages is charged to it.
            recorder: Gets a span for each copy, counters and marks.
            link: To the devices.
            staging: What everything to and from flash passes through; closed with the mover.
            host: Where the host tier's bytes rest; closed with the mover.
            start_thread: Starts its threads, as they are needed.
        """
        self.device = device
        self._budget = budget
        self._recorder = recorder
        self._link = link
        self._staging = staging
        self._host = host
        self._start_thread = start_thread
        self._slabs = [slab for slab in (staging, host) if slab is not None]
        self._pinned = not any(slab.refusal for slab in self._slabs)
        self._pid = os.getpid()
        self._lock = Lock()
        self._lanes: dict[tuple[torch.device, str], Lane] = {}
        self._streams: dict[torch.device, set[Stream]] = {}
        self._fills: dict[int, tuple[weakref.ref[torch.UntypedStorage], Fill]] = {}
        self._promised: dict[str, int] = {}
        self._room: dict[str, int] = {}
        self._warned: set[str] = set()
        self._closed = False
        weakref.finalize(self, defer, _abandon, self._lanes, self._slabs).atexit = False
        if not self._pinned:
            self._report_unpinned()

    # -- out --------------------------------------------------------------------------------------

    def write(self, storage: torch.UntypedStorage, tier: Tier, label: str) -> CudaTicket:
        """Begin to spill all of ``storage``; only enqueues and returns.

        Raises:
            NoSpaceError: The tier has no room, or there is none to stage the storage in and there
                will be none by itself.
            HookError: A CUDA graph is being captured.
            ClosedError: The mover is closed, or this is a forked process.
        """
        self._check_usable()
        if self._link.capturing():
            raise HookError(
                f"{label}: tensors cannot be offloaded while a CUDA graph is captured, because its"
                " replay would not; capture it inside `with session.paused():`"
            )
        nbytes, device = storage.nbytes(), storage.device
        after = self._note_use(storage)
        transfer = Transfer(nbytes)
        ticket = CudaTicket(label, nbytes, device, tier, transfer)
        copy = Copy(
            storage, nbytes, after, label, tier.spec.name, landed=partial(self._copied, ticket)
        )
        if tier.spec.kind == "host":
            self._begin_copy(ticket, copy, self._take_host(ticket))
        else:
            self._stage(ticket, copy)
        return ticket

    def _note_use(self, storage: torch.UntypedStorage) -> tuple[Event, ...]:
        """Marks, in every known stream of the storage's device, that it is complete at."""
        device = storage.device
        with self._lock:
            streams = self._streams.setdefault(device, set())
            streams.add(self._link.current_stream(device))
            known = tuple(streams)
        if len(known) > 1:  # it may be freed earlier than without us: see rule 6 of the note
            for stream in known:
                self._link.keep(storage, stream)
        return tuple(self._link.record(stream) for stream in known)

    def _take_host(self, ticket: CudaTicket) -> Buffer:
        buffer = None if self._host is None else self._host.take(ticket.nbytes)
        if buffer is None:
            raise _no_space(ticket, self._host, "the host tier is full; raise host_memory")
        return buffer

    def _stage(self, ticket: CudaTicket, copy: Copy) -> None:
        """Begin the copy to a buffer, or queue it for one."""
        staging = self._staging
        nbytes = round_up(ticket.nbytes, GRANULE_BYTES)
        if staging is None or nbytes > staging.capacity_bytes:
            raise _no_space(
                ticket, staging, "it does not fit the staging memory; raise host_memory"
            )
        self._promise(ticket)
        waiting = Waiting(
            nbytes, Priority.WRITE_BEHIND, partial(self._staged_at_last, ticket, copy)
        )
        ticket.written = Transfer(
            ticket.nbytes, cancel=lambda _: self._withdraw(staging, waiting, ticket, copy)
        )
        try:
            buffer, queued = staging.take_or_wait(waiting)
            if buffer is None and not queued:
                raise _no_space(
                    ticket,
                    staging,
                    "the staging memory is taken by what flash has refused; raise host_memory",
                )
        except BaseException:
            self._keep_promise(ticket)
            raise
        if buffer is not None:
            self._begin_copy(ticket, copy, buffer)

    def _promise(self, ticket: CudaTicket) -> None:
        """See to it that the tier has room for all that is on the way to it, as far as one can tell."""
        tier = ticket.tier
        name = tier.spec.name
        with self._lock:
            promised = self._promised.get(name, 0) + round_up(ticket.nbytes, GRANULE_BYTES)
            room = self._room.get(name, tier.spec.capacity_bytes)
            if tier.held_bytes + promised > room:
                raise _no_space(ticket, None, f"tier {name!r} is full; raise its capacity")
            self._promised[name] = promised

    def _keep_promise(self, ticket: CudaTicket) -> None:
        """What was promised is held by the tier now, or will never be."""
        with self._lock:
            self._promised[ticket.tier.spec.name] -= round_up(ticket.nbytes, GRANULE_BYTES)

    def _withdraw(self, staging: Slab, waiting: Waiting, ticket: CudaTicket, copy: Copy) -> bool:
        if not staging.withdraw(waiting):
            return False
        self._give_up(ticket, copy)
        return True

    def _give_up(self, ticket: CudaTicket, copy: Copy) -> None:
        copy.storage = None
        ticket.where = Where.NOWHERE
        self._keep_promise(ticket)

    def _staged_at_last(self, ticket: CudaTicket, copy: Copy, buffer: Buffer | None) -> None:
        """In the slab's thread."""
        if buffer is not None:
            self._begin_copy(ticket, copy, buffer)
            return
        self._give_up(ticket, copy)
        if self._closed:
            ticket.written.settle(CancelledError())
        else:
            advice = "the staging memory is taken by what flash has refused; raise host_memory"
            ticket.written.settle(_no_space(ticket, self._staging, advice))

    def _begin_copy(self, ticket: CudaTicket, copy: Copy, buffer: Buffer) -> None:
        with self._lock:
            ticket.where = Where.COPYING
            ticket.buffer = buffer
        copy.address = buffer.address
        self._lane(ticket.device, "out").submit(copy)

    def _copied(self, ticket: CudaTicket, copy: Copy) -> None:
        """In the lane's thread: the source is not needed any more, or still the only copy."""
        with self._lock:
            buffer = ticket.buffer
            if copy.error is not None:
                ticket.where, ticket.buffer = Where.NOWHERE, None
            elif not ticket.discarded:
                ticket.where = Where.STAGED
        assert buffer is not None, "a copy without a buffer has landed"
        if copy.error is not None:
            buffer.slab.release(buffer)
        ticket.written.settle(copy.error)
        if ticket.tier.spec.kind == "host":
            buffer.slab.leave(buffer)
        else:
            self._on_to_flash(ticket, buffer, failed=copy.error is not None)

    # -- from the buffer to flash -----------------------------------------------------------------

    def _on_to_flash(self, ticket: CudaTicket, buffer: Buffer, *, failed: bool) -> None:
        tier = ticket.tier
        if failed or ticket.discarded or self._closed:
            self._keep_promise(ticket)
            buffer.slab.leave(buffer)
            return
        try:
            on_flash = tier.write(
                buffer.address, ticket.nbytes, keep_alive=buffer, label=ticket.label
            )
        except Exception as error:  # noqa: BLE001  (whatever it is, the bytes are safe where they are)
            self._keep_promise(ticket)
            self._rests(ticket, buffer, error)
            return
        self._keep_promise(ticket)
        with self._lock:
            unwanted = ticket.discarded
            if not unwanted:
                ticket.on_flash = on_flash
        if unwanted:
            tier.discard(on_flash)
        on_flash.written.add_done_callback(partial(self._flashed, ticket, buffer))

    def _flashed(self, ticket: CudaTicket, buffer: Buffer, transfer: Transfer) -> None:
        """In a worker of the engine: the bytes are on flash, or stay in the buffer."""
        refused = None
        with self._lock:
            if not ticket.discarded:
                if transfer.error is None:
                    ticket.where, ticket.buffer = Where.ON_FLASH, None
                else:
                    refused, ticket.on_flash = ticket.on_flash, None
        if refused is not None:
            ticket.tier.discard(refused)
            self._rests(ticket, buffer, transfer.error)
            return
        if transfer.error is None:
            buffer.slab.release(buffer)
        buffer.slab.leave(buffer)

    def _rests(self, ticket: CudaTicket, buffer: Buffer, error: BaseException | None) -> None:
        """Flash has not taken the bytes: the buffer keeps them until they are discarded."""
        buffer.slab.leave(buffer)
        if isinstance(error, ClosedError | CancelledError):  # the session is ending
            return
        tier = ticket.tier
        kind = "full" if isinstance(error, NoSpaceError) else "failed"
        if kind == "full":
            with self._lock:
                self._room[tier.spec.name] = tier.held_bytes
        self._recorder.count(f"spill.{kind}.{tier.spec.name}")
        self._recorder.mark("spill_failed", slot=ticket.label, error=str(error))
        self._warn(
            f"{kind}.{tier.spec.name}",
            f"{ticket.label} cannot be written to tier {tier.spec.name!r} and stays in pinned host"
            f" memory: {error}; further failures of this kind are only counted",
        )

    # -- back -------------------------------------------------------------------------------------

    def allocate(self, ticket: CudaTicket, *, force: bool = False) -> CudaTarget | None:
        """Memory on the ticket's device, allocated on the current stream.

        ``None`` also where the device itself has not so much left. Raises ``torch.OutOfMemoryError``
        if it has not with ``force``.
        """
        nbytes, device = ticket.nbytes, ticket.device
        if force:
            self._budget.force(nbytes, RESTORED)
        elif not self._budget.try_take(nbytes, RESTORED):
            return None
        try:
            storage = self._link.empty(nbytes, device)
        except BaseException as error:
            self._budget.give(nbytes, RESTORED)
            if force or not isinstance(error, torch.OutOfMemoryError):
                raise
            self._recorder.count("device.out_of_memory")
            return None
        weakref.finalize(storage, defer, self._budget.give, nbytes, RESTORED).atexit = False
        stream = self._link.current_stream(device)
        return CudaTarget(storage, self._link.record(stream), Fill(stream))

    def read(
        self, tier: Tier, ticket: CudaTicket, target: CudaTarget, priority: Priority
    ) -> Transfer:
        """Begin to fill ``target``; the transfer settles when the copy to the device is enqueued.

        ``ticket.written`` must have settled without an error. What is still on its way to flash is
        taken from its buffer.

        Raises:
            ConfigError: It has not, or the ticket was discarded.
            ClosedError: The mover is closed, or this is a forked process.
        """
        self._check_usable()
        with self._lock:
            buffer, on_flash = ticket.buffer, ticket.on_flash
            if ticket.discarded or ticket.where not in (Where.STAGED, Where.ON_FLASH):
                state = "was discarded" if ticket.discarded else f"is {ticket.where.value}"
                raise ConfigError(
                    f"{ticket.label}: read from tier {tier.spec.name}, but it {state}"
                )
            if buffer is not None:
                buffer.slab.join(buffer)
        transfer = Transfer(ticket.nbytes)
        if buffer is not None:
            self._copy_in(ticket, target, buffer, transfer)
            return transfer
        assert on_flash is not None, "bytes are on flash without a ticket of the tier"
        read = FlashRead(ticket, on_flash, target, priority, transfer)
        self._read_flash(read)
        return read.transfer

    def _read_flash(self, read: FlashRead) -> None:
        staging = self._staging
        assert staging is not None, "bytes are on flash without a staging memory"
        nbytes = read.on_flash.window.nbytes
        waiting = Waiting(nbytes, read.priority, partial(self._buffer_found, read))
        read.waiting = waiting
        read.transfer = Transfer(
            read.ticket.nbytes, promote=lambda _, priority: self._promote(read, priority)
        )
        buffer, queued = staging.take_or_wait(waiting)
        if not queued:
            self._fetch(read, staging.beyond(nbytes) if buffer is None else buffer)

    def _promote(self, read: FlashRead, priority: Priority) -> None:
        with self._lock:
            read.priority = min(read.priority, priority)
            inner = read.inner
        if inner is not None:
            inner.promote(priority)
        elif self._staging is not None and read.waiting is not None:
            self._staging.promote(read.waiting, priority)

    def _buffer_found(self, read: FlashRead, buffer: Buffer | None) -> None:
        """In the slab's thread."""
        if self._closed:
            if buffer is not None:
                buffer.slab.release(buffer)
                buffer.slab.leave(buffer)
            read.transfer.settle(ClosedError(f"{read.ticket.label}: the session was closed"))
            return
        assert self._staging is not None
        try:
            if buffer is None:
                buffer = self._staging.beyond(read.on_flash.window.nbytes)
            self._fetch(read, buffer)
        except Exception as error:  # noqa: BLE001  (whoever waits for the bytes gets it)
            read.transfer.settle(error)

    def _fetch(self, read: FlashRead, buffer: Buffer) -> None:
        """Begin to read from flash to a buffer, which is free again after the copy to the device."""
        buffer.slab.release(buffer)
        priority = read.priority
        try:
            inner = read.ticket.tier.read(
                read.on_flash, buffer.address, keep_alive=buffer, priority=priority
            )
        except BaseException:
            buffer.slab.leave(buffer)
            raise
        with self._lock:
            read.inner = inner
            promoted = read.priority < priority
        if promoted:
            inner.promote(read.priority)
        inner.add_done_callback(partial(self._fetched, read, buffer))

    def _fetched(self, read: FlashRead, buffer: Buffer, inner: Transfer) -> None:
        """In a worker of the engine."""
        if inner.error is not None:
            buffer.slab.leave(buffer)
            read.transfer.settle(inner.error)
            return
        skew = read.on_flash.window.skew
        self._copy_in(read.ticket, read.target, buffer, read.transfer, skew=skew)

    def _copy_in(
        self,
        ticket: CudaTicket,
        target: CudaTarget,
        buffer: Buffer,
        transfer: Transfer,
        *,
        skew: int = 0,
    ) -> None:
        copy = Copy(
            target.storage,
            ticket.nbytes,
            (target.ready,),
            ticket.label,
            ticket.tier.spec.name,
            issued=partial(self._issued, target.fill, transfer),
            landed=partial(self._landed, target.fill, buffer, transfer),
            address=buffer.address + skew,
        )
        self._lane(ticket.device, "in").submit(copy)

    def _issued(self, fill: Fill, transfer: Transfer, copy: Copy) -> None:
        if not fill.landed:
            fill.copy = copy
        transfer.settle()

    def _landed(self, fill: Fill, buffer: Buffer, transfer: Transfer, copy: Copy) -> None:
        """In the lane's thread."""
        if copy.error is None:
            fill.landed = True
            fill.copy = None
        buffer.slab.leave(buffer)
        if copy.error is not None and not transfer.done:
            transfer.settle(copy.error)

    def finish(self, target: CudaTarget) -> torch.UntypedStorage:
        """The target as a storage. Its bytes may still be on their way: see ``use``."""
        storage, fill = target.storage, target.fill
        if not fill.landed:
            cdata = storage._cdata
            fills = self._fills
            fills[cdata] = (weakref.ref(storage, lambda ref: _forget(fills, cdata, ref)), fill)
        return storage

    def use(self, storage: torch.UntypedStorage) -> None:
        """From now on the current stream works with ``storage``: rules 1, 5 and 6 of the note.

        A stream that is ever current here must live as long as the session; those of torch do.
        """
        device = storage.device
        stream = self._link.current_stream(device)
        streams = self._streams.setdefault(device, set())
        if stream not in streams:
            with self._lock:
                streams.add(stream)
        known, fill = self._fills.get(storage._cdata, (None, None))
        if fill is not None and known is not None and known() is storage:
            self._await_fill(storage, fill, stream)
        elif len(streams) > 1:
            self._link.keep(storage, stream)

    def _await_fill(self, storage: torch.UntypedStorage, fill: Fill, stream: Stream) -> None:
        copy = fill.copy
        if copy is not None:
            self._link.wait(stream, copy.end)
        if stream != fill.stream:
            self._link.keep(storage, stream)
        if copy is not None:
            copy.storage = None

    def drop(self, target: CudaTarget) -> None:
        """Let go of it; if a copy to it is under way, the lane holds the memory until it has landed."""
        del target

    # -- the rest ---------------------------------------------------------------------------------

    def discard(self, tier: Tier, ticket: CudaTicket) -> None:
        """Free what holds the bytes, once no transfer touches it. Harmless after ``close``."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if ticket.discarded:
                return
            ticket.discarded = True
            where, buffer, on_flash = ticket.where, ticket.buffer, ticket.on_flash
            ticket.where = Where.NOWHERE if where is not Where.COPYING else where
        if where is Where.QUEUED:
            ticket.written.cancel()
        if buffer is not None:
            buffer.slab.release(buffer)
        if on_flash is not None:
            tier.discard(on_flash)

    def trim(self, nbytes: int) -> int:
        """Wait for the oldest copy to the device that nobody has asked for yet; how many bytes it has.

        Idle memory is torch's to keep. But what was read ahead and then given up stays charged until
        its copy has landed, so whoever needs room may have to wait for that. 0 if there is none.
        """
        lanes = [lane for (_, direction), lane in tuple(self._lanes.items()) if direction == "in"]
        return next((landed for lane in lanes if (landed := lane.await_landing())), 0)

    def target_bytes(self, ticket: CudaTicket) -> int:
        """The storage's bytes; what torch rounds them up to is not counted."""
        return ticket.nbytes

    def used_bytes(self) -> int:
        """Restored storages that are alive."""
        return self._budget.used_by(RESTORED)

    def measure(self) -> tuple[float, float]:
        """Bytes per second from the device to pinned memory, and back; the better of two rounds.

        Waits. ``(0, 0)`` where there is no pinned memory.
        """
        for slab in reversed(self._slabs):
            nbytes = min(PROBE_BYTES, slab.capacity_bytes)
            buffer = slab.take(nbytes)
            if buffer is not None:
                slab.release(buffer)
                try:
                    storage = self._link.empty(nbytes, self.device)
                    out = [self._round(storage, buffer, outwards=True) for _ in range(2)]
                    back = [self._round(storage, buffer, outwards=False) for _ in range(2)]
                finally:
                    slab.leave(buffer)
                return nbytes * 1e9 / min(out), nbytes * 1e9 / min(back)
        return 0.0, 0.0

    def _round(self, storage: torch.UntypedStorage, buffer: Buffer, *, outwards: bool) -> int:
        """Device time of one copy, in ns."""
        link = self._link
        stream = link.current_stream(self.device)
        start = link.record(stream, timed=True)
        (link.copy_out if outwards else link.copy_in)(stream, storage, buffer.address)
        end = link.record(stream, timed=True)
        link.synchronize(end)
        return max(1, link.elapsed_ns(start, end))

    def close(self) -> None:
        """Wait for what is under way, then release streams and pinned memory. Idempotent.

        Close the tiers first: what waits for flash ends with them. Spilled bytes are lost.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for waiting in [each for slab in self._slabs for each in slab.stop()]:
            waiting.begin(None)
        for slab in self._slabs:
            slab.close()
        for lane in tuple(self._lanes.values()):
            lane.close()
        self._fills.clear()

    # -- inside -----------------------------------------------------------------------------------

    def _lane(self, device: torch.device, direction: str) -> Lane:
        lane = self._lanes.get((device, direction))
        if lane is not None:
            return lane
        with self._lock:
            lane = self._lanes.get((device, direction))
            if lane is None:
                lane = self._lanes[device, direction] = Lane(
                    self._link,
                    device,
                    "out" if direction == "out" else "in",
                    recorder=self._recorder,
                    inline=self._pinned,
                    start_thread=self._start_thread,
                )
            return lane

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this process was forked from {self._pid}, whose CUDA tensors it cannot touch;"
                " start it with the method 'spawn'"
            )
        if self._closed:
            raise ClosedError("the session is closed: its pinned memory is gone")

    def _report_unpinned(self) -> None:
        self._recorder.count("pin.failed")
        reason = next(slab.refusal for slab in self._slabs if slab.refusal)
        self._recorder.mark("pin_failed", error=reason)
        self._warn(
            "pin",
            f"the driver does not pin {sum(slab.capacity_bytes for slab in self._slabs)} bytes of host"
            f" memory ({reason}): copies to and from {self.device} take several times as long;"
            " lower host_memory, or raise the limit on locked memory",
        )

    def _warn(self, topic: str, message: str) -> None:
        """Warn once about each topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, PenstockWarning, stacklevel=3)


def _no_space(ticket: CudaTicket, slab: Slab | None, advice: str) -> NoSpaceError:
    free = -1 if slab is None else slab.capacity_bytes - slab.used_bytes
    where = ticket.tier.spec.where if slab is None else "pinned host memory"
    return NoSpaceError(
        errno=errnos.ENOSPC,
        op="allocate",
        path=where,
        offset_bytes=0,
        nbytes=ticket.nbytes,
        free_bytes=free,
        advice=f"{ticket.label}: {advice}",
    )


def _forget(
    fills: dict[int, tuple[weakref.ref[torch.UntypedStorage], Fill]],
    cdata: int,
    dead: weakref.ref[torch.UntypedStorage],
) -> None:
    """A restored storage has died: its key may be another's soon (TRAPS rule 27)."""
    known = fills.get(cdata)
    if known is not None and known[0] is dead:
        del fills[cdata]


def _abandon(lanes: dict[tuple[torch.device, str], Lane], slabs: Iterable[Slab]) -> None:
    """The mover was dropped without ``close``; then nothing is under way, or it would be alive."""
    for lane in lanes.values():
        lane.stop()
    for slab in slabs:
        slab.close()
