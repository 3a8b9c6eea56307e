"""GPU-direct: the mover, for a flash tier that transfers device memory without host memory between.

[Note: GPU-direct]
    An I/O is no work of a stream: it begins when it is submitted, and whatever it comes after must have
    ended before, as seen by the *host*. So rules 1 to 6 of [Note: streams] become:

    1. Out: the events of rule 1 are waited for by the thread of a lane, the *fence*, and only then is
       the write submitted. Nobody else waits.
    2. The source is held, and charged, until the write has ended; only then is ``written`` settled.
    3. No memory stands between, so none changes hands.
    4. Back: a fence waits for the event that was recorded when the target was allocated. Then the read
       is submitted.
    5. A read settles when its bytes are there, and are those that were written.
    6. A target is held until then. The stream that it was allocated on stays known, so that ``use`` by
       another one tells the allocator.

    A fence waits only for work that was enqueued before it was made, and no stream ever waits for an
    I/O: no cycle can arise. Unless ``PENSTOCK_VERIFY=off`` the device makes a *digest* of the source
    behind the fence, and another of the target behind the read, and the two are compared.

[Note: no window]
    A storage of torch begins at a multiple of 512 bytes, files want multiples of 4096. Here exactly the
    data's own range is moved, in both directions. Out: what lies around a storage may be beyond the end
    of what CUDA has allocated, and kernels may be writing it; so it is not read, not even to be thrown
    away. Back: what lies around a target is somebody else's. Addresses and lengths that are no multiples
    are cuFile's to deal with (offsets in files are multiples always), and the trial in ``.gpu_direct``
    sees whether it does. So the target is an ordinary storage of exactly the data's length, which
    begins where the data begin (TRAPS rule 26), is charged as such, and is known to the allocator:
    ``record_stream`` works on it, where on a storage made from an address inside a larger block it
    would silently do nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import torch

from penstock.core import knobs
from penstock.core.errors import ChecksumError, ClosedError, NoSpaceError
from penstock.io.engine import Transfer
from penstock.runtime.cuda.digest import DIGEST_BYTES, WORD_BYTES
from penstock.runtime.cuda.inbound import FlashRead, Inbound
from penstock.runtime.cuda.lanes import Copy, CopyLanes
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.outbound import Outbound
from penstock.runtime.cuda.pinned import PinnedBlock
from penstock.runtime.cuda.tickets import CudaTicket, no_space


def _make_digest(
    lanes: CopyLanes,
    ticket: CudaTicket,
    storage: torch.UntypedStorage,
    then: Callable[[bytes, BaseException | None], None],
) -> None:
    """Have the device make a digest of a storage, and call ``then`` with it, or with an error."""
    sums = (ctypes.c_ubyte * DIGEST_BYTES)()
    copy = Copy(
        storage,
        ticket.nbytes,
        (),
        ticket.label,
        ticket.tier.spec.name,
        lambda copy: then(bytes(sums), copy.error),
        address=ctypes.addressof(sums),
    )
    del storage  # the copy has it: it must be dead when the ticket has ended
    try:
        lanes.get(ticket.device, "digest").submit(copy)
    except ClosedError as error:
        then(b"", error)


class DirectOutbound(Outbound):
    """As :class:`Outbound`, but flash is written from device memory. Thread-safe."""

    def _begin(self, ticket: CudaTicket, copy: Copy) -> None:
        """Begin with the fence, for which the copy stands."""
        storage = copy.storage
        assert storage is not None, "a write without a storage"
        if storage.data_ptr() % WORD_BYTES:
            advice = (
                f"it begins at no multiple of {WORD_BYTES} bytes, so it is not torch's own memory"
            )
            raise no_space(ticket, None, advice)
        self._promise(ticket)
        ticket.written = Transfer(ticket.nbytes, cancel=partial(self._cancel, ticket))
        ticket.source = storage
        copy.landed = partial(self._fenced, ticket)
        self._lanes.get(ticket.device, "fence-out").submit(copy)

    def _cancel(self, ticket: CudaTicket, transfer: Transfer) -> bool:
        """Before the write is begun it need not be, but the source is held until the fence is over."""
        with self._lock:
            on_flash = ticket.on_flash
            ticket.cancelled = on_flash is None
        return on_flash is not None and on_flash.written.cancel()

    def _is_unwanted(self, ticket: CudaTicket) -> bool:
        return ticket.discarded or ticket.cancelled or self.closing

    # -- in the threads of lanes ------------------------------------------------------------------

    def _fenced(self, ticket: CudaTicket, fence: Copy) -> None:
        """Nothing writes to the source any more."""
        if fence.error is not None or self._is_unwanted(ticket) or knobs.verify() == "off":
            self._submit(ticket, fence.error)
            return
        assert ticket.source is not None, "a source was dropped before its digest"
        _make_digest(self._lanes, ticket, ticket.source, partial(self._digested, ticket))

    def _digested(self, ticket: CudaTicket, digest: bytes, error: BaseException | None) -> None:
        ticket.digest = digest
        self._submit(ticket, error)

    def _submit(self, ticket: CudaTicket, error: BaseException | None) -> None:
        """Begin to write, unless it is too late for that; the promise is kept, or void."""
        source, on_flash = ticket.source, None
        assert source is not None, "a source was dropped before its write"
        if error is None and self._is_unwanted(ticket):
            error = CancelledError()
        try:
            if error is None:
                on_flash = self._write(ticket, source.data_ptr(), source)
        except Exception as refused:  # noqa: BLE001  (whatever it is, the bytes are still in the source)
            error = refused.with_traceback(None)  # whose frames would keep the storage alive
        finally:
            self._fulfil(ticket)
        del source
        if on_flash is None:
            self._end(ticket, error)
        else:
            on_flash.written.add_done_callback(partial(self._flashed_directly, ticket))

    # -- in a worker of the engine ----------------------------------------------------------------

    def _flashed_directly(self, ticket: CudaTicket, transfer: Transfer) -> None:
        """The bytes are on flash, or still only in the source."""
        self._is_refused(ticket, transfer.error)
        self._end(ticket, transfer.error)

    def _end(self, ticket: CudaTicket, error: BaseException | None) -> None:
        """Settle, unless flash has refused the bytes and there is room for them in pinned memory."""
        if isinstance(error, NoSpaceError):
            self._note_full(ticket.tier)
        buffer = None
        if isinstance(error, OSError) and self._host is not None and not self._is_unwanted(ticket):
            buffer = self._host.take(ticket.nbytes)
        if buffer is None:
            self._settle(ticket, error)
            return
        self._report(ticket, error)
        source, name = ticket.source, ticket.tier.spec.name
        copied = partial(self._copied, ticket)
        copy = Copy(source, ticket.nbytes, (), ticket.label, name, copied)
        ticket.source = None  # the copy holds it
        del source
        try:
            self._begin_copy(ticket, copy, buffer)
        except ClosedError as closed:
            buffer.slab.release(buffer)
            buffer.slab.leave(buffer)
            copy.storage = None
            self._settle(ticket, closed)

    def _on_to_flash(self, ticket: CudaTicket, buffer: PinnedBlock) -> None:
        """Keep in the buffer, until it is discarded, what flash refused."""
        buffer.slab.leave(buffer)

    def _settle(self, ticket: CudaTicket, error: BaseException | None) -> None:
        ticket.source = None  # first: who hears of the end may look whether the storage is dead
        ticket.written.settle(error)


class DirectInbound(Inbound):
    """As :class:`Inbound`, but what is on flash is read to device memory. Thread-safe."""

    def _begin(self, read: FlashRead) -> None:
        ticket, target = read.ticket, read.target
        assert target is not None, "a target was dropped before its read"
        fenced = partial(self._fenced, read)
        name = ticket.tier.spec.name
        fence = Copy(target.storage, ticket.nbytes, (target.ready,), ticket.label, name, fenced)
        self._lanes.get(ticket.device, "fence-in").submit(fence)

    def _fenced(self, read: FlashRead, fence: Copy) -> None:
        """In the thread of a lane: nothing uses the target's memory any more."""
        if fence.error is not None:
            self._settle(read, fence.error)
            return
        assert read.target is not None, "a target was dropped before its read"
        try:
            inner = read.begin(read.target.storage.data_ptr(), read.target.storage)
        except Exception as error:  # noqa: BLE001  (whoever waits for the bytes gets it)
            self._settle(read, error.with_traceback(None))
            return
        inner.add_done_callback(partial(self._filled, read))

    def _filled(self, read: FlashRead, inner: Transfer) -> None:
        """In a worker of the engine."""
        if inner.error is not None or read.ticket.digest is None:
            self._settle(read, inner.error)
            return
        assert read.target is not None, "a target was dropped before its digest"
        _make_digest(self._lanes, read.ticket, read.target.storage, partial(self._compare, read))

    def _compare(self, read: FlashRead, found: bytes, error: BaseException | None) -> None:
        """In the thread of a lane."""
        ticket, spec = read.ticket, read.ticket.tier.spec
        if error is None and found != ticket.digest and ticket.digest is not None:
            error = ChecksumError(
                f"{ticket.label}: {ticket.nbytes} bytes read back from tier {spec.name}"
                f" ({spec.where}, {read.on_flash.place}) to {ticket.device} have digest {found.hex()},"
                f" written were {ticket.digest.hex()}; the SSD, the device or the way between them is"
                " faulty: stop using it, or set PENSTOCK_GPU_DIRECT=off"
            )
        self._settle(read, error)

    def _settle(self, read: FlashRead, error: BaseException | None) -> None:
        read.settle(error)


class DirectMover(CudaMover):
    """As :class:`CudaMover`, but for a flash tier that is GPU-direct. See [Note: GPU-direct]."""

    _outbound: ClassVar[type[Outbound]] = DirectOutbound
    _inbound: ClassVar[type[Inbound]] = DirectInbound

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[int]:
        """The address of device memory that nothing uses any more; waits for that."""
        storage = self._link.empty(nbytes, self.device)
        self._link.synchronize(self._link.record(self._link.current_stream(self.device)))
        yield storage.data_ptr()
