"""The thread that encodes and decodes, and the queues in front of it.

A piece on its way out is taken up with a free slot, encoded to it, and handed to the tier; when the tier
has written it, it has *ended*, and its slot is free. On the way back it is taken up with a free slot that
the tier reads its frame to; when that has *arrived* it is decoded, and has ended. A storage is settled
by whoever ends its last piece: the worker, or a thread of the tier's.

Why this never comes to a halt: [Note: scratch]. The lock guards all jobs and slots; codecs, tiers and
callbacks are called without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Final

from penstock.core.errors import ClosedError
from penstock.core.locks import condition
from penstock.core.process import fork_guard
from penstock.io.engine import Priority, Transfer
from penstock.observe.recorder import Recorder
from penstock.runtime.encoding.jobs import CodecJob, EncodedTicket, ReadJob, WriteJob
from penstock.runtime.encoding.scratch import ScratchSlots, Slot
from penstock.store.base import Ticket

THREAD_NAME: Final = "penstock-codec"


class CodecWorker:
    """One thread, started when there is something to do. Thread-safe; unusable in a forked child.

    One, since the other cores have a network to train. It goes piece by piece: first what somebody
    waits for, then what is prefetched, then what is spilled, so that a demand waits for one piece of
    whatever else is going on.
    """

    def __init__(
        self,
        scratch: ScratchSlots,
        recorder: Recorder,
        adopt_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Do nothing yet.

        Args:
            scratch: Belongs to this worker from now on.
            recorder: Gets spans and counters.
            adopt_thread: Called in the thread when it begins.
        """
        self._adopt_thread = adopt_thread
        self._scratch = scratch
        self._recorder = recorder
        self._guard = fork_guard()
        self._wake = condition()  # notified when there may be something to do
        self._writes: dict[WriteJob, None] = {}  # in order, those with pieces to take up
        self._reads: dict[ReadJob, None] = {}  # all that are not over
        self._live: set[CodecJob] = set()  # all that are not settled
        self._thread: threading.Thread | None = None
        self._stopping = False

    # -- for the mover ----------------------------------------------------------------------------

    def submit(self, job: WriteJob | ReadJob) -> None:
        """Begin to encode or to decode, unless it was withdrawn; returns at once. Raises ClosedError."""
        if self._guard.in_child:  # before the lock, which a thread left behind may hold
            raise self._guard.error(f"{job.ticket.label}: its codec", "open a session here")
        with self._wake:
            if self._stopping:
                raise ClosedError(f"{job.ticket.label}: codecs are closed, with their session")
            if job.over:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
                thread.start()
                self._thread = thread
            self._live.add(job)
            if isinstance(job, ReadJob):
                self._reads[job] = None
            else:
                self._writes[job] = None
            self._wake.notify_all()

    def withdraw(self, job: CodecJob, error: BaseException | None = None) -> bool:
        """Give a job up: no further piece is taken up, and it settles with ``error``, or as cancelled.

        Returns:
            Whether it has settled; else it does as soon as what is in hand has ended.
        """
        if self._guard.in_child:
            return False
        with self._wake:
            withdrawals = self._fail(job, error or CancelledError())
            ended = self._is_last(job)
        self._finish(job, withdrawals, ended)
        return ended

    def promote(self, job: ReadJob, priority: Priority) -> None:
        """Raise a read's priority, and that of its frames on their way."""
        if self._guard.in_child:
            return
        with self._wake:
            if priority >= job.priority:
                return
            job.priority = priority
            moving = tuple(job.moving)
        for transfer in moving:
            transfer.promote(priority)

    def discard(self, ticket: EncodedTicket) -> tuple[Ticket, ...]:
        """Give up what is under way with the ticket's frames; these are the caller's to discard.

        Idempotent; never waits.
        """
        if self._guard.in_child:
            return ()
        with self._wake:
            ticket.discarded = True
            jobs = [job for job in self._live if job.ticket is ticket]
            parts = tuple(ticket.parts)
        for job in jobs:
            self.withdraw(job)
        return parts

    def drain(self) -> None:
        """Wait until all that was submitted is settled."""
        with self._wake:
            self._wake.wait_for(lambda: not self._live)

    def stop(self) -> None:
        """Let the thread end once everything is settled. Does not wait for it; idempotent."""
        if self._guard.in_child:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, give the scratch memory back. Idempotent."""
        if self._guard.in_child:
            return
        self.stop()
        with self._wake:
            waiting = [job for job in self._live if not job.begun]
        for job in waiting:
            self.withdraw(job)
        if self._thread is not None:
            self._thread.join()
        self._scratch.close()

    # -- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        with suppress(Exception):  # if the device is lost, each job says so
            self._adopt_thread()
        while self._serve():
            pass

    def _serve(self) -> bool:
        """Do one thing; False if there will be no more. Its frame holds no job while idle."""
        step = self._take()
        if step is None:
            return False
        step()
        return True

    def _take(self) -> Callable[[], None] | None:
        with self._wake:
            while (step := self._next()) is None:
                if self._stopping and not self._live:
                    return None
                self._wake.wait()
            return step

    def _next(self) -> Callable[[], None] | None:
        """Return the next thing to do, if anything can be done. Under the lock."""
        for read in sorted(self._reads, key=attrgetter("priority")):
            if read.waits and (slot := self._scratch.take(encoding=False)) is not None:
                return partial(self._read, read, read.take_up(), slot, read.priority)
            if read.arrived:
                return partial(self._decode, read, *read.arrived.popleft())
        write = next(iter(self._writes), None)
        if write is None or (slot := self._scratch.take(encoding=True)) is None:
            return None
        index = write.take_up()
        if not write.waits:
            del self._writes[write]
        return partial(self._encode, write, index, slot)

    # -- out --------------------------------------------------------------------------------------

    def _encode(self, job: WriteJob, index: int, slot: Slot) -> None:
        try:
            frame_bytes = job.encode(index, slot, self._recorder)
            part = job.write(slot, frame_bytes)
        except BaseException as error:  # noqa: BLE001  (whoever waits for the job gets it)
            self._ended(job, slot, error)
            return
        with self._wake:
            job.ticket.parts.append(part)
            job.ticket.frame_bytes += frame_bytes
            failed = job.error is not None
        if failed:
            job.discard(part)
        part.written.add_done_callback(partial(self._written, job, slot))

    def _written(self, job: WriteJob, slot: Slot, transfer: Transfer) -> None:
        """A frame has been written, or not; in a thread of the tier's, or where it was cancelled."""
        self._ended(job, slot, transfer.error)

    # -- back -------------------------------------------------------------------------------------

    def _read(self, job: ReadJob, index: int, slot: Slot, priority: Priority) -> None:
        try:
            transfer = job.read(index, slot, priority)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._ended(job, slot, error)
            return
        with self._wake:
            job.moving.add(transfer)
            failed = job.error is not None
            promoted = job.priority
        if failed:
            transfer.cancel()
        elif promoted < priority:
            transfer.promote(promoted)
        transfer.add_done_callback(partial(self._arrived, job, index, slot))

    def _arrived(self, job: ReadJob, index: int, slot: Slot, transfer: Transfer) -> None:
        """A frame is there, or not; in a thread of the tier's, or where it was cancelled."""
        with self._wake:
            job.moving.discard(transfer)
            if transfer.error is None and job.error is None:
                job.arrived.append((index, slot))
                self._wake.notify_all()
                return
        self._ended(job, slot, transfer.error)

    def _decode(self, job: ReadJob, index: int, slot: Slot) -> None:
        try:
            job.decode(index, slot, self._recorder)
        except BaseException as error:  # noqa: BLE001  (as above)
            self._ended(job, slot, error)
            return
        self._ended(job, slot, None)

    # -- the end ----------------------------------------------------------------------------------

    def _ended(self, job: CodecJob, slot: Slot, error: BaseException | None) -> None:
        """A piece has ended: its slot is free, and nothing of it is pending."""
        with self._wake:
            self._scratch.release(slot)
            job.pending -= 1
            withdrawals = [] if error is None else self._fail(job, error)
            ended = self._is_last(job)
            self._wake.notify_all()
        self._finish(job, withdrawals, ended)

    def _fail(self, job: CodecJob, error: BaseException) -> list[Callable[[], object]]:
        """Take no more of a job up; what to call without the lock. Under the lock."""
        if job.over or job.error is not None:
            return []
        job.error = error.with_traceback(None)  # its frames would keep memory alive
        if isinstance(job, WriteJob):
            self._writes.pop(job, None)
        elif isinstance(job, ReadJob):
            for _, slot in job.arrived:
                self._scratch.release(slot)
            job.pending -= len(job.arrived)
            job.arrived.clear()
            self._wake.notify_all()
        return job.withdrawals()

    def _is_last(self, job: CodecJob) -> bool:
        """Return whether the caller has to settle a job. Under the lock."""
        if not job.end():
            return False
        if isinstance(job, ReadJob):
            self._reads.pop(job, None)
        return True

    def _finish(self, job: CodecJob, withdrawals: list[Callable[[], object]], ended: bool) -> None:
        """Cancel the rest of what has failed, and settle what has ended, without the lock."""
        for withdraw in withdrawals:
            withdraw()
        if not ended:
            return
        if job.error is not None:
            for withdraw in job.withdrawals():  # who has waited finds the tier empty
                withdraw()
        job.let_go()
        job.transfer.settle(job.error)
        with self._wake:
            self._live.discard(job)
            self._wake.notify_all()
