"""Between CUDA devices and tiers: copies on streams of their own, through pinned host memory.

[Note: streams]
    The device runs behind the interpreter, so "done" has two meanings, and each rule below says which
    it needs (TRAPS rule 15). *Compute stream* is whichever stream is current at the call (never one
    that was looked up before), since backward runs in other threads than forward.

    1. Out: at ``write`` an event is recorded on every stream that has worked with this storage:
       those that were current when it was saved, which ``.stream_table`` knows. The stream of the
       writing thread need not be one: a storage that is evicted late was produced elsewhere. The copy
       comes after these events, even if it is issued much later.
    2. The source is held until the *host* has seen the end of its copy; only then is ``written``
       settled. Neither the compute stream nor the caller waits for that.
    3. Host memory changes hands only when the host has seen the end of the copy that touches it. So a
       write to flash reads whole bytes, and a buffer is never refilled under a running copy.
    4. Back: a target is allocated on the compute stream, and an event recorded there at once: kernels
       that used the memory before may still be running. The copy comes after it.
    5. A read settles when its copy has been *enqueued*. A thread that then uses the storage calls
       ``use`` first: its current stream waits for the copy, the interpreter does not.
    6. The target is held until the end of its copy, or until a stream uses it: that stream comes after
       the copy, and so does whatever reuses the memory. If it is not the stream of the allocation, the
       allocator learns of it (``record_stream``).
    7. A recomputed storage is complete when the recomputing stream has come so far. An event is
       recorded behind that, and every other stream that uses the storage waits for the event.
    8. Autograd would hold saved tensors until backward, and a program may rely on that: a batch that a
       loader's stream has allocated is read on another one, unknown to the allocator. Penstock frees it
       as soon as its copy has ended. So at ``write`` the allocator learns of every stream of rule 1,
       and later of further streams at their first ``use``. It ignores the stream of the allocation.
       Storages that stay until backward are left out, since their memory would come free late for
       nothing. The rule also holds for storages freed without a full copy (``free_early``): those that
       are recomputed, and those of which only a small part is saved.

    Why the stream at the save is enough for rule 1: what an operator saves it reads or writes, on the
    stream that is current then. The program has made this stream wait for whatever was produced on
    another one, or the operator itself would race. Two things cannot be known. A reader on another
    stream that saves nothing: if the program drops the tensor before that stream is waited for, it must
    call ``record_stream``, as for tensors that are not saved at all. And a ``Function`` (or
    ``torch.utils.checkpoint``) that saves what it reads on another stream only: the stream that is
    current at the call must have waited for whatever produced that.

    No cycle can arise: a copy waits only for events that were recorded before it was issued, and a
    stream waits for a copy only after that.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import ClassVar, Final

import torch

from penstock.core.errors import ClosedError, HookError, NoSpaceError, TransferError
from penstock.core.locks import Lock, defer
from penstock.core.process import fork_guard
from penstock.core.units import MIB, format_bytes
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.cuda.inbound import Inbound
from penstock.runtime.cuda.lanes import Copy, CopyLanes, StartThread, start_daemon
from penstock.runtime.cuda.link import CudaLink, Event, device_time
from penstock.runtime.cuda.outbound import Outbound
from penstock.runtime.cuda.pinned import PinnedBlock, Slab
from penstock.runtime.cuda.stream_table import StreamTable
from penstock.runtime.cuda.tickets import CudaTarget, CudaTicket, Fill
from penstock.runtime.movers import RESTORED, Mover
from penstock.runtime.storage import Encoding
from penstock.store.account import Account
from penstock.store.base import Tier
from penstock.store.host import MemoryPlace

PROBE_BYTES: Final = 64 * MIB
LEAST_PROBE_BYTES: Final = MIB
"""Bandwidth is measured with the former, or on a full device with no less than this."""


class CudaMover(Mover):
    """Mover of the storages of every CUDA device of this process. See [Note: streams]. Thread-safe.

    Attributes:
        device: Where the pinned memory was registered; storages of others are moved as well.
    """

    runs_behind: ClassVar[bool] = True
    _outbound: ClassVar[type[Outbound]] = Outbound
    _inbound: ClassVar[type[Inbound]] = Inbound

    def __init__(
        self,
        *,
        device: torch.device,
        budget: Account,
        recorder: Recorder,
        link: CudaLink,
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
            start_thread: Starts the threads of the lanes, as they are needed.
        """
        self.device = device
        self._guard = fork_guard()
        self._closed = False
        self._link = link
        self._host = host
        self._slabs = [slab for slab in (host, staging) if slab is not None]
        self._lock = Lock()
        self._table = StreamTable(link, self._lock)
        self._recorder = recorder
        lanes = CopyLanes(link, recorder, inline=self._is_pinned, start_thread=start_thread)
        self._lanes = lanes
        self._out = self._outbound(
            lock=self._lock, lanes=lanes, recorder=recorder, staging=staging, host=host
        )
        self._in = self._inbound(lock=self._lock, lanes=lanes, recorder=recorder, staging=staging)
        self._budget_of: Callable[[torch.device], Account] = lambda device: budget
        weakref.finalize(self, defer, _abandon, lanes, self._slabs).atexit = False
        self._tell_refusals()

    # -- out --------------------------------------------------------------------------------------

    def write(
        self,
        storage: torch.UntypedStorage,
        tier: Tier,
        label: str,
        encoding: Encoding | None = None,
    ) -> CudaTicket:
        """Begin to spill all of ``storage`` as it is; enqueues and returns.

        ``encoding`` is ignored here; see :mod:`.encoding`.

        Raises:
            NoSpaceError: The tier has no room, or there is none to stage the storage in and there
                will be none by itself.
            HookError: A CUDA graph is being captured.
            TransferError: One is, in another thread, on a stream that works with the storage.
            ClosedError: The mover is closed, or this is a forked process.
        """
        after = self._leave(storage, label)
        try:
            return self._out.write(storage, tier, label, after)
        except NoSpaceError:  # before anything waits for them
            for event in after:
                self._link.reuse(event)
            raise

    def write_through(
        self,
        storage: torch.UntypedStorage,
        label: str,
        begin: Callable[[int, object], Transfer],
    ) -> Transfer:
        """Begin to copy ``storage`` to host memory, from where ``begin`` writes it; returns at once.

        It is held until its copy has ended. Nobody may change it before the transfer has settled, or the
        device copies some of either. Raises as ``write`` does, but for NoSpaceError.

        Args:
            storage: On a device.
            label: Name of it in messages.
            begin: Called in the thread of a lane, with the address of the bytes, a multiple of 4096, and
                their owner; begins to write them, and returns the transfer.

        Returns:
            Settled when that transfer is, with its error, or that of the copy.
        """
        return self._out.write_through(storage, label, self._leave(storage, label), begin)

    def overwrite(
        self, storage: torch.UntypedStorage, label: str, tier: Tier, buffer: PinnedBlock
    ) -> Transfer:
        """Begin to copy ``storage`` to pinned memory in which its bytes rest; returns at once.

        As ``write_through``, but the transfer is settled when the copy has ended.

        Args:
            storage: On a device.
            label: Name of it in messages.
            tier: Under whose name the copy is recorded.
            buffer: The memory, as of ``lend_pinned``, which the caller keeps alive.
        """
        return self._out.overwrite(storage, tier, label, self._leave(storage, label), buffer)

    def lend_pinned(self, nbytes: int) -> MemoryPlace | None:
        """Return pinned memory of the host tier in which something rests; None if it has no room."""
        return None if self._host is None else self._host.lend(nbytes)

    def is_pinned(self, buffer: PinnedBlock) -> bool:
        """Return whether pinned memory that was lent is this mover's."""
        return buffer.slab is self._host

    @property
    def free_pinned_bytes(self) -> int:
        """Bytes of the host tier that are free now."""
        return 0 if self._host is None else self._host.capacity_bytes - self._host.used_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes of the host tier that were lent."""
        return 0 if self._host is None else self._host.lent_bytes

    def fence(
        self,
        storage: torch.UntypedStorage,
        label: str,
        complete: Callable[[BaseException | None], None],
    ) -> None:
        """Call ``complete`` when all that works with ``storage`` by now has ended; returns at once.

        In the thread of a lane, with an error if that cannot be known. For what is done with a storage
        before ``write``; the lane holds it until then. Raises as ``write`` does, but for NoSpaceError.
        """
        after = self._leave(storage, label)
        copy = Copy(storage, 0, after, label, "", lambda copy: complete(copy.error))
        self._lanes.get(storage.device, "fence-out").submit(copy)

    def _leave(self, storage: torch.UntypedStorage, label: str) -> tuple[Event, ...]:
        """Return events after which a storage is complete and unused: rule 1 of the note."""
        self._check_usable()
        link = self._link
        if link.capturing():
            raise HookError(
                f"{label}: tensors cannot be offloaded while a CUDA graph is captured, because its"
                " replay would not move them; capture it within `with session.paused():`"
            )
        streams = self._table.leave(storage)
        current = link.current_stream(storage.device)
        for stream in streams:
            if stream is not current and stream != current and link.capturing(stream):
                raise _captured(storage, label)
        return tuple([link.record(stream) for stream in streams])

    def frees(self, storage: torch.UntypedStorage) -> bool:
        """Return whether no CUDA graph owns it; see [Note: memory of CUDA graphs] in ``.pools``."""
        return self._link.frees(storage)

    def begin_pass(self) -> None:
        """Look once in each pass whether CUDA graphs have taken memory."""
        self._link.begin_pass()

    # -- back -------------------------------------------------------------------------------------

    def allocate(
        self, ticket: CudaTicket, *, force: bool = False, budget: Account | None = None
    ) -> CudaTarget | None:
        """Memory on the ticket's device, allocated on the current stream.

        It is charged to ``budget``; without, to the account of its device.

        ``None`` also where the device itself has not so much left, and while a CUDA graph is captured.
        With ``force`` that raises ``torch.OutOfMemoryError``, or ``HookError``.
        """
        link, nbytes, device = self._link, ticket.nbytes, ticket.device
        if link.capturing():
            if not force:
                return None
            raise HookError(
                f"{ticket.label} was moved out of memory, and cannot be brought back while a CUDA graph"
                " is captured; capture forward and backward within one `with session.paused():`"
            )
        budget = budget or self._budget_of(device)
        if force:
            budget.force(nbytes, RESTORED)
        elif not budget.try_take(nbytes, RESTORED):
            return None
        try:
            storage = link.empty_target(nbytes, device)
        except BaseException as error:
            budget.free(nbytes, RESTORED)
            if force or not isinstance(error, torch.OutOfMemoryError):
                raise
            self._recorder.count("device.out_of_memory")
            return None
        weakref.finalize(storage, defer, budget.free, nbytes, RESTORED).atexit = False
        stream = link.current_stream(device)
        return CudaTarget(storage, link.record(stream), Fill(stream))

    def read(
        self, tier: Tier, ticket: CudaTicket, target: CudaTarget, priority: Priority
    ) -> Transfer:
        """Begin to fill ``target``; the transfer settles when the copy to the device is enqueued.

        What is still on its way to flash is taken from its buffer.

        Raises:
            ConfigError: ``ticket.written`` has not settled without an error, or it was discarded.
            ClosedError: The mover is closed, or this is a forked process.
        """
        self._check_usable()
        return self._in.read(ticket, target, priority)

    def finish(self, target: CudaTarget) -> torch.UntypedStorage:
        """Return the target as a storage. Its bytes may still be on their way: see ``use``."""
        self._table.restored(target.storage, target.fill)
        return target.storage

    def use(self, storage: torch.UntypedStorage) -> None:
        """Note that the current stream works with ``storage`` from now on: rules 1 and 5 to 7.

        A stream that is current here must live as long as the storage; those of torch do.
        """
        self._table.use(storage)

    def settle(self, storage: torch.UntypedStorage) -> None:
        """Wait until the bytes of ``storage`` are there, if they were copied."""
        self._table.settle(storage)

    def free_early(self, storage: torch.UntypedStorage) -> None:
        """Report every stream that works with ``storage`` to the allocator, from now on: rule 8."""
        self._table.use(storage)
        self._table.leave(storage)

    def here(self, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
        """Return a context, to be entered once, in which the stream that is current now is current."""
        return partial(self._link.within, self._link.current_stream(device))

    def account(self, budget_of: Callable[[torch.device], Account]) -> None:
        """Charge restored storages to the account of their device from now on."""
        self._budget_of = budget_of

    def made(self, storage: torch.UntypedStorage) -> None:
        """Note that the current stream recomputes ``storage``: rule 7 of the note."""
        stream = self._link.current_stream(storage.device)
        self._table.restored(storage, Fill(stream, made=self._link.record(stream)))

    def drain(self) -> None:
        """Wait until every copy that was begun has landed."""
        self._lanes.drain()

    def drop(self, target: CudaTarget) -> None:
        """Nothing to do: it dies with its last reference, which may be a lane's until it has landed."""

    # -- the rest ---------------------------------------------------------------------------------

    def discard(self, tier: Tier, ticket: CudaTicket) -> None:
        """Free what holds the bytes, once no transfer touches it. Harmless after ``close``."""
        if not self._guard.in_child:
            self._out.discard(tier, ticket)

    def trim(self, nbytes: int) -> int:
        """Wait for the oldest copy to a device whose target is unused; return the bytes that it moved.

        Idle memory is torch's to keep. But what was read ahead and then given up stays charged until
        its copy has landed, so a caller that needs room may have to wait for that. 0 if there is none.
        """
        return self._lanes.await_landing()

    def rest(self) -> int:
        """Free pinned memory; see :meth:`Slab.rest`."""
        return sum(slab.rest() for slab in self._slabs)

    def wake(self) -> None:
        """Take and pin it again."""
        for slab in self._slabs:
            slab.wake()
        self._lanes.issue_inline(self._is_pinned)
        self._tell_refusals()

    @property
    def _is_pinned(self) -> bool:
        return not any(slab.refusal for slab in self._slabs)

    def target_bytes(self, ticket: CudaTicket) -> int:
        """The storage's bytes; what torch rounds them up to is not counted."""
        return ticket.nbytes

    def used_bytes(self, budget: Account) -> int:
        """Return the bytes of restored storages that are alive."""
        return budget.used_by(RESTORED)

    def measure(self) -> tuple[float, float]:
        """Bytes per second from the device to pinned memory, and back; the better of two rounds.

        Waits. ``(0, 0)`` where there is no pinned memory.
        """
        if not self._slabs:
            return 0.0, 0.0
        slab = self._slabs[0]
        nbytes = min(PROBE_BYTES, slab.capacity_bytes)
        buffer = slab.take(nbytes)
        assert buffer is not None, "a slab has no room although nothing was spilled yet"
        slab.release(buffer)
        try:
            storage = self._probe(nbytes)
            out_ns, back_ns = (
                min(self._copy_time(copy, storage, buffer.address) for _ in range(2))
                for copy in (self._link.copy_out, self._link.copy_in)
            )
        finally:
            slab.leave(buffer)
        return storage.nbytes() * 1e9 / out_ns, storage.nbytes() * 1e9 / back_ns

    def _probe(self, nbytes: int) -> torch.UntypedStorage:
        """Return device memory to measure with: less than ``nbytes`` if the device has not so much left.

        Raises:
            torch.OutOfMemoryError: It has less than ``LEAST_PROBE_BYTES``.
        """
        while True:
            try:
                return self._link.empty(nbytes, self.device)
            except torch.OutOfMemoryError:
                nbytes //= 2
                if nbytes < LEAST_PROBE_BYTES:
                    raise

    def _copy_time(
        self, copy: Callable[..., None], storage: torch.UntypedStorage, address: int
    ) -> int:
        """Return the device time of one copy, in ns."""
        return device_time(self._link, self.device, lambda stream: copy(stream, storage, address))[
            1
        ]

    def close(self) -> None:
        """Wait for what is under way, then release streams and pinned memory. Idempotent.

        Close the tiers first: what waits for flash ends with them. What was spilled is lost.
        """
        if self._guard.in_child or self._closed:
            return
        self._closed = self._out.closing = self._in.closing = True
        for slab in self._slabs:
            for waiting in slab.stop():
                waiting.begin(None)
        for slab in self._slabs:
            slab.close()
        self._lanes.close()

    def _check_usable(self) -> None:
        if self._guard.in_child:
            raise self._guard.error(
                f"device {self.device}", "start a process that uses it by the method 'spawn'"
            )
        if self._closed:
            raise ClosedError("the session is closed, and its pinned memory is gone")

    def _tell_refusals(self) -> None:
        reason = next((slab.refusal for slab in self._slabs if slab.refusal), None)
        if reason is None:
            return
        nbytes = sum(slab.capacity_bytes for slab in self._slabs)
        self._recorder.count("pin.failed")
        self._recorder.mark("pin_failed", error=reason, nbytes=nbytes)
        self._recorder.warn(
            f"pin.{self.device}",
            f"the driver refuses to pin {format_bytes(nbytes)} of host memory ({reason}): copies to"
            f" and from {self.device} will take several times as long; lower host_memory",
        )


def _captured(storage: torch.UntypedStorage, label: str) -> TransferError:
    return TransferError(
        errno=errno.EBUSY,
        op="copy",
        path=label,
        offset_bytes=0,
        nbytes=storage.nbytes(),
        advice="a CUDA graph is being captured on a stream that works with it",
    )


def _abandon(lanes: CopyLanes, slabs: list[Slab]) -> None:
    """The mover was dropped without ``close``; nothing is under way, or it would be alive."""
    lanes.stop()
    for slab in slabs:
        slab.close()
