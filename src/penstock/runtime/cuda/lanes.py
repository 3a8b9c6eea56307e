"""Lanes: copies between a device and host memory, one kind each, and what waits for their end.

A copy is *issued* when it has been enqueued on the lane's stream, and has *landed* when the device is
done with it, which the lane's thread waits for. Only then may its memory be freed.

[Note: when copies happened]
    What is recorded is device time, between two events on the lane's stream just around the copy, so
    that waiting for the network's kernels does not count as slow copying. Where it lies on the host's
    clock is known exactly for a copy whose end the thread really waited for; the ends of others are
    reckoned from the last such one by device time.

[Note: copies that are enqueued]
    A driver that has 28 copies to do on a stream (CUDA 13 on an H200) lets whoever enqueues another, or
    an event there, wait for one of them; and what waits is the program's thread, which then has the
    device idle. So no more than ``MOST_ENQUEUED`` are enqueued at a time. Others are issued, in their
    order, by the lane's thread, whenever one has landed. Until then nobody can have a stream wait for
    them: a thread that needs such a copy waits itself, while the device has many others to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import torch

from penstock.core.errors import ClosedError
from penstock.core.locks import Lock, condition
from penstock.observe.recorder import Recorder, Stage
from penstock.runtime.cuda.link import CudaLink, Event

StartThread: TypeAlias = Callable[[Callable[[], None], str], None]
"""How to run something in a thread of a name."""
Direction: TypeAlias = Literal[
    "out", "out-beyond", "in", "demand", "beyond", "fence-out", "fence-in", "digest"
]
"""From the device to the host, or to memory that is not pinned. Or to the device: ahead of time, or on
demand (on a stream of its own, so that it overtakes what waits for an event; a GPU does the other copies
of one direction in the order in which they were enqueued), or from memory that is not pinned. Or what
comes before and after I/O that needs no copy: the host waits for what uses the memory, or makes a digest.
"""
MOST_ENQUEUED: Final = 16
"""Copies of a lane that the device is told of at a time; see [Note: copies that are enqueued]."""
_INWARDS: Final = ("in", "demand", "beyond")
_OUTWARDS: Final = ("out", "out-beyond")
_ALWAYS_IN_THE_THREAD: Final = ("beyond", "out-beyond", "digest")


@dataclass(slots=True, eq=False)
class Copy:
    """One copy. ``storage`` keeps the device's side alive; the host's is the submitter's to keep."""

    storage: torch.UntypedStorage | None
    """The device's side, all of it. The lane drops it just before ``landed``; it may be dropped earlier
    if the memory cannot be reused before the copy's end."""
    nbytes: int
    after: tuple[Event, ...]
    """Events that precede the copy."""
    label: str
    tier: str
    landed: Callable[[Copy], None]
    """Called once, in the lane's thread, when nothing touches the memory any more, or with ``error``."""
    issued: Callable[[Copy], None] | None = None
    """Called once when ``end`` is known, in the thread that issues; not if that fails. May come after
    ``landed`` if the copy is quick."""
    address: int = 0
    """The host's side."""
    start: Event | None = None
    end: Event | None = None
    error: BaseException | None = None


class CopyLane:
    """A stream for copies in one direction, and a thread that waits for their ends. Thread-safe.

    Attributes:
        inline: Whether the thread that submits a copy also issues it, unless others wait to be issued.
    """

    def __init__(
        self,
        link: CudaLink,
        device: torch.device,
        direction: Direction,
        *,
        recorder: Recorder,
        inline: bool,
        start_thread: StartThread,
    ) -> None:
        """Make an idle lane.

        Args:
            link: To the device.
            device: Which.
            direction: Which way it copies.
            recorder: Gets a span for each copy.
            inline: Issue copies in the thread that submits them. Not for digests, nor for memory
                that is not pinned: to enqueue such a copy takes as long as the copy.
            start_thread: Starts the lane's thread, at the first copy.
        """
        self._link = link
        self._device = device
        self._stream = link.copy_stream(device)
        self._enqueue, self._stage = _work_of(link, direction)
        self._recorder = recorder
        self.inline = inline
        self._start_thread: StartThread | None = start_thread
        self._name = f"penstock-copy-{direction}-{device}"
        self._wake = condition()
        self._flying: deque[Copy] = deque()
        self._enqueued = 0
        """How many of the oldest ones have been issued; only where that is done inline."""
        self._stopping = False
        self._ended = threading.Event()
        self._anchor: tuple[Event, int] | None = None

    def submit(self, copy: Copy) -> None:
        """Begin a copy; returns at once. Raises ClosedError after ``close``.

        Whatever else it raises (Ctrl-C), ``landed`` is called all the same.
        """
        with self._wake:
            if self._stopping:
                raise ClosedError(f"{self._name} is closed; a copy was submitted after it")
            if self._start_thread is not None:
                self._start_thread(self._work, self._name)
                self._start_thread = None
            self._flying.append(copy)
            try:
                issued = self._issue_waiting()
            finally:
                self._wake.notify_all()  # not before: the thread needs the lock first
        for each in issued:
            _tell_issued(each)

    def await_landing(self) -> int:
        """Wait until the oldest copy that still holds its storage has landed: its bytes; 0 if none."""
        with self._wake:
            oldest = next((copy for copy in self._flying if copy.storage is not None), None)
            if oldest is None:
                return 0
            self._wake.wait_for(lambda: oldest not in self._flying)
        return oldest.nbytes

    def drain(self) -> None:
        """Wait until all that was submitted has landed."""
        with self._wake:
            self._wake.wait_for(lambda: not self._flying)

    def stop(self) -> None:
        """Let the thread end once all has landed. Does not wait; idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def close(self) -> None:
        """Stop, and wait until all has landed."""
        self.stop()
        if self._start_thread is None:
            self._ended.wait()

    def serve(self, *, wait: bool = True) -> bool:
        """See the oldest copy to its end. The lane's thread does it over and over.

        Args:
            wait: For a copy, if there is none now.

        Returns:
            False if there is none; with ``wait``, if there will be none.
        """
        copy = self._oldest(wait=wait)
        if copy is None:
            return False
        if not self.inline:
            self._issue(copy)
            _tell_issued(copy)
        watched = self._see_end(copy)
        anchor = self._anchor
        if copy.error is None and self._stage is not None:
            _guarded(partial(self._record, self._stage, watched=watched), copy)
        copy.storage = None  # first: who hears of the end may look whether the storage is dead
        _guarded(copy.landed, copy)
        if copy.error is None:
            self._reuse(copy.start, copy.end, None if anchor is None else anchor[0])
        with self._wake:
            self._flying.popleft()
            self._enqueued = max(0, self._enqueued - 1)
            issued = self._issue_waiting()
            self._wake.notify_all()
        for each in issued:
            _tell_issued(each)
        return True

    def _issue_waiting(self) -> list[Copy]:
        """Issue what may be issued inline; under the lock, so that copies end in the queue's order."""
        issued: list[Copy] = []
        while self.inline and self._enqueued < min(len(self._flying), MOST_ENQUEUED):
            copy = self._flying[self._enqueued]
            self._enqueued += 1
            self._issue(copy)
            issued.append(copy)
        return issued

    def _work(self) -> None:
        with suppress(Exception):  # if the device is lost, each copy says so
            self._link.adopt_thread(self._device)
        while self.serve():
            pass
        self._ended.set()

    def _oldest(self, *, wait: bool) -> Copy | None:
        with self._wake:
            while not self._flying:
                if self._stopping or not wait:
                    return None
                self._wake.wait()
            return self._flying[0]

    def _issue(self, copy: Copy) -> None:
        link, stream = self._link, self._stream
        storage = copy.storage
        assert storage is not None
        try:
            for event in copy.after:
                link.wait(stream, event)
            copy.start = link.record(stream, timed=True)
            self._enqueue(stream, storage, copy.address)
            copy.end = link.record(stream, timed=True)
            for event in copy.after:  # a wait is for the event as it was when that was enqueued
                link.reuse(event)
        except Exception as error:  # noqa: BLE001  (landed tells whoever waits)
            copy.error = error.with_traceback(None)  # whose frames would keep the storage alive
        except BaseException:
            copy.error = InterruptedError(f"copying {copy.label} was interrupted")
            raise
        finally:
            copy.after = ()

    def _reuse(self, *events: Event | None) -> None:
        """Reuse events of a copy that has landed.

        A thread about to wait for one may then wait for a later record, which does no harm.
        """
        kept = None if self._anchor is None else self._anchor[0]
        for event in events:
            if event is not None and event is not kept:
                self._link.reuse(event)

    def _see_end(self, copy: Copy) -> bool:
        """Wait for the copy; whether its end was seen as it came."""
        try:
            if copy.end is None:  # it has failed, but the device may have been told of it before
                copy.error = copy.error or InterruptedError(f"copying {copy.label} was interrupted")
                self._link.synchronize(self._link.record(self._stream))
                return False
            watched = not self._link.reached(copy.end)
            if watched:
                self._link.synchronize(copy.end)
        except Exception as error:  # noqa: BLE001  (the device is lost, and torch will say so, too)
            copy.error = copy.error or error.with_traceback(None)
            return False
        return watched

    def _record(self, stage: Stage, copy: Copy, *, watched: bool) -> None:
        """See [Note: when copies happened]."""
        link, end_ns = self._link, self._recorder.clock.now_ns()
        known = self._anchor
        if known is not None and not watched:
            event, at_ns = known
            end_ns = min(end_ns, at_ns + link.elapsed_ns(event, copy.end))
        start_ns = end_ns - link.elapsed_ns(copy.start, copy.end)
        if known is None or watched:
            self._anchor = (copy.end, end_ns)
        self._recorder.span(
            stage, start_ns, end_ns, nbytes=copy.nbytes, tier=copy.tier, slot=copy.label
        )


class CopyLanes:
    """The lanes of all devices, made as they are needed. Thread-safe."""

    def __init__(
        self, link: CudaLink, recorder: Recorder, *, inline: bool, start_thread: StartThread
    ) -> None:
        """Make none yet. Arguments as for :class:`CopyLane`."""
        self._link = link
        self._recorder = recorder
        self._inline = inline
        self._start_thread = start_thread
        self._lock = Lock()
        self._lanes: dict[tuple[torch.device, Direction], CopyLane] = {}

    def get(self, device: torch.device, direction: Direction) -> CopyLane:
        """The lane of a device in one direction."""
        lane = self._lanes.get((device, direction))
        if lane is None:
            with self._lock:
                lane = self._lanes.get((device, direction))
                if lane is None:
                    lane = self._lanes[device, direction] = CopyLane(
                        self._link,
                        device,
                        direction,
                        recorder=self._recorder,
                        inline=self._is_inline(direction),
                        start_thread=self._start_thread,
                    )
        return lane

    def issue_inline(self, inline: bool) -> None:
        """Set whether the submitting thread issues copies; only while none is under way."""
        self._inline = inline
        for (_, direction), lane in self._lanes.items():
            lane.inline = self._is_inline(direction)

    def _is_inline(self, direction: Direction) -> bool:
        return self._inline and direction not in _ALWAYS_IN_THE_THREAD

    def all(self) -> tuple[CopyLane, ...]:
        """Those that there are."""
        return tuple(self._lanes.values())

    def await_landing(self) -> int:
        """See :meth:`CopyLane.await_landing`, of some device's lane inwards."""
        lanes = self._lanes.copy().items()
        inwards = [lane for (_, direction), lane in lanes if direction in _INWARDS]
        return next((nbytes for lane in inwards if (nbytes := lane.await_landing())), 0)

    def drain(self) -> None:
        """Wait until all that was submitted has landed."""
        for lane in self.all():
            lane.drain()

    def stop(self) -> None:
        """Let every thread end once all has landed. Does not wait."""
        for lane in self.all():
            lane.stop()

    def close(self) -> None:
        """Stop, and wait until all has landed."""
        for lane in self.all():
            lane.close()


def _work_of(link: CudaLink, direction: Direction) -> tuple[Callable[..., None], Stage | None]:
    """Return the calls that a lane enqueues, and the stage under which it is recorded."""
    if direction in _OUTWARDS:
        return link.copy_out, Stage.COPY_OUT
    if direction in _INWARDS:
        return link.copy_in, Stage.COPY_IN
    return (link.digest if direction == "digest" else lambda *_: None), None


def start_daemon(work: Callable[[], None], name: str) -> None:
    """Run ``work`` in a daemon thread."""
    threading.Thread(target=work, name=name, daemon=True).start()


def _tell_issued(copy: Copy) -> None:
    if copy.issued is not None and copy.end is not None:
        _guarded(copy.issued, copy)


def _guarded(callback: Callable[[Copy], None], copy: Copy) -> None:
    """Call it; an error is reported and ends neither the thread nor what others wait for."""
    try:
        callback(copy)
    except BaseException as error:  # noqa: BLE001
        details = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(details))
