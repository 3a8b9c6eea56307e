"""Engine on Linux's native asynchronous I/O: one thread for all transfers instead of one per transfer.

The engine's thread sleeps until a request arrives or the kernel has completed one; it settles completed
transfers and submits waiting ones. This matters for training on two cores: a thread that wakes up takes
a core from a team of computing threads, and all of them wait for the one that lost it. No other thread
submits: Ctrl-C may interrupt the requesting thread between any two steps, and then it would be unknown
whether the kernel writes to that memory.

Only direct files are asynchronous in the kernel: requests for buffered ones go to a
:class:`ThreadEngine`.
"""

from __future__ import annotations

import ctypes
import enum
import errno as errnos
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Final

from penstock.core import knobs
from penstock.core.errors import ClosedError, ConfigError
from penstock.core.locks import Lock, defer
from penstock.io.batch import BatchContext, BatchFlight, BatchJob, check_batch
from penstock.io.context import Context, unavailable_error
from penstock.io.engine import Engine, EngineSpec, ReadBatch, Request, Transfer
from penstock.io.threads import ThreadEngine
from penstock.io.transfer_jobs import (
    TransferJob,
    TransferPiece,
    TransferQueue,
    check,
    failure,
    resume_point,
    short_transfer,
)

_BUSY_RETRIES: Final = 1000
_BUSY_PAUSE_S: Final = 0.001


_IOCB: Final = struct.Struct("<QIIHhIQQqQII")
"""``struct iocb`` of linux/aio_abi.h: token, key, flags, opcode, priority, file, address, bytes, offset,
reserved, flags, event file."""
_EVENT: Final = struct.Struct("<QQqq")
"""``struct io_event``: token, iocb, result, second result."""
_OPCODES: Final = {"read": 0, "write": 1}
_RING_BELL: Final = 1
"""Flag ``IOCB_FLAG_RESFD``: signal the event file when the piece is done."""
PIECES_TOGETHER: Final = 4
"""Length of a piece relative to one of a thread: submission costs the same, and fewer must be settled."""


class _Again(enum.Enum):
    AGAIN = "the rest of a piece must be submitted again"


Again: Final = _Again.AGAIN


class Flight:
    """A piece in flight. Used by one thread at a time."""

    __slots__ = ("busy", "moved", "piece", "stuck")

    def __init__(self, piece: TransferPiece) -> None:
        """Start with nothing moved."""
        self.piece = piece
        self.moved = 0
        self.stuck = 0
        self.busy = 0

    def land(self, result: int | BaseException) -> BaseException | _Again | None:
        """Process the kernel's result, bytes or a negative errno.

        Returns:
            None if the piece is complete, ``Again`` if the rest must be submitted, or the error.
        """
        if isinstance(result, BaseException):
            return result
        if result < 0:
            return self._refused(-result)
        before, count = self.moved, result
        if before + count >= self.piece.least_bytes:
            self.moved = self.piece.nbytes
            return None
        # A direct transfer can only continue at a granule: bytes moved past one are moved again.
        # If that moves no more, the file ends inside a granule.
        self.moved = resume_point(self.piece.job.file, before + count, self.piece.nbytes)
        self.stuck = self.stuck + 1 if self.moved == before else 0
        if count == 0 or self.stuck > 1:
            return short_transfer(self.piece, before + count)
        return Again

    def _refused(self, errno: int) -> BaseException | _Again:
        if errno == errnos.EINTR:
            return Again
        if errno == errnos.EAGAIN and self.busy < _BUSY_RETRIES:
            self.busy += 1
            time.sleep(_BUSY_PAUSE_S)
            return Again
        return failure(self.piece, self.moved, OSError(errno, os.strerror(errno)))


class KernelQueue:
    """Kernel context for pieces of requests. Overridden to inject faults."""

    def __init__(self, depth: int) -> None:
        """Set up a context for ``depth`` pieces at once.

        Raises:
            ConfigError: Asynchronous I/O is not available; gives the reason.
        """
        self._blocks = ctypes.create_string_buffer(_IOCB.size * depth)
        start = ctypes.addressof(self._blocks)
        self._pointers = [start + token * _IOCB.size for token in range(depth)]
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._events_at = ctypes.addressof(self._events)
        self._results = memoryview(self._events)
        self._depth = depth
        self._context = Context(depth)
        try:
            self.bell = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            self._context.close()
            raise unavailable_error("eventfd", error.errno or errnos.EIO) from error

    def submit(self, flights: Sequence[tuple[int, Flight]]) -> int:
        """Submit the rest of some pieces, each with its token, which is less than the depth.

        Returns:
            Number of pieces, from the first on, that the kernel accepted.

        Raises:
            OSError: The kernel refused the first one.
        """
        for token, flight in flights:
            job, begin, nbytes = flight.piece
            begin += flight.moved
            fields = token, 0, 0, _OPCODES[job.op], 0, job.file.fd, job.address + begin
            rest = nbytes - flight.moved, job.offset_bytes + begin, 0, _RING_BELL, self.bell
            _IOCB.pack_into(self._blocks, token * _IOCB.size, *fields, *rest)
        pointers = (ctypes.c_void_p * len(flights))(*[self._pointers[each] for each, _ in flights])
        taken = self._context.submit(len(flights), ctypes.addressof(pointers))
        if taken < 0:
            errno = ctypes.get_errno()
            raise OSError(errno, os.strerror(errno))
        return taken

    def wait(self) -> list[tuple[int, int | BaseException]]:
        """Sleep until a piece is done or ``wake`` is called; return (token, bytes or negative errno)."""
        try:  # noqa: SIM105  (hot: ``suppress`` is three calls)
            os.eventfd_read(self.bell)
        except InterruptedError:  # a signal that Python handles
            pass
        found = self._context.events(0, self._depth, self._events_at, None)
        events = self._results[: max(0, found) * _EVENT.size]
        return [(token, result) for token, _, result, _ in _EVENT.iter_unpack(events)]

    def wake(self) -> None:
        """Make ``wait`` return."""
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        """Close the context. No piece may be in flight, and no thread in ``wait``."""
        self._context.close()
        os.close(self.bell)


class _PieceQueue(TransferQueue):
    """Pieces that wait and pieces in flight."""

    def __init__(self, ring: KernelQueue, depth: int, piece_bytes: int) -> None:
        super().__init__(Lock())
        self._ring = ring
        self._depth = depth
        self._piece_bytes = piece_bytes
        self._swarm: BatchContext | None = None  # made by the first batch
        self._flights = dict[int, Flight | BatchFlight]()
        self._free = list(range(depth))  # tokens
        self._thread: threading.Thread | None = None
        self._starting = Lock()

    def takes_batches(self) -> bool:
        """Return True if the kernel takes batches; creates a second context for them."""
        with self._starting:
            if self._swarm is None and isinstance(self._ring, KernelQueue) and not self._closed:
                try:
                    self._swarm = BatchContext(self._depth, self._ring.bell)
                except ConfigError:  # the limit fs.aio-max-nr is reached
                    return False
            return self._swarm is not None

    def put(self, job: TransferJob) -> None:
        try:
            self.start()
        except RuntimeError as error:  # no thread can be started
            job.settle(error)
            return
        with self._lock:
            self.append(job)
            can_leave = bool(self._free)
        if can_leave:
            self._ring.wake()

    def wake(self) -> None:
        """Let the thread look at what waits."""
        with self._lock:
            if not self._closed:
                self._ring.wake()

    def stop(self) -> list[TransferJob]:
        """Stop once pieces in flight end; return the jobs not begun, for the caller to settle."""
        if self.guard.in_child:
            return []
        with self._starting, self._lock:
            if self._closed:
                return []
            self._closed = True
            if self._running:
                self._ring.wake()
            else:
                self._close_rings()
            return self.take_unbegun()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and self._running and thread is not threading.current_thread():
            thread.join()

    def land(self) -> bool:
        """Settle finished jobs and submit waiting ones; return False if there will be no more."""
        answers = self._answers()
        slices = self._land_slices()
        with self._lock:
            over = [
                flight.piece.job
                for token, flight, answer in answers
                if answer is not Again and self._finish(token, flight, answer)
            ]
            over += [f.piece.job for token, f in slices if self._finish(token, f, None)]
            leaving: list[tuple[int, Flight | BatchFlight]] = [
                (token, flight) for token, flight, answer in answers if answer is Again
            ]
            leaving += self._next()
        over += self._hand_over(leaving)
        _settle(over)
        if not self._closed:  # who closes it rings the bell after that
            return True
        with self._lock:
            if self._flights or any(self):
                return True
            self._close_rings()
            return False

    def _answers(self) -> list[tuple[int, Flight, BaseException | _Again | None]]:
        answers = []
        for token, result in self._ring.wait():
            flight = self._flights[token]
            assert isinstance(flight, Flight)
            answers.append((token, flight, flight.land(result)))
        return answers

    def _land_slices(self) -> list[tuple[int, BatchFlight]]:
        """Return the finished slices; entries that must be read again are queued."""
        over = []
        for token, count, again in self._swarm.collect() if self._swarm is not None else ():
            flight = self._flights[token]
            assert isinstance(flight, BatchFlight)
            self._read_again(flight.job, again)
            flight.left -= count
            if not flight.left:
                over.append((token, flight))
        return over

    def _read_again(self, batch: BatchJob, entries: list[int]) -> None:
        for entry in entries:
            batch.hold()
            job = TransferJob(
                batch.batch.request(entry),
                self._piece_bytes,
                cancel=self.cancel,
                promote=self.promote,
            )
            job.transfer.add_done_callback(
                lambda done, entry=entry: batch.release(entry, done.error)  # type: ignore[misc]
            )
            try:
                self.put(job)
            except ClosedError as error:
                job.settle(error)

    def _close_rings(self) -> None:
        if self._swarm is not None:
            self._swarm.close()
        self._ring.close()

    def start(self) -> None:
        # Not under the other lock: starting a thread waits for locks of the interpreter, and a thread
        # that holds one of those may be running a finalizer that waits for the other lock.
        if self._running:
            return
        with self._starting:
            if not self._closed and not self._running:
                self._thread = threading.Thread(
                    target=_land, args=(self,), name="penstock-io-0", daemon=True
                )
                self._thread.start()

    @property
    def _running(self) -> bool:
        """True if the thread was started: the attempt may have failed, or been interrupted."""
        return self._thread is not None and self._thread.ident is not None

    def _next(self) -> list[tuple[int, Flight | BatchFlight]]:
        leaving = []
        while self._free and (piece := self.take()) is not None:
            token, job = self._free.pop(), piece.job
            flight = BatchFlight(piece, job) if isinstance(job, BatchJob) else Flight(piece)
            self._flights[token] = flight
            leaving.append((token, flight))
        return leaving

    def _finish(
        self, token: int, flight: Flight | BatchFlight, error: BaseException | None
    ) -> bool:
        del self._flights[token]
        self._free.append(token)
        return self.finish(flight.piece.job, error)

    def _hand_over(self, leaving: list[tuple[int, Flight | BatchFlight]]) -> list[TransferJob]:
        """Submit to the kernel; return the jobs that ended because it refused."""
        over = list[TransferJob]()
        while leaving:
            slices = [(token, each) for token, each in leaving if isinstance(each, BatchFlight)]
            pieces = [(token, each) for token, each in leaving if isinstance(each, Flight)]
            leaving = []
            for token, flight in slices:
                leaving += self._hand_over_slice(token, flight, over)
            if pieces:
                leaving += self._hand_over_pieces(pieces, over)
        return over

    def _hand_over_slice(
        self, token: int, flight: BatchFlight, over: list[TransferJob]
    ) -> list[tuple[int, Flight | BatchFlight]]:
        """Submit a slice; return the pieces that follow in its place if the kernel took nothing."""
        assert self._swarm is not None, "a batch was queued before its context was created"
        self._read_again(flight.job, self._swarm.submit(token, flight))
        if flight.left:
            return []
        with self._lock:
            if self._finish(token, flight, None):
                over.append(flight.job)
            return self._next()

    def _hand_over_pieces(
        self, leaving: list[tuple[int, Flight]], over: list[TransferJob]
    ) -> list[tuple[int, Flight | BatchFlight]]:
        """Submit pieces; return those that follow in the place of refused ones."""
        following = list[tuple[int, Flight | BatchFlight]]()
        alone = False
        while leaving:
            try:
                taken = self._ring.submit(leaving[:1] if alone else leaving)
            except OSError as refusal:
                answer = leaving[0][1].land(-(refusal.errno or errnos.EIO))
            except BaseException as unexpected:  # noqa: BLE001  (whoever waits for the transfer gets it)
                if not alone:
                    alone = True  # to find the piece that caused it
                    continue
                answer = unexpected
            else:
                leaving = leaving[taken:]
                continue
            if answer is Again:
                continue
            token, flight = leaving.pop(0)
            with self._lock:
                if self._finish(token, flight, answer):
                    over.append(flight.piece.job)
                following += self._next()
        return following


class AioEngine(Engine):
    """Asynchronous system calls, and one daemon thread that starts with the first of them.

    Callbacks of transfers run in that thread, so they must be quick.
    """

    def __init__(
        self,
        depth: int | None = None,
        piece_bytes: int | None = None,
        *,
        ring: Callable[[int], KernelQueue] = KernelQueue,
    ) -> None:
        """Make an engine; no thread is started yet.

        Args:
            depth: Pieces in flight at once; ``knobs.io_threads()`` if None.
            piece_bytes: The longest single transfer, a multiple of 4096; four times
                ``knobs.io_piece_bytes()`` if None.
            ring: Where pieces go; the operating system if not given.

        Raises:
            ConfigError: A senseless setting; or asynchronous I/O cannot be had here, with the reason.
        """
        depth = knobs.io_threads() if depth is None else depth
        piece = PIECES_TOGETHER * knobs.io_piece_bytes() if piece_bytes is None else piece_bytes
        # It checks both, and moves what no ring can.
        self._threads = ThreadEngine(depth, piece)
        self._spec = EngineSpec(name="aio", workers=depth, piece_bytes=piece)
        self._queue = _PieceQueue(ring(depth), depth, piece)
        weakref.finalize(self, _abandon, self._queue).atexit = False

    @property
    def spec(self) -> EngineSpec:
        """Properties of this engine."""
        return self._spec

    def start(self) -> None:
        """Start the thread, and one for files that are not direct."""
        self._queue.start()
        self._threads.start()

    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once. Raises as :meth:`Engine.submit`."""
        if self._queue.guard.in_child or not request.file.direct:
            return self._threads.submit(request)
        check(request)
        job = TransferJob(
            request,
            self._spec.piece_bytes,
            cancel=self._queue.cancel,
            promote=self._queue.promote,
        )
        self._queue.put(job)
        return job.transfer

    def submit_batch(self, batch: ReadBatch) -> Transfer:
        """Begin many reads; returns at once. Raises as :meth:`Engine.submit_batch`."""
        if self._queue.guard.in_child or not all(file.direct for file in batch.files):
            return super().submit_batch(batch)
        check_batch(batch)
        if not self._queue.takes_batches():
            return super().submit_batch(batch)
        job = BatchJob(batch, self._spec.piece_bytes, promote=self._queue.promote)
        self._queue.put(job)
        return job.transfer

    def unsettled(self) -> list[Transfer]:
        """Return the transfers that are not settled. See :meth:`Engine.unsettled`."""
        found = self._queue.unsettled()
        if found:
            self._queue.wake()  # whoever was interrupted may have queued one, and woken nobody
        return found + self._threads.unsettled()

    def close(self) -> None:
        """Cancel what has not started, wait for what has, stop the thread.

        Idempotent; harmless in a forked child.
        """
        self._threads.close()
        _cancel_unbegun(self._queue)
        if not self._queue.guard.in_child:
            self._queue.join()


def default_engine(depth: int | None = None, piece_bytes: int | None = None) -> Engine:
    """Create the engine that ``knobs.io_engine()`` names; by default :class:`AioEngine` if available.

    Args:
        depth: Transfers in flight at once; ``knobs.io_threads()`` if None.
        piece_bytes: The longest single transfer; the engine's own default if None.

    Raises:
        ConfigError: The named engine is not available.
    """
    wanted = knobs.io_engine()
    if wanted != "threads":
        try:
            return AioEngine(depth, piece_bytes)
        except ConfigError:
            if wanted == "aio":
                raise
    return ThreadEngine(depth, piece_bytes)


def _land(queue: _PieceQueue) -> None:
    while queue.land():
        pass


def _settle(jobs: list[TransferJob]) -> None:
    for job in jobs:
        job.settle(job.error)


def _abandon(queue: _PieceQueue) -> None:
    """Stop the thread of an engine that was dropped without ``close``."""
    defer(lambda: _cancel_unbegun(queue))


def _cancel_unbegun(queue: _PieceQueue) -> None:
    for job in queue.stop():
        job.settle(CancelledError())
