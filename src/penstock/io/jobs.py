"""What engines share: requests on their way, in line by priority, cut into pieces, and their errors."""

from __future__ import annotations

import errno as errnos
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from penstock.core.errors import (
    ClosedError,
    ConfigError,
    ShortTransferError,
    TransferError,
    free_space_bytes,
    transfer_error,
)
from penstock.core.process import fork_guard
from penstock.core.units import round_down, round_up
from penstock.io.engine import File, Op, Priority, Request, Transfer
from penstock.io.files import MAX_GRANULE_BYTES


class Job:
    """A request on its way. Everything but the constants is guarded by its engine's lock."""

    __slots__ = (
        *("address", "file", "nbytes", "offset_bytes", "op"),
        *(
            "error",
            "keep_alive",
            "least_bytes",
            "next_bytes",
            "piece_bytes",
            "priority",
            "running",
            "transfer",
        ),
    )

    def __init__(
        self,
        request: Request,
        piece_bytes: int,
        *,
        withdraw: Callable[[Job], bool],
        promote: Callable[[Job, Priority], None],
    ) -> None:
        """Take a request.

        Args:
            request: What to move.
            piece_bytes: The longest piece; those of one job are about equally long, none a mere rest.
            withdraw: Asked to take the job back; then it is settled as cancelled.
            promote: Told that it has become more urgent.
        """
        self.op: Op = request.op
        self.file: File = request.file
        self.offset_bytes = request.offset_bytes
        self.address = request.address
        self.nbytes = request.nbytes
        self.least_bytes = request.nbytes if request.least_bytes is None else request.least_bytes
        self.keep_alive: object = request.keep_alive
        self.priority = request.priority
        pieces = -(-request.nbytes // piece_bytes)
        self.piece_bytes = round_up(-(-request.nbytes // pieces), MAX_GRANULE_BYTES)
        self.next_bytes = 0  # where the first piece begins that nobody took yet
        self.running = 0  # pieces that are under way now
        self.error: BaseException | None = None
        self.transfer = Transfer(
            request.nbytes,
            cancel=lambda _: withdraw(self),
            promote=lambda _, priority: promote(self, priority),
        )

    def settle(self, error: BaseException | None) -> None:
        """Nothing touches the memory any more. Not under the engine's lock."""
        self.keep_alive = None
        self.transfer.settle(error)


class Piece(NamedTuple):
    """What one system call moves."""

    job: Job
    start: int
    """Where it begins, in bytes from the job's own beginning."""
    nbytes: int

    @property
    def least_bytes(self) -> int:
        """How much of it must be moved: less where the file ends inside its last granule."""
        return min(self.nbytes, max(0, self.job.least_bytes - self.start))


class Line:
    """Jobs that have pieces left, by priority. Not thread-safe: its engine's lock guards it."""

    def __init__(self) -> None:
        """Nothing waits."""
        self._waiting: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}

    def append(self, job: Job) -> None:
        """Behind all of its priority."""
        self._waiting[job.priority].append(job)

    def take(self) -> Piece | None:
        """The next piece of the first job of the highest priority; it is running from now on."""
        for jobs in self._waiting.values():
            if not jobs:
                continue
            job = jobs[0]
            start = job.next_bytes
            nbytes = min(job.piece_bytes, job.nbytes - start)
            job.next_bytes += nbytes
            job.running += 1
            if job.next_bytes == job.nbytes:
                jobs.popleft()
            return Piece(job, start, nbytes)
        return None

    def finish(self, job: Job, error: BaseException | None) -> bool:
        """A piece is done. True: the job is over, and its engine's to settle.

        After a failure no piece is begun; the first one is told.
        """
        job.running -= 1
        if error is not None and job.error is None:
            job.error = error
            if job.next_bytes < job.nbytes:
                self._waiting[job.priority].remove(job)
                job.next_bytes = job.nbytes
        return not job.running and job.next_bytes == job.nbytes

    def withdraw(self, job: Job) -> bool:
        """Take a job out, if nothing of it has begun."""
        if job.next_bytes or job not in self._waiting[job.priority]:
            return False
        self._waiting[job.priority].remove(job)
        return True

    def promote(self, job: Job, priority: Priority) -> None:
        """Behind all of a higher priority, if the job has pieces left."""
        if priority < job.priority and job in self._waiting[job.priority]:
            self._waiting[job.priority].remove(job)
            job.priority = priority
            self._waiting[priority].append(job)

    def take_unbegun(self) -> list[Job]:
        """Take out every job of which nothing has begun."""
        unbegun = [job for job in self if not job.next_bytes]
        for job in unbegun:
            self._waiting[job.priority].remove(job)
        return unbegun

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._waiting.values():
            yield from jobs


class Queue:
    """A line, and whose turn it is to touch it. What an engine's threads refer to in its stead."""

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        """Open, with nothing in line.

        Args:
            lock: What guards the line and everything in it.
        """
        self.guard = fork_guard()
        self._lock = lock
        self._line = Line()
        self._closed = False

    def withdraw(self, job: Job) -> bool:
        """Take a job back if nothing of it has started. True: it is the caller's to settle."""
        if self.guard.in_child:
            return False
        with self._lock:
            if not self._line.withdraw(job):
                return False
        job.keep_alive = None
        return True

    def promote(self, job: Job, priority: Priority) -> None:
        """Raise the priority of what has not started of a job."""
        if self.guard.in_child:
            return
        with self._lock:
            self._line.promote(job, priority)

    def _append(self, job: Job) -> None:
        """Under the lock."""
        if self._closed:
            raise ClosedError("the I/O engine is closed; a transfer was submitted after it")
        self._line.append(job)


def check(request: Request) -> None:
    """Raise ConfigError unless the file can be asked for this."""
    granule = request.file.granule_bytes
    for name in ("offset_bytes", "address", "nbytes"):
        value = getattr(request, name)
        if value < 0 or value % granule or (value == 0 and name != "offset_bytes"):
            raise ConfigError(
                f"{request.op} of {request.nbytes} bytes at offset {request.offset_bytes} of"
                f" {request.file.path!r} to or from address {request.address:#x}: {name} must be a"
                f" positive multiple of the file's granule of {granule} bytes"
            )
    least = request.least_bytes
    if least is not None and (request.op != "read" or not 0 <= least <= request.nbytes):
        raise ConfigError(
            f"{request.op} of {request.nbytes} bytes at offset {request.offset_bytes} of"
            f" {request.file.path!r}: least_bytes={least} is of a read, and not more than all"
        )


def reached(file: File, moved: int, nbytes: int) -> int:
    """From where a transfer can go on: a direct one only from a granule, or it is whole."""
    return moved if moved == nbytes else round_down(moved, file.granule_bytes)


def failure(piece: Piece, moved: int, error: OSError) -> TransferError:
    """Of a piece of which so many bytes had been moved."""
    job, code, said = piece.job, error.errno or errnos.EIO, error.strerror or ""
    found = transfer_error(
        errno=code,
        op=job.op,
        path=job.file.path,
        offset_bytes=job.offset_bytes + piece.start,
        nbytes=piece.nbytes,
        moved_bytes=moved,
        advice="" if said == os.strerror(code) else said,
    )
    found.__cause__ = error.with_traceback(None)  # frames would keep the job and its memory
    return found


def cut_short(piece: Piece, moved: int) -> ShortTransferError:
    """Of a piece that goes no further, though no call failed."""
    job = piece.job
    ended = "the file ends there: it was truncated, or never written so far"
    refused = "the system took no more bytes and named no reason"
    return ShortTransferError(
        errno=errnos.ENODATA if job.op == "read" else errnos.EIO,
        op=job.op,
        path=job.file.path,
        offset_bytes=job.offset_bytes + piece.start,
        nbytes=piece.nbytes,
        moved_bytes=moved,
        free_bytes=free_space_bytes(job.file.path),
        advice=ended if job.op == "read" else refused,
    )
