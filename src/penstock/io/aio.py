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
import platform
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Final, NamedTuple

from penstock.core import knobs
from penstock.core.errors import ConfigError
from penstock.core.locks import Lock, defer
from penstock.io.engine import Engine, EngineSpec, Request, Transfer
from penstock.io.jobs import Job, Piece, Queue, check, cut_short, failure, reached
from penstock.io.threads import ThreadEngine

_BUSY_RETRIES: Final = 1000
_BUSY_PAUSE_S: Final = 0.001


class _Numbers(NamedTuple):
    """Of the system calls, which libc does not wrap."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_NUMBERS: Final = {
    "x86_64": _Numbers(206, 207, 209, 208),
    "aarch64": _Numbers(0, 1, 2, 4),
    "riscv64": _Numbers(0, 1, 2, 4),
}
_IOCB: Final = struct.Struct("<QIIHhIQQqQII")
"""``struct iocb`` of linux/aio_abi.h: token, key, flags, opcode, priority, file, address, bytes, offset,
reserved, flags, event file."""
_EVENT: Final = struct.Struct("<QQqq")
"""``struct io_event``: token, iocb, result, second result."""
_OPCODES: Final = {"read": 0, "write": 1}
_RING_BELL: Final = 1
"""A flag: the event file is told when the piece is done."""
_POINTERS: Final = (ctypes.c_void_p, ctypes.c_void_p)
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
        # A direct transfer can only go on from a granule: what was moved past one is moved again.
        # If that gives no more, the file ends inside a granule.
        self.moved = reached(self.piece.job.file, before + count, self.piece.nbytes)
        if self.moved == self.piece.nbytes:
            return None
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
        numbers = _NUMBERS.get(platform.machine())
        if numbers is None or not hasattr(os, "eventfd"):
            where = f"{platform.system()} on {platform.machine()}"
            raise ConfigError(f"asynchronous I/O is not known for {where}")
        self._blocks = ctypes.create_string_buffer(_IOCB.size * depth)
        start = ctypes.addressof(self._blocks)
        self._pointers = [start + token * _IOCB.size for token in range(depth)]
        self._events = ctypes.create_string_buffer(_EVENT.size * depth)
        self._submit = _system_call(numbers.submit, ctypes.c_long, ctypes.c_void_p)
        self._getevents = _system_call(numbers.getevents, *[ctypes.c_long] * 2, *_POINTERS)
        self._destroy = _system_call(numbers.destroy)
        self._depth = depth
        try:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            raise _not_to_be_had("eventfd", error.errno or errnos.EIO) from error
        context = ctypes.c_ulong(0)
        setup = _system_call(numbers.setup, ctypes.c_void_p)
        if setup(depth, ctypes.addressof(context)) < 0:
            errno = ctypes.get_errno()
            os.close(self._bell)
            raise _not_to_be_had("io_setup", errno)
        self._context = context.value

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
            rest = nbytes - flight.moved, job.offset_bytes + begin, 0, _RING_BELL, self._bell
            _IOCB.pack_into(self._blocks, token * _IOCB.size, *fields, *rest)
        pointers = (ctypes.c_void_p * len(flights))(*[self._pointers[each] for each, _ in flights])
        taken = self._submit(self._context, len(flights), ctypes.addressof(pointers))
        if taken < 0:
            errno = ctypes.get_errno()
            raise OSError(errno, os.strerror(errno))
        return taken

    def wait(self) -> list[tuple[int, int | BaseException]]:
        """Sleep until something is done, or ``wake``: tokens, each with bytes or a negative errno."""
        os.eventfd_read(self._bell)
        found = self._getevents(self._context, 0, self._depth, self._events, None)
        events = memoryview(self._events)[: max(found, 0) * _EVENT.size]
        return [(token, result) for token, _, result, _ in _EVENT.iter_unpack(events)]

    def wake(self) -> None:
        """Let ``wait`` return."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Give back everything. Nothing may be under way, and nobody wait."""
        self._destroy(self._context)
        os.close(self._bell)


def _system_call(number: int, *arguments: type) -> Callable[..., int]:
    """One that libc does not wrap; its first argument is a long. It is made without the GIL."""
    call = ctypes.CDLL(None, use_errno=True)["syscall"]
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_ulong, *arguments)
    return partial(call, number)


def _not_to_be_had(call: str, errno: int) -> ConfigError:
    why = os.strerror(errno)
    if errno == errnos.EAGAIN:
        why = "all that fs.aio-max-nr allows are taken"
    return ConfigError(f"asynchronous I/O cannot be had: {call}: {why}")


class _Traffic(Queue):
    """Pieces that wait and pieces in the air.

    The thread that lands them refers to this and not to the engine, so that an engine that was
    dropped without ``close`` can be collected and stops it.
    """

    def __init__(self, ring: Ring, depth: int) -> None:
        super().__init__(Lock())
        self._ring = ring
        self._flights = dict[int, Flight]()
        self._free = list(range(depth))  # tokens
        self._thread: threading.Thread | None = None
        self._starting = Lock()

    def put(self, job: Job) -> None:
        try:
            self._ensure_thread()
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
        if os.getpid() != self.pid:
            return []
        with self._starting, self._lock:
            if self._closed:
                return []
            self._closed = True
            if self._running:
                self._ring.wake()
            else:
                self._ring.close()
            return self._line.take_unbegun()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and self._running and thread is not threading.current_thread():
            thread.join()

    def land(self) -> bool:
        """Settle what is done, and hand over what waits; False if there will be no more."""
        landed = [(token, self._flights[token], result) for token, result in self._ring.wait()]
        answers = [(token, flight, flight.land(result)) for token, flight, result in landed]
        with self._lock:
            over = [
                flight.piece.job
                for token, flight, answer in answers
                if answer is not Again and self._finish(token, flight, answer)
            ]
            leaving = [(token, flight) for token, flight, answer in answers if answer is Again]
            leaving += self._next()
        over += self._hand_over(leaving)
        _settle(over)
        with self._lock:
            if self._flights or not self._closed or any(self._line):
                return True
            self._ring.close()
            return False

    def _ensure_thread(self) -> None:
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

    def _next(self) -> list[tuple[int, Flight]]:
        leaving = []
        while self._free and (piece := self._line.take()) is not None:
            token, flight = self._free.pop(), Flight(piece)
            self._flights[token] = flight
            leaving.append((token, flight))
        return leaving

    def _finish(self, token: int, flight: Flight, error: BaseException | None) -> bool:
        del self._flights[token]
        self._free.append(token)
        return self._line.finish(flight.piece.job, error)

    def _hand_over(self, leaving: list[tuple[int, Flight]]) -> list[Job]:
        """To the kernel; the jobs that are over because it refused."""
        over = list[Job]()
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
                leaving += self._next()
        return over


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
        self._traffic = _Traffic(ring(depth), depth)
        weakref.finalize(self, _abandon, self._traffic).atexit = False

    @property
    def spec(self) -> EngineSpec:
        """What this engine is."""
        return self._spec

    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once. Raises as :meth:`Engine.submit`."""
        if os.getpid() != self._traffic.pid or not request.file.direct:
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

    def close(self) -> None:
        """Cancel what has not started, wait for what has, stop the thread.

        Idempotent; harmless in a forked child.
        """
        self._threads.close()
        _cancel_unbegun(self._traffic)
        if os.getpid() == self._traffic.pid:
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
