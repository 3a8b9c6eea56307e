"""The engine where Linux has its native asynchronous I/O: no thread per transfer, one for all of them.

One thread of ours sleeps until somebody asks for something or the kernel has done something; it settles
what is done, and hands over what waits. Training on two cores feels the difference: a thread that wakes
up takes a core from a team of threads that compute, and all of them wait for the one that lost it.
Nobody else hands over: Ctrl-C may interrupt the thread that asks between any two steps, and then nobody
would know whether the kernel writes to that memory.

Only a direct file is asynchronous in the kernel: a buffered one goes to a :class:`ThreadEngine`.
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
from contextlib import suppress
from typing import Final

from penstock.core import knobs
from penstock.core.errors import ClosedError, ConfigError
from penstock.core.locks import Lock, defer
from penstock.io.batch import BatchFlight, BatchJob, Swarm, check_batch
from penstock.io.context import Context, not_to_be_had
from penstock.io.engine import Batch, Engine, EngineSpec, Request, Transfer
from penstock.io.jobs import Job, Piece, Queue, check, cut_short, failure, reached
from penstock.io.threads import ThreadEngine

_BUSY_RETRIES: Final = 1000
_BUSY_PAUSE_S: Final = 0.001


_IOCB: Final = struct.Struct("<QIIHhIQQqQII")
"""``struct iocb`` of linux/aio_abi.h: token, key, flags, opcode, priority, file, address, bytes, offset,
reserved, flags, event file."""
_EVENT: Final = struct.Struct("<QQqq")
"""``struct io_event``: token, iocb, result, second result."""
_OPCODES: Final = {"read": 0, "write": 1}
_RING_BELL: Final = 1
"""A flag: the event file is told when the piece is done."""
PIECES_TOGETHER: Final = 4
"""A piece is longer than that of a thread: it costs no more to hand over, and fewer are to be settled."""


class _Again(enum.Enum):
    AGAIN = "what is left of a piece must be asked for again"


Again: Final = _Again.AGAIN


class Flight:
    """A piece on its way. In the hands of one thread at a time."""

    __slots__ = ("busy", "moved", "piece", "stuck")

    def __init__(self, piece: Piece) -> None:
        """Nothing of it is moved."""
        self.piece = piece
        self.moved = 0
        self.stuck = 0
        self.busy = 0

    def land(self, result: int | BaseException) -> BaseException | _Again | None:
        """Take the kernel's answer, bytes or a negative errno: what became of the piece."""
        if isinstance(result, BaseException):
            return result
        if result < 0:
            return self._refused(-result)
        before, count = self.moved, result
        if before + count >= self.piece.least_bytes:
            self.moved = self.piece.nbytes
            return None
        # A direct transfer can only go on from a granule: what was moved past one is moved again.
        # If that gives no more, the file ends inside a granule.
        self.moved = reached(self.piece.job.file, before + count, self.piece.nbytes)
        self.stuck = self.stuck + 1 if self.moved == before else 0
        if count == 0 or self.stuck > 1:
            return cut_short(self.piece, before + count)
        return Again

    def _refused(self, errno: int) -> BaseException | _Again:
        if errno == errnos.EINTR:
            return Again
        if errno == errnos.EAGAIN and self.busy < _BUSY_RETRIES:
            self.busy += 1
            time.sleep(_BUSY_PAUSE_S)
            return Again
        return failure(self.piece, self.moved, OSError(errno, os.strerror(errno)))


class Ring:
    """A context of the kernel's. Overridden to inject faults."""

    def __init__(self, depth: int) -> None:
        """Set it up for so many pieces at once.

        Raises:
            ConfigError: It cannot be had here; says why.
        """
        self._blocks = ctypes.create_string_buffer(_IOCB.size * depth)
        start = ctypes.addressof(self._blocks)
        self._pointers = [start + token * _IOCB.size for token in range(depth)]
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._depth = depth
        self._context = Context(depth)
        try:
            self.bell = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            self._context.close()
            raise not_to_be_had("eventfd", error.errno or errnos.EIO) from error

    def submit(self, flights: Sequence[tuple[int, Flight]]) -> int:
        """Hand over what is left of some pieces, each with its token, less than the depth.

        Returns:
            How many of them, from the first on, were taken.

        Raises:
            OSError: Not even the first.
        """
        for token, flight in flights:
            job, begin, nbytes = flight.piece
            begin += flight.moved
            fields = token, 0, 0, _OPCODES[job.op], 0, job.file.fd, job.address + begin
            rest = nbytes - flight.moved, job.offset_bytes + begin, 0, _RING_BELL, self.bell
            _IOCB.pack_into(self._blocks, token * _IOCB.size, *fields, *rest)
        pointers = (ctypes.c_void_p * len(flights))(*[self._pointers[each] for each, _ in flights])
        return self._context.submit(len(flights), ctypes.addressof(pointers))

    def wait(self) -> list[tuple[int, int | BaseException]]:
        """Sleep until something is done, or ``wake``: tokens, each with bytes or a negative errno."""
        with suppress(InterruptedError):  # a signal that Python handles: nothing need be done yet
            os.eventfd_read(self.bell)
        found = self._context.events(0, self._depth, ctypes.addressof(self._events), None)
        events = memoryview(self._events)[: found * _EVENT.size]
        return [(token, result) for token, _, result, _ in _EVENT.iter_unpack(events)]

    def wake(self) -> None:
        """Let ``wait`` return."""
        os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        """Give back everything. Nothing may be under way, and nobody wait."""
        self._context.close()
        os.close(self.bell)


class _Traffic(Queue):
    """Pieces that wait and pieces in the air.

    The thread that lands them refers to this and not to the engine, so that an engine that was
    dropped without ``close`` can be collected and stops it.
    """

    def __init__(self, ring: Ring, depth: int, piece_bytes: int) -> None:
        super().__init__(Lock())
        self._ring = ring
        self._depth = depth
        self._piece_bytes = piece_bytes
        self._swarm: Swarm | None = None  # made by the first batch
        self._flights = dict[int, Flight | BatchFlight]()
        self._free = list(range(depth))  # tokens
        self._thread: threading.Thread | None = None
        self._starting = Lock()

    def takes_batches(self) -> bool:
        """Whether the kernel does; a second context of its is made for them."""
        with self._starting:
            if self._swarm is None and isinstance(self._ring, Ring) and not self._closed:
                try:
                    self._swarm = Swarm(self._depth, self._ring.bell)
                except ConfigError:  # all that fs.aio-max-nr allows are taken
                    return False
            return self._swarm is not None

    def put(self, job: Job) -> None:
        try:
            self.start()
        except RuntimeError as error:  # none is to be had
            job.settle(error)
            return
        with self._lock:
            self._append(job)
            can_leave = bool(self._free)
        if can_leave:
            self._ring.wake()

    def stop(self) -> list[Job]:
        """Let what has begun finish; the jobs that have not begun, the caller's to settle."""
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
            return self._line.take_unbegun()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and self._running and thread is not threading.current_thread():
            thread.join()

    def land(self) -> bool:
        """Settle what is done, and hand over what waits; False if there will be no more."""
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
        with self._lock:
            if self._flights or not self._closed or any(self._line):
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
        """The slices that are over; entries to be asked for again are in line."""
        over = []
        for token, count, again in self._swarm.collect() if self._swarm is not None else ():
            flight = self._flights[token]
            assert isinstance(flight, BatchFlight)
            self._ask_again(flight.job, again)
            flight.left -= count
            if not flight.left:
                over.append((token, flight))
        return over

    def _ask_again(self, batch: BatchJob, entries: list[int]) -> None:
        for entry in entries:
            batch.hold()
            job = Job(
                batch.batch.request(entry),
                self._piece_bytes,
                withdraw=self.withdraw,
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
        # Not under the other lock: a start waits for the interpreter's own locks, and whoever holds
        # one of those may be running a finalizer that waits for that.
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
        """Whether the thread was started: the attempt may have failed, or been interrupted."""
        return self._thread is not None and self._thread.ident is not None

    def _next(self) -> list[tuple[int, Flight | BatchFlight]]:
        leaving = []
        while self._free and (piece := self._line.take()) is not None:
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
        return self._line.finish(flight.piece.job, error)

    def _hand_over(self, leaving: list[tuple[int, Flight | BatchFlight]]) -> list[Job]:
        """To the kernel; the jobs that are over because it refused."""
        over = list[Job]()
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
        self, token: int, flight: BatchFlight, over: list[Job]
    ) -> list[tuple[int, Flight | BatchFlight]]:
        """What leaves in its place, if the kernel took nothing of it."""
        assert self._swarm is not None, "a batch came before there was a context for it"
        self._ask_again(flight.job, self._swarm.submit(token, flight))
        if flight.left:
            return []
        with self._lock:
            if self._finish(token, flight, None):
                over.append(flight.job)
            return self._next()

    def _hand_over_pieces(
        self, leaving: list[tuple[int, Flight]], over: list[Job]
    ) -> list[tuple[int, Flight | BatchFlight]]:
        """What leaves in the place of those that the kernel refused."""
        following = list[tuple[int, Flight | BatchFlight]]()
        alone = False
        while leaving:
            try:
                taken = self._ring.submit(leaving[:1] if alone else leaving)
            except OSError as refusal:
                answer = leaving[0][1].land(-(refusal.errno or errnos.EIO))
            except BaseException as unexpected:  # noqa: BLE001  (whoever waits for the transfer gets it)
                if not alone:
                    alone = True  # to know whose it is
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
        ring: Callable[[int], Ring] = Ring,
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
        self._traffic = _Traffic(ring(depth), depth, piece)
        weakref.finalize(self, _abandon, self._traffic).atexit = False

    @property
    def spec(self) -> EngineSpec:
        """What this engine is."""
        return self._spec

    def start(self) -> None:
        """Have a thread ready, and one for files that are not direct."""
        self._traffic.start()
        self._threads.start()

    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once. Raises as :meth:`Engine.submit`."""
        if self._traffic.guard.in_child or not request.file.direct:
            return self._threads.submit(request)
        check(request)
        job = Job(
            request,
            self._spec.piece_bytes,
            withdraw=self._traffic.withdraw,
            promote=self._traffic.promote,
        )
        self._traffic.put(job)
        return job.transfer

    def submit_batch(self, batch: Batch) -> Transfer:
        """Begin many reads; returns at once. Raises as :meth:`Engine.submit_batch`."""
        if self._traffic.guard.in_child or not all(file.direct for file in batch.files):
            return super().submit_batch(batch)
        check_batch(batch)
        if not self._traffic.takes_batches():
            return super().submit_batch(batch)
        job = BatchJob(batch, self._spec.piece_bytes, promote=self._traffic.promote)
        self._traffic.put(job)
        return job.transfer

    def close(self) -> None:
        """Cancel what has not started, wait for what has, stop the thread.

        Idempotent; harmless in a forked child.
        """
        self._threads.close()
        _cancel_unbegun(self._traffic)
        if not self._traffic.guard.in_child:
            self._traffic.join()


def default_engine(depth: int | None = None, piece_bytes: int | None = None) -> Engine:
    """The one that ``knobs.io_engine()`` names; by default this one where it can be had.

    Args:
        depth: Transfers in flight at once; ``knobs.io_threads()`` if None.
        piece_bytes: The longest single transfer; the engine's own default if None.

    Raises:
        ConfigError: The one that is named cannot be had.
    """
    wanted = knobs.io_engine()
    if wanted != "threads":
        try:
            return AioEngine(depth, piece_bytes)
        except ConfigError:
            if wanted == "aio":
                raise
    return ThreadEngine(depth, piece_bytes)


def _land(traffic: _Traffic) -> None:
    while traffic.land():
        pass


def _settle(jobs: list[Job]) -> None:
    for job in jobs:
        job.settle(job.error)


def _abandon(traffic: _Traffic) -> None:
    """An engine was dropped without ``close``."""
    defer(lambda: _cancel_unbegun(traffic))


def _cancel_unbegun(traffic: _Traffic) -> None:
    for job in traffic.stop():
        job.settle(CancelledError())
