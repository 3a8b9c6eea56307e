"""Encoded frames on a tier: memory is cut into pieces, and each piece is written as one frame.

A piece on its way out takes a free slot, is encoded, and its frame is handed to the tier; when that is
written, the piece has *ended* and its slot is free. On the way back it takes a free slot that its frame
is read to; when the frame has *arrived* it is decoded, and the piece has ended. The thread that ends the
last piece settles the whole: the worker, or a thread of the tier's.

How a piece is encoded, and where a frame lies, is up to a :class:`FrameCoder`. Frames end in any order,
and a slow write must not delay a read, so a ``TransferWindow`` does not do.

[Note: scratch]
    Encoding makes room, so it must not need any: its memory is taken from the device budget once, when
    the stage is opened. Most of it is *slots*, each as long as the longest frame of a piece. The rest is
    what codecs may allocate while they work; piece sizes are chosen to keep to it.

    A slot is free, or in the worker's hand, or with a tier that writes or reads it, or it holds a frame
    that has arrived. There is one worker, and it never waits while there is something that it can do:

    1. A frame that has arrived can be decoded at any time; that takes no slot, and sets one free.
    2. A transfer ends by itself: its callback takes the worker's lock for a moment and nothing else, and
       sets the slot free or makes it case 1.
    3. So when the worker waits, and not all slots are free, each of the others is with a tier, and
       the end of a transfer will wake it. If all are free, whatever there is to do can begin.

    Encoding has half of the slots at most. So however slowly a tier writes, the other half serves reads,
    one piece after the other, and a read never waits for a write. Reads may take all: they are as many
    as there are targets, which the budget bounds, so encoding gets its turn.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Final, Protocol

from penstock.core.errors import BudgetError, ClosedError, CodecError, ConfigError
from penstock.core.locks import condition, defer
from penstock.core.process import ForkGuard, fork_guard
from penstock.core.units import round_down
from penstock.io.engine import Priority, Transfer
from penstock.io.mapping import PAGE_BYTES
from penstock.observe.recorder import Recorder, Stage
from penstock.store.account import Account
from penstock.store.arena import Arena
from penstock.store.base import Tier, Window, check_readable

THREAD_NAME: Final = "penstock-codec"
SCRATCH: Final = "scratch"
"""Owner, in the device budget, of the memory that encoding works in."""


@dataclass(slots=True, eq=False)
class Frames:
    """A claim on the frames of some memory. Guarded by the worker's lock; for reading only."""

    label: str
    """Name of the memory in errors and traces."""
    nbytes: int
    """Length of the memory."""
    window: Window
    """Place of the memory: memory for the way back has the same place in a cache line."""
    codec: str
    dtype: str
    """Type of the elements, by torch's name."""
    piece_bytes: int
    """Length of the memory in each frame but the last; whole pages."""
    device: Any
    written: Transfer = field(init=False)
    """Settled once all frames are written; or with the first error, when nothing of it moves any more."""
    parts: list[Any] = field(default_factory=list)
    """Tickets of the frames, in order; grows until it is written."""
    frame_bytes: int = 0
    """Length of the frames together; grows until it is written."""
    raw: set[int] = field(default_factory=set)
    """Pieces on a device that were not encoded, for lack of memory."""
    discarded: bool = False

    @property
    def pieces(self) -> int:
        """Number of frames when all are written."""
        return -(-self.nbytes // self.piece_bytes)

    def range_of(self, index: int) -> tuple[int, int]:
        """Return a piece's offset in the memory, and its length."""
        start = index * self.piece_bytes
        return start, min(self.piece_bytes, self.nbytes - start)


@dataclass(slots=True, eq=False)
class Slot:
    """A claim on the memory of one frame."""

    memory: Any = None
    """Host memory, ``numpy.uint8``, at a multiple of the system's page."""
    held: Any = None
    """Memory that the coder has allocated for the frame."""
    is_write: bool = False


class FrameScratch:
    """Slots, and the memory that codecs work in, charged to a budget. Guarded by the worker's lock.

    Attributes:
        slot_bytes: Length of a slot.
        working_bytes: What a codec may allocate.
        frames: Account of the slots' memory, all of which is charged to the budget already.
    """

    def __init__(self, nbytes: int, budget: Account, *, slots: int, working: int) -> None:
        """Charge ``nbytes``, rounded down, to ``budget``.

        Args:
            nbytes: Size of everything.
            budget: The device's.
            slots: Number of slots; half of them at most are for encoding.
            working: Size of what codecs may allocate, in slots.

        Raises:
            ConfigError: A slot would not hold a piece of one page, and its header.
            BudgetError: The budget has not so much left.
        """
        parts = slots + working
        least = parts * 2 * PAGE_BYTES
        if nbytes < least:
            raise ConfigError(
                f"scratch memory of {nbytes} bytes is too small to encode in; give at least {least}"
                " bytes"
            )
        self.slot_bytes = round_down(nbytes // parts, PAGE_BYTES)
        self.working_bytes = working * self.slot_bytes
        self.frames = Account(slots * self.slot_bytes, name="frames")
        self._free = [Slot() for _ in range(slots)]
        self._writes = 0
        self._most_writes = slots // 2
        charged = parts * self.slot_bytes
        if not budget.try_take(charged, SCRATCH):
            raise _refused(nbytes, budget)
        self._give_back = weakref.finalize(self, defer, _give, budget, charged, fork_guard())
        self._give_back.atexit = False

    def map_slots(self) -> None:
        """Give the slots memory of the host, which stays mapped until the last slot is gone."""
        arena = Arena(self.frames.limit_bytes, account=self.frames, owner=SCRATCH)
        block = arena.allocate(self.frames.limit_bytes)
        assert block is not None, "the account of the slots is as large as they are"
        memory, size = block.lend(0, block.nbytes), self.slot_bytes
        arena.close()
        for index, slot in enumerate(self._free):
            slot.memory = memory[index * size : (index + 1) * size]

    def piece_bytes(self, fits: Callable[[int], bool]) -> int:
        """Return the greatest length of a piece that ``fits``, in whole pages; 0 if there is none."""
        piece = self.slot_bytes - PAGE_BYTES
        while piece and not fits(piece):
            piece = round_down(piece * 3 // 4, PAGE_BYTES)
        return piece

    def take(self, *, is_write: bool) -> Slot | None:
        """Take a free slot; return None if there is none for this use."""
        if not self._free or (is_write and self._writes == self._most_writes):
            return None
        slot = self._free.pop()
        slot.is_write = is_write
        self._writes += is_write
        return slot

    def release(self, slot: Slot) -> None:
        """Take a slot back; nothing touches its memory any more."""
        slot.held = None
        self._writes -= slot.is_write
        self._free.append(slot)

    def close(self) -> None:
        """Free all of it. Every slot is free. Idempotent."""
        self._free.clear()
        self._give_back()


def _give(budget: Account, nbytes: int, guard: ForkGuard) -> None:
    if not guard.in_child:  # in a forked child the lock's holder did not come along
        budget.free(nbytes, SCRATCH)


def _refused(nbytes: int, budget: Account) -> BudgetError:
    least = budget.used_bytes + nbytes
    return BudgetError(
        f"the {budget.name} budget of {budget.limit_bytes} bytes has {budget.free_bytes} left, and"
        f" encoding needs {nbytes} to work in; give at least {least} bytes, or switch codecs off",
        slot="scratch memory of codecs",
        limit_bytes=budget.limit_bytes,
        least_bytes=least,
    )


class FrameJob:
    """Some memory on its way out or back, which it holds to its end. Guarded by the worker's lock."""

    def __init__(
        self,
        frames: Frames,
        tier: Tier,
        memory: Any,
        transfer: Transfer,
        priority: Priority | None = None,
    ) -> None:
        """Begin nothing yet; ``priority`` is that of a read, None for a write."""
        self.frames = frames
        self.tier = tier
        self.memory = memory
        """Source or target."""
        self.transfer = transfer
        self.is_read = priority is not None
        self.priority = Priority.WRITE_BEHIND if priority is None else priority
        self.begun = 0
        """Pieces that were taken up."""
        self.pending = 0
        """Those of them that have not ended; each has a slot."""
        self.moving: set[Transfer] = set()
        """Reads of frames under way."""
        self.arrived: deque[tuple[int, Slot]] = deque()
        """Frames to decode: number of the piece, and place."""
        self.error: BaseException | None = None
        """The first one. From then on no piece is taken up."""
        self.over = False
        """True once a thread settles it."""

    @property
    def waits(self) -> bool:
        """True if there are pieces to take up."""
        return self.error is None and self.begun < self.frames.pieces

    def take_up(self) -> int:
        """Return the number of the next piece, which is pending from now on."""
        self.begun += 1
        self.pending += 1
        return self.begun - 1

    def free_memory(self) -> None:
        """Drop the source or the target: nothing touches it any more."""
        self.memory = None


class FrameCoder(Protocol):
    """Encodes, moves and decodes single frames, for one kind of device.

    Called by the worker without its lock, in its thread; ``discard_frame`` in any.
    """

    def encode_piece(self, job: FrameJob, index: int, slot: Slot) -> int:
        """Encode a piece of ``job.memory`` to a frame in ``slot``; return its length."""

    def write_frame(self, job: FrameJob, slot: Slot, frame_bytes: int) -> Any:
        """Begin to write a frame; return its ticket, of which ``written`` is used here."""

    def read_frame(self, job: FrameJob, index: int, slot: Slot, priority: Priority) -> Transfer:
        """Begin to read frame ``index`` to ``slot``."""

    def decode_piece(self, job: FrameJob, index: int, slot: Slot) -> None:
        """Decode the frame in ``slot`` to its place in ``job.memory``. Raises CodecError."""

    def discard_frame(self, tier: Tier, part: Any) -> None:
        """Discard a frame, or cancel its write. Never waits."""


class FrameWorker:
    """One thread, started when there is something to do. Thread-safe; unusable in a forked child.

    One, since the other cores have a network to train. It goes piece by piece: first what somebody
    waits for, then what is prefetched, then what is spilled, so that a demand waits for one piece of
    whatever else is going on.
    """

    def __init__(
        self,
        coder: FrameCoder,
        scratch: FrameScratch,
        recorder: Recorder,
        adopt_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """Do nothing yet.

        Args:
            coder: Works on single frames.
            scratch: Closed with the worker.
            recorder: Gets a span for each piece, and counters.
            adopt_thread: Called in the thread when it begins.
        """
        self._coder = coder
        self._adopt_thread = adopt_thread
        self._scratch = scratch
        self._recorder = recorder
        self._guard = fork_guard()
        self._wake = condition()  # notified when there may be something to do
        self._writes: dict[FrameJob, None] = {}  # in order, those with pieces to take up
        self._reads: dict[FrameJob, None] = {}  # all that are not over
        self._live: set[FrameJob] = set()  # all that are not settled
        self._thread: threading.Thread | None = None
        self._stopping = False

    # -- for the stage ----------------------------------------------------------------------------

    def write_job(self, frames: Frames, tier: Tier, source: Any) -> FrameJob:
        """Return the job, to be submitted, that writes ``frames``; set ``frames.written``."""
        frames.written = Transfer(frames.nbytes, cancel=lambda _: self.withdraw(job))
        job = FrameJob(frames, tier, source, frames.written)
        return job

    def read(self, frames: Frames, tier: Tier, target: Any, priority: Priority) -> Transfer:
        """Begin to read and to decode; returns at once. Raises ConfigError or ClosedError."""
        check_readable(frames, tier.spec)
        transfer = Transfer(
            frames.nbytes,
            cancel=lambda _: self.withdraw(job),
            promote=lambda _, better: self.promote(job, better),
        )
        job = FrameJob(frames, tier, target, transfer, priority)
        self.submit(job)
        return transfer

    def submit(self, job: FrameJob) -> None:
        """Begin to encode or to decode, unless it was withdrawn; returns at once. Raises ClosedError."""
        if self._guard.in_child:  # before the lock, which a thread left behind may hold
            raise self._guard.error(f"{job.frames.label}: its codec", "open a session here")
        with self._wake:
            if self._stopping:
                raise ClosedError(f"{job.frames.label}: codecs are closed, with their session")
            if job.over:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
                thread.start()
                self._thread = thread
            self._live.add(job)
            (self._reads if job.is_read else self._writes)[job] = None
            self._wake.notify_all()

    def withdraw(self, job: FrameJob, error: BaseException | None = None) -> bool:
        """Give a job up: no further piece is taken up, and it settles with ``error``, or as cancelled.

        Returns:
            True if it has settled; else it does as soon as what is in hand has ended.
        """
        if self._guard.in_child:
            return False
        with self._wake:
            withdrawals = self._fail(job, error or CancelledError())
            ended = self._is_last(job)
        self._finish(job, withdrawals, ended)
        return ended

    def promote(self, job: FrameJob, priority: Priority) -> None:
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

    def discard(self, tier: Tier, frames: Frames) -> None:
        """Discard the frames; what is under way with them ends as cancelled. Idempotent; never waits."""
        if self._guard.in_child:
            return
        with self._wake:
            frames.discarded = True
            jobs = [job for job in self._live if job.frames is frames]
            parts = tuple(frames.parts)
        for job in jobs:
            self.withdraw(job)
        for part in parts:
            self._coder.discard_frame(tier, part)

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
        """Cancel what has not begun, wait for the rest, free the scratch memory. Idempotent."""
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
        """Do one thing; return False if there will be no more. Its frame holds no job while idle."""
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
            if read.waits and (slot := self._scratch.take(is_write=False)) is not None:
                return partial(self._read, read, read.take_up(), slot, read.priority)
            if read.arrived:
                return partial(self._decode, read, *read.arrived.popleft())
        write = next(iter(self._writes), None)
        if write is None or (slot := self._scratch.take(is_write=True)) is None:
            return None
        index = write.take_up()
        if not write.waits:
            del self._writes[write]
        return partial(self._encode, write, index, slot)

    def _encode(self, job: FrameJob, index: int, slot: Slot) -> None:
        frames = job.frames
        try:
            start_ns = self._recorder.clock.now_ns()
            frame_bytes = self._coder.encode_piece(job, index, slot)
            source_bytes = self._report(Stage.ENCODE, job, index, start_ns)
            self._recorder.count(f"encoded.source_bytes.{frames.codec}", source_bytes)
            self._recorder.count(f"encoded.frame_bytes.{frames.codec}", frame_bytes)
            part = self._coder.write_frame(job, slot, frame_bytes)
        except BaseException as error:  # noqa: BLE001  (whoever waits for the job gets it)
            self._ended(job, slot, error)
            return
        with self._wake:
            frames.parts.append(part)
            frames.frame_bytes += frame_bytes
            failed = job.error is not None
        if failed:
            self._coder.discard_frame(job.tier, part)
        part.written.add_done_callback(partial(self._written, job, slot))

    def _written(self, job: FrameJob, slot: Slot, transfer: Transfer) -> None:
        """A frame has been written, or not; in a thread of the tier's, or where it was cancelled."""
        self._ended(job, slot, transfer.error)

    def _read(self, job: FrameJob, index: int, slot: Slot, priority: Priority) -> None:
        try:
            transfer = self._coder.read_frame(job, index, slot, priority)
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

    def _arrived(self, job: FrameJob, index: int, slot: Slot, transfer: Transfer) -> None:
        """A frame is there, or not; in a thread of the tier's, or where it was cancelled."""
        with self._wake:
            job.moving.discard(transfer)
            if transfer.error is None and job.error is None:
                job.arrived.append((index, slot))
                self._wake.notify_all()
                return
        self._ended(job, slot, transfer.error)

    def _decode(self, job: FrameJob, index: int, slot: Slot) -> None:
        start_ns = self._recorder.clock.now_ns()
        found: BaseException | None = None
        try:
            self._coder.decode_piece(job, index, slot)
            self._report(Stage.DECODE, job, index, start_ns)
        except CodecError as error:
            found = CodecError(  # a new one: the frames of the first hold the slot
                f"{job.frames.label}: piece {index} of {job.frames.pieces}, as read from tier"
                f" {job.tier.spec.name} ({job.tier.spec.where}), does not decode: {error}; the device"
                " or its memory is faulty, stop using it"
            )
        except BaseException as error:  # noqa: BLE001  (as above)
            found = error
        self._ended(job, slot, found)

    def _report(self, stage: Stage, job: FrameJob, index: int, start_ns: int) -> int:
        """Record a piece, which ends now; return its length."""
        now_ns, (_, nbytes) = self._recorder.clock.now_ns(), job.frames.range_of(index)
        tier, slot = job.tier.spec.name, job.frames.label
        self._recorder.span(stage, start_ns, now_ns, nbytes=nbytes, tier=tier, slot=slot)
        return nbytes

    # -- the end ----------------------------------------------------------------------------------

    def _ended(self, job: FrameJob, slot: Slot, error: BaseException | None) -> None:
        """A piece has ended: its slot is free, and nothing of it is pending."""
        with self._wake:
            self._scratch.release(slot)
            job.pending -= 1
            withdrawals = [] if error is None else self._fail(job, error)
            ended = self._is_last(job)
            self._wake.notify_all()
        self._finish(job, withdrawals, ended)

    def _fail(self, job: FrameJob, error: BaseException) -> list[Callable[[], object]]:
        """Take no more of a job up; return what to call without the lock. Under the lock."""
        if job.over or job.error is not None:
            return []
        job.error = error.with_traceback(None)  # its frames would keep memory alive
        self._writes.pop(job, None)
        for _, slot in job.arrived:
            self._scratch.release(slot)
        job.pending -= len(job.arrived)
        job.arrived.clear()
        self._wake.notify_all()
        return self._withdrawals(job)

    def _withdrawals(self, job: FrameJob) -> list[Callable[[], object]]:
        """Return what to call, without the lock, when a job has failed and again when it has ended."""
        if job.is_read:
            return [transfer.cancel for transfer in job.moving]
        return [partial(self._coder.discard_frame, job.tier, part) for part in job.frames.parts]

    def _is_last(self, job: FrameJob) -> bool:
        """Return True if the caller settles a job: nothing is pending, or will be. Under the lock."""
        if job.over or job.pending or job.waits:
            return False
        job.over = True
        self._reads.pop(job, None)
        return True

    def _finish(self, job: FrameJob, withdrawals: list[Callable[[], object]], ended: bool) -> None:
        """Cancel the rest of what has failed, and settle what has ended, without the lock."""
        for withdraw in withdrawals:
            withdraw()
        if not ended:
            return
        if job.error is not None:
            for withdraw in self._withdrawals(job):  # whoever has waited finds the tier empty
                withdraw()
        job.free_memory()
        job.transfer.settle(job.error)
        with self._wake:
            self._live.discard(job)
            self._wake.notify_all()
