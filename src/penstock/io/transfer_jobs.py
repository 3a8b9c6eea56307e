"""Parts that engines share: queued requests by priority, their pieces, and their errors.

[Note: no starvation]
    The next piece is of the most urgent request that waits. All products of a process submit to one
    engine, so one that moves bytes all the time would keep the less urgent ones from moving at all.
    Therefore a priority whose requests ``MAX_OVERTAKES`` pieces have overtaken is given one piece. Each
    priority gets at least one of ``MAX_OVERTAKES`` + 3 pieces, and demands get all but three of them.
"""

from __future__ import annotations

import errno as errnos
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Final, NamedTuple

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

MAX_OVERTAKES: Final = 16
"""Pieces that overtake the waiting requests of a lower priority before these are given one."""


class TransferJob:
    """A queued or running request. Its variable fields are guarded by its engine's lock."""

    is_listed: ClassVar[bool] = True
    """True if its queue lists it until it is settled."""

    __slots__ = (
        *("address", "file", "nbytes", "offset_bytes", "op"),
        *(
            "error",
            "keep_alive",
            "least_bytes",
            "listed",
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
        cancel: Callable[[TransferJob], bool],
        promote: Callable[[TransferJob, Priority], None],
    ) -> None:
        """Create a job for a request.

        Args:
            request: The request.
            piece_bytes: Longest piece; the pieces of one job are about equally long.
            cancel: Called to cancel the job; returns True if it can be settled as cancelled.
            promote: Called when the job becomes more urgent.
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
        self.next_bytes = 0  # offset of the first piece that was not taken yet
        self.running = 0  # pieces in flight
        self.error: BaseException | None = None
        self.listed: set[TransferJob] | None = None
        self.transfer = Transfer(
            request.nbytes,
            cancel=lambda _: cancel(self),
            promote=lambda _, priority: promote(self, priority),
        )

    def settle(self, error: BaseException | None) -> None:
        """Settle the transfer once the memory is no longer accessed. Not under the engine's lock."""
        self.keep_alive = None
        self.transfer.settle(error)
        if self.listed is not None:
            self.listed.discard(self)


class TransferPiece(NamedTuple):
    """Part of a job that one system call moves."""

    job: TransferJob
    start: int
    """Offset in bytes from the job's beginning."""
    nbytes: int

    @property
    def least_bytes(self) -> int:
        """Bytes that must be moved: fewer than all if the file ends inside its last granule."""
        return min(self.nbytes, max(0, self.job.least_bytes - self.start))


class TransferQueue:
    """Jobs that have pieces left, by priority, with their engine's lock.

    ``cancel`` and ``promote`` take the lock; callers of the others hold it. The engine's threads refer to
    the queue and not to the engine, so that one that was dropped without ``close`` can be collected,
    which stops them.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        """Start open and empty; ``lock`` guards the queue and everything in it."""
        self.guard = fork_guard()
        self._lock = lock
        self._closed = False
        self._waiting: dict[Priority, deque[TransferJob]] = {
            priority: deque() for priority in Priority
        }
        self._overtaken = dict.fromkeys(Priority, 0)  # pieces, since one of that priority was taken
        self._listed: set[TransferJob] = set()  # those that may have begun

    def append(self, job: TransferJob) -> None:
        """Add a job behind all of its priority. Raises ClosedError."""
        if self._closed:
            raise ClosedError("the I/O engine is closed; a transfer was submitted after it")
        if job.is_listed:
            job.listed = self._listed
            self._listed.add(job)  # first: a signal may interrupt this
        self._waiting[job.priority].append(job)

    def take(self) -> TransferPiece | None:
        """Take the next piece of the first job of the priority that is next; it counts as running."""
        priority = self._next_priority()
        if priority is None:
            return None
        jobs = self._waiting[priority]
        job = jobs[0]
        start = job.next_bytes
        nbytes = min(job.piece_bytes, job.nbytes - start)
        job.next_bytes += nbytes
        job.running += 1
        if job.next_bytes == job.nbytes:
            jobs.popleft()
        return TransferPiece(job, start, nbytes)

    def _next_priority(self) -> Priority | None:
        """Return the priority of the next piece; see [Note: no starvation]."""
        waiting = [priority for priority, jobs in self._waiting.items() if jobs]
        if len(waiting) < 2:
            if waiting:
                self._overtaken[waiting[0]] = 0
            return waiting[0] if waiting else None
        starved = [each for each in waiting if self._overtaken[each] >= MAX_OVERTAKES]
        chosen = starved[0] if starved else waiting[0]
        self._overtaken[chosen] = 0
        for each in waiting:
            if each > chosen:
                self._overtaken[each] += 1
        return chosen

    def finish(self, job: TransferJob, error: BaseException | None) -> bool:
        """Note that a piece is done; return True if the job is over and must be settled by the engine.

        After a failure no further piece is begun; the first error is reported.
        """
        job.running -= 1
        if error is not None and job.error is None:
            job.error = error
            if job.next_bytes < job.nbytes:
                self._waiting[job.priority].remove(job)
                job.next_bytes = job.nbytes
        return not job.running and job.next_bytes == job.nbytes

    def cancel(self, job: TransferJob) -> bool:
        """Remove a job if nothing of it has started; return True if the caller must settle it."""
        if self.guard.in_child:
            return False
        with self._lock:
            if job.next_bytes or job not in self._waiting[job.priority]:
                return False
            self._waiting[job.priority].remove(job)
            self._listed.discard(job)
        job.keep_alive = None
        return True

    def promote(self, job: TransferJob, priority: Priority) -> None:
        """Move what has not started of a job behind all of a higher priority."""
        if self.guard.in_child:
            return
        with self._lock:
            if priority < job.priority and job in self._waiting[job.priority]:
                self._waiting[job.priority].remove(job)
                job.priority = priority
                self._waiting[priority].append(job)

    def take_unbegun(self) -> list[TransferJob]:
        """Remove and return every job of which nothing has begun."""
        unbegun = [job for job in self if not job.next_bytes]
        for job in unbegun:
            self._waiting[job.priority].remove(job)
        return unbegun

    def unsettled(self) -> list[Transfer]:
        """Do as :meth:`Engine.unsettled`."""
        with self._lock:
            for job in tuple(self._listed):
                if not job.next_bytes and job not in self._waiting[job.priority]:  # never queued
                    self._listed.discard(job)
            return [job.transfer for job in tuple(self._listed) if not job.transfer.done]

    def __iter__(self) -> Iterator[TransferJob]:
        for jobs in self._waiting.values():
            yield from jobs


def check(request: Request) -> None:
    """Raise ConfigError if a request is not aligned to its file's granule."""
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
            f" {request.file.path!r}: least_bytes={least} is only for reads, and at most nbytes"
        )


def resume_point(file: File, moved: int, nbytes: int) -> int:
    """Return the bytes after which a transfer can continue: its end, or for a direct one a granule."""
    return moved if moved == nbytes else round_down(moved, file.granule_bytes)


def failure(piece: TransferPiece, moved: int, error: OSError) -> TransferError:
    """Return the error of a piece that failed after ``moved`` bytes."""
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


def short_transfer(piece: TransferPiece, moved: int) -> ShortTransferError:
    """Return the error of a piece that moves no further although no call failed."""
    job = piece.job
    ended = "the file ends there: it was truncated, or never written that far"
    refused = "the system accepted no more bytes and gave no reason"
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
