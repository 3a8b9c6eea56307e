"""Portable engine: threads, each with one blocking ``preadv`` or ``pwritev`` at a time.

With O_DIRECT and pieces of some MiB this moves as many bytes per second as any other method. A request is
cut into pieces of equal length when it reaches the head of its queue, and every free worker takes the
next piece of the first request of the highest priority. So one large request uses all workers evenly,
and a demand overtakes a running write-behind between two pieces.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from concurrent.futures import CancelledError
from typing import Final

from penstock.core import knobs
from penstock.core.errors import ConfigError, TransferError
from penstock.core.locks import condition, defer
from penstock.io.engine import Engine, EngineSpec, File, Request, Transfer
from penstock.io.files import MAX_GRANULE_BYTES, drop_cache
from penstock.io.transfer_jobs import (
    TransferJob,
    TransferPiece,
    TransferQueue,
    check,
    failure,
    resume_point,
    short_transfer,
)

_PYBUF_WRITE: Final = 0x200
_BUSY_RETRIES: Final = 1000
_BUSY_PAUSE_S: Final = 0.001

_memory_view = ctypes.pythonapi["PyMemoryView_FromMemory"]  # not shared, as the attribute is
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Syscalls:
    """System calls that move one piece. Overridden to inject faults or to move it another way.

    Methods return the number of bytes moved, raise OSError, and are called by several threads.
    """

    def prepare(self, owner: object) -> None:
        """Prepare the thread that moves a piece; ``owner`` keeps its memory alive."""
        return

    def read(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Read up to ``nbytes`` to memory; 0 at the end of the file."""
        return os.preadv(file.fd, [_memory_view(address, nbytes, _PYBUF_WRITE)], offset_bytes)

    def write(self, file: File, address: int, nbytes: int, offset_bytes: int) -> int:
        """Write up to ``nbytes`` from memory."""
        return os.pwritev(file.fd, [_memory_view(address, nbytes, _PYBUF_WRITE)], offset_bytes)

    def drop(self, file: File, nbytes: int, offset_bytes: int, *, written: bool) -> None:
        """Drop a moved piece of a buffered file from the page cache, after writing it if necessary."""
        drop_cache(file.fd, offset_bytes, nbytes, written=written)


class _Queue(TransferQueue):
    """Requests by priority, of which workers take pieces."""

    def __init__(self, piece_bytes: int, syscalls: Syscalls, name: str) -> None:
        self._wake = condition()
        super().__init__(self._wake)
        self.piece_bytes = piece_bytes
        self._syscalls = syscalls
        self._name = name
        self._threads: list[threading.Thread] = []
        self._workers = 0  # threads that are started, or about to be
        self._idle = 0

    def put(self, job: TransferJob, max_threads: int) -> None:
        pieces = -(-job.nbytes // self.piece_bytes)
        with self._wake:
            self.append(job)
            woken = min(pieces, self._idle)
            missing = min(pieces - woken, max_threads - self._workers)
            self._workers += missing
            self._idle -= woken  # here, not when they wake: the next `put` must not count them
            self._wake.notify(woken)
        # Not under the lock: starting a thread waits for locks of the interpreter, and a thread that
        # holds one of those may be running a finalizer that waits for this lock.
        self._start_threads(missing)

    def start(self) -> None:
        """Start one worker if there is none. Raises RuntimeError."""
        with self._wake:
            if self._workers or self._closed:
                return
            self._workers = 1
        self._start_threads(1)
        if not self._workers:
            raise RuntimeError("can't start new thread")

    def stop(self) -> list[TransferJob]:
        """Let the workers finish running pieces and end; return the jobs that have not begun.

        The caller must settle those.
        """
        if self.guard.in_child:
            return []
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            return self.take_unbegun()

    def join(self) -> None:
        for thread in list(self._threads):
            if thread is not threading.current_thread():  # close() may be called by a callback
                thread.join()

    def serve(self) -> bool:
        """Move one piece; return False if there will be no more. Its frame holds no job while idle."""
        piece = self._take()
        if piece is None:
            return False
        job = piece.job
        error: BaseException | None
        try:
            error = _move(self._syscalls, piece)
        except BaseException as unexpected:  # noqa: BLE001  (waiters of the transfer get it)
            error = unexpected
        with self._wake:
            over = self.finish(job, error)
        if over:
            job.settle(job.error)
        return True

    def _start_threads(self, count: int) -> None:
        for started in range(count):
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._continue_without(count - started, error)
                return
            self._threads.append(thread)

    def _continue_without(self, count: int, error: RuntimeError) -> None:
        """Continue with fewer workers after a thread failed to start; having none is an error."""
        with self._wake:
            self._workers -= count
            stranded = [] if self._workers else self.take_unbegun()
        for job in stranded:
            job.settle(error)

    def _take(self) -> TransferPiece | None:
        with self._wake:
            while (piece := self.take()) is None:
                if self._closed:
                    return None
                self._idle += 1
                self._wake.wait()  # the thread that wakes it lowers `_idle`
            return piece


class ThreadEngine(Engine):
    """Blocking system calls in daemon threads, which start when there is work for them.

    Idle workers wait on a condition and cost nothing. Callbacks of transfers run in the workers, so
    they must be quick.
    """

    def __init__(
        self,
        threads: int | None = None,
        piece_bytes: int | None = None,
        *,
        syscalls: Syscalls | None = None,
        name: str = "penstock-io",
    ) -> None:
        """Make an engine; no thread is started yet.

        Args:
            threads: Transfers in flight at once; ``knobs.io_threads()`` if None.
            piece_bytes: The longest single transfer, a multiple of 4096; ``knobs.io_piece_bytes()``
                if None.
            syscalls: Calls that move a piece; those of the operating system if None.
            name: Beginning of its threads' names.
        """
        workers = knobs.io_threads() if threads is None else threads
        piece = knobs.io_piece_bytes() if piece_bytes is None else piece_bytes
        if workers < 1:
            raise ConfigError(f"an I/O engine cannot have {workers} threads; give it at least 1")
        if piece <= 0 or piece % MAX_GRANULE_BYTES:
            raise ConfigError(
                f"I/O pieces of {piece} bytes are not a positive multiple of {MAX_GRANULE_BYTES}"
            )
        self._spec = EngineSpec(name="threads", workers=workers, piece_bytes=piece)
        self._queue = _Queue(piece, Syscalls() if syscalls is None else syscalls, name)
        weakref.finalize(self, _abandon, self._queue).atexit = False

    @property
    def spec(self) -> EngineSpec:
        """Properties of this engine."""
        return self._spec

    def start(self) -> None:
        """Start one worker if there is none."""
        self._queue.start()

    def submit(self, request: Request) -> Transfer:
        """Begin a transfer; returns at once. Raises as :meth:`Engine.submit`."""
        if self._queue.guard.in_child:
            raise self._queue.guard.error("this I/O engine", "make one here")
        check(request)
        job = TransferJob(
            request,
            self._spec.piece_bytes,
            cancel=self._queue.cancel,
            promote=self._queue.promote,
        )
        self._queue.put(job, self._spec.workers)
        return job.transfer

    def unsettled(self) -> list[Transfer]:
        """Return the transfers that are not settled. See :meth:`Engine.unsettled`."""
        return self._queue.unsettled()

    def close(self) -> None:
        """Cancel transfers that have not started, wait for the others, stop the workers.

        Idempotent; harmless in a forked child.
        """
        _cancel_unbegun(self._queue)
        if not self._queue.guard.in_child:
            self._queue.join()


def _work(queue: _Queue) -> None:
    while queue.serve():
        pass


def _abandon(queue: _Queue) -> None:
    """Stop the workers of an engine that was dropped without ``close``."""
    defer(lambda: _cancel_unbegun(queue))


def _cancel_unbegun(queue: _Queue) -> None:
    for job in queue.stop():
        job.settle(CancelledError())


def _move(syscalls: Syscalls, piece: TransferPiece) -> TransferError | None:
    """Move one whole piece and return None, or the error."""
    job, start, nbytes = piece
    syscalls.prepare(job.keep_alive)
    call = syscalls.read if job.op == "read" else syscalls.write
    address, offset = job.address + start, job.offset_bytes + start
    moved = 0
    stuck = busy = 0
    while moved < nbytes:
        try:
            count = call(job.file, address + moved, nbytes - moved, offset + moved)
        except InterruptedError:
            continue
        except BlockingIOError as error:
            busy += 1
            if busy > _BUSY_RETRIES:
                return failure(piece, moved, error)
            time.sleep(_BUSY_PAUSE_S)
            continue
        except OSError as error:
            return failure(piece, moved, error)
        # A direct transfer can only continue at a granule: bytes moved past one are moved again.
        # If that moves no more, the file ends inside a granule.
        if moved + count >= piece.least_bytes:
            break
        before, moved = moved, resume_point(job.file, moved + count, nbytes)
        stuck = stuck + 1 if moved == before else 0
        if count == 0 or stuck > 1:
            return short_transfer(piece, moved + count)
    return _drop_cache(syscalls, piece)


def _drop_cache(syscalls: Syscalls, piece: TransferPiece) -> TransferError | None:
    job = piece.job
    if job.file.direct:
        return None
    offset = job.offset_bytes + piece.start
    try:
        syscalls.drop(job.file, piece.nbytes, offset, written=job.op == "write")
    except OSError as error:  # writing failed: the data are not on the device
        return failure(piece, 0, error)
    return None
