"""Copies between ranges of host memory, behind the caller's back and in order of priority."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core import knobs
from penstock.core.errors import ClosedError
from penstock.core.locks import condition
from penstock.io.engine import Priority, Transfer


@dataclass(frozen=True, slots=True)
class CopyRange:
    """``nbytes`` from one address to another; they do not overlap."""

    target: int
    source: int
    nbytes: int


class _Job:
    """A list of ranges on its way. Guarded by the copier's lock."""

    __slots__ = ("begun", "keep_alive", "priority", "ranges", "transfer")

    def __init__(
        self, ranges: Sequence[CopyRange], keep_alive: object, priority: Priority, copier: Copier
    ) -> None:
        self.ranges = deque(ranges)
        self.keep_alive = keep_alive
        self.priority = priority
        self.begun = False
        self.transfer = Transfer(
            sum(each.nbytes for each in ranges),
            cancel=lambda _: copier._withdraw(self),
            promote=lambda _, better: copier._promote(self, better),
        )

    def cut(self, piece_bytes: int) -> CopyRange:
        """Take the next piece off."""
        first = self.ranges.popleft()
        rest = first.nbytes - piece_bytes
        if rest <= 0:
            return first
        self.ranges.appendleft(
            CopyRange(first.target + piece_bytes, first.source + piece_bytes, rest)
        )
        return CopyRange(first.target, first.source, piece_bytes)


class Copier:
    """One thread that copies, started when there is something to copy. Thread-safe.

    One, since one core reaches most of the memory's bandwidth and the others have a network to
    train. It goes piece by piece, the highest priority first, so that a demand waits for one piece
    of whatever else is going on. The interpreter's lock is not held while bytes move.
    """

    def __init__(self, name: str) -> None:
        """Make a copier; its thread will have this name."""
        self._name: Final = name
        self._piece_bytes = knobs.io_piece_bytes()
        self._wake = condition()
        self._waiting: dict[Priority, deque[_Job]] = {priority: deque() for priority in Priority}
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(
        self, ranges: Sequence[CopyRange], keep_alive: object, priority: Priority
    ) -> Transfer:
        """Begin to copy; returns at once. ``keep_alive`` is held until the transfer is settled."""
        job = _Job(ranges, keep_alive, priority, self)
        with self._wake:
            if self._stopping:
                raise ClosedError(f"{self._name} is closed; a copy was submitted after it")
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting[priority].append(job)
            self._wake.notify()
        return job.transfer

    def stop(self) -> None:
        """Let the thread end once nothing waits. Does not wait for it; idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def close(self) -> None:
        """Stop, and wait until what was submitted has been copied."""
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def _withdraw(self, job: _Job) -> bool:
        with self._wake:
            if job.begun or job not in self._waiting[job.priority]:
                return False
            self._waiting[job.priority].remove(job)
        job.keep_alive = None
        return True

    def _promote(self, job: _Job, priority: Priority) -> None:
        with self._wake:
            if priority < job.priority and job in self._waiting[job.priority]:
                self._waiting[job.priority].remove(job)
                job.priority = priority
                self._waiting[priority].append(job)

    def _work(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Copy one piece; False if there will be no more. Its frame holds no job while idle."""
        taken = self._take()
        if taken is None:
            return False
        job, piece, last = taken
        ctypes.memmove(piece.target, piece.source, piece.nbytes)
        if last:
            job.keep_alive = None
            job.transfer.settle()
        return True

    def _take(self) -> tuple[_Job, CopyRange, bool] | None:
        with self._wake:
            while (jobs := self._first()) is None:
                if self._stopping:
                    return None
                self._wake.wait()
            job = jobs[0]
            job.begun = True
            piece = job.cut(self._piece_bytes)
            if not job.ranges:
                jobs.popleft()
            return job, piece, not job.ranges

    def _first(self) -> deque[_Job] | None:
        return next((jobs for jobs in self._waiting.values() if jobs), None)
