"""Times at which devices came to the moments of a step, found without stopping them.

[Note: device time]
    A device runs behind the interpreter, so the host's clock says when work was enqueued and not when it
    was done. Of a pass that a profile is made from, each moment (a tensor is saved, a module returns)
    is therefore marked by a timed event on the current stream, and the events are read when the pass is
    over: that is the only time at which the host waits. Until then a moment goes by a number, the time of
    the host's clock, made unique; ``times`` says what to put in its place.

    1. *Several devices.* A moment is when all devices that hold saved tensors have done what they had
       been told until then. Times of different devices cannot be compared, so at the end, when they
       are idle, each gets an event of which the host sees the end: these are the same moment on both.
    2. *Waits.* What a step waits for Penstock is no part of a profile: a budget that is full, a read, a
       copy that the compute stream comes after, codecs that are tried. Between ``wait_begins`` and
       ``wait_ends`` nothing of the program's is enqueued on the stream, so what passes there on the
       device is not the program's time, and only that is left out: a host that waits while the device
       has work to do has cost no time. So it is with Penstock's own work in hooks, which is the longer
       for a pass that is observed: on a device that has nothing to do meanwhile, most of such a pass
       would be that. A wait within another one is part of it, and so are moments within.
    3. *A host that is ahead.* After a wait in which the device has run out of work, each operator would
       begin only when the host has launched it, and the time of that launch would be added to the
       operator's, while in other passes the host is ahead of the device. So the device idles for
       another millisecond, as a part of the wait: the host gets ahead again, and what is measured is
       the operators' own time. So it is where the host is the slower of the two in every pass: then
       a step takes longer than its profile. That is the better error: a plan that takes computing for
       longer than it is moves more than it can hide.
    4. *Several streams.* Moments keep the order in which the host came to them: one whose stream was
       ahead of another's is put at the time of the one before it.
    5. *Captures.* An event that is recorded in a CUDA graph tells no time. Meanwhile no moment is marked.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from penstock.core.locks import Lock
from penstock.observe.clock import Clock
from penstock.runtime.cuda.link import CudaLink, Event, Stream

MOST_MOMENTS: Final = 400_000
"""Of a forward that never comes to a backward; older ones are forgotten, and stay the host's."""

Reached: TypeAlias = tuple[tuple[torch.device, Stream, Event], ...]
"""An event on the current stream of each device; empty: none is timed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Moment:
    """One moment; ``number`` is ``None`` where a wait ends, and ``since`` where it has begun."""

    number: int | None
    reached: Reached
    since: Reached = ()


class DeviceTimer:
    """Marks moments of a pass, and tells when devices came to them. See [Note: device time].

    Thread-safe. Only ``times`` waits.
    """

    def __init__(self, link: CudaLink, device: torch.device, clock: Clock) -> None:
        """Time ``device``, and those that ``see`` tells of; ``clock`` is the host's."""
        self._link = link
        self._devices: tuple[torch.device, ...] = (device,)
        self._clock = clock
        self._lock = Lock()
        self._moments: deque[_Moment] = deque(maxlen=MOST_MOMENTS)
        self._number = 0
        self._told = False
        self._waiting: dict[int, Reached] = {}
        """Events at which waits of threads have begun, by the thread's identifier."""

    def see(self, device: torch.device) -> None:
        """Time this device from now on, too."""
        if device not in self._devices:
            with self._lock:
                self._devices = (*self._devices, device)

    def begin(self) -> None:
        """A pass begins: forget the moments of the last one, if it is over."""
        self._waiting.clear()  # of one that an error ended
        if self._told:
            with self._lock:
                self._moments.clear()
                self._told = False

    def mark(self, at_ns: int) -> int:
        """Mark this moment of the calling thread.

        Args:
            at_ns: What the host takes it for.

        Returns:
            Its number: ``at_ns``, or a little more, for no two moments have the same.
        """
        reached = self._waiting.get(threading.get_ident(), ())
        if not reached and not self._capturing():
            reached = self._record()
        with self._lock:
            number = self._number = max(at_ns, self._number + 1)
            if reached:
                self._moments.append(_Moment(number, reached))
        return number

    def wait_begins(self) -> Reached:
        """The calling thread, or its current stream, begins to wait.

        Empty if nothing is timed, or it waits already.
        """
        thread = threading.get_ident()
        if not self._moments or thread in self._waiting or self._capturing():
            return ()
        since = self._waiting[thread] = self._record()
        return since

    def wait_ends(self, since: Reached) -> None:
        """End a wait in which nothing was enqueued; ``since`` is what ``wait_begins`` returned."""
        if since and self._waiting.pop(threading.get_ident(), ()) is since:  # else a pass has begun
            for _, stream, event in since:
                if self._link.reached(event):
                    self._link.idle(stream)
            moment = _Moment(None, self._record(), since)
            with self._lock:
                self._moments.append(moment)

    def times(self) -> Mapping[int, int]:
        """When devices came to the moments since ``begin``, in ns, by number; waits for them.

        The first moment is at its number, and waits are left out of what follows. Empty if there is no
        moment, or a CUDA graph is being captured.
        """
        if self._capturing():
            return {}
        with self._lock:
            moments = tuple(self._moments)
            self._told = True
        found: dict[int, int] = {}
        anchors = self._anchors(moments)
        offset_ns: int | None = None
        latest_ns = waited_ns = 0
        for moment in moments:
            at_ns = _at(moment.reached, anchors, self._link)
            if moment.number is None:
                waited_ns += max(0, at_ns - _at(moment.since, anchors, self._link))
                continue
            if offset_ns is None:
                latest_ns, offset_ns = moment.number, moment.number - at_ns + waited_ns
            latest_ns = max(latest_ns, offset_ns + at_ns - waited_ns)
            found[moment.number] = latest_ns
        return found

    def _capturing(self) -> bool:
        """Return whether any stream that an event would be recorded on is being captured."""
        link = self._link
        if len(self._devices) == 1:
            return link.capturing()
        return any(link.capturing(link.current_stream(each)) for each in self._devices)

    def _record(self) -> Reached:
        link = self._link
        streams = [(device, link.current_stream(device)) for device in self._devices]
        return tuple(
            (device, stream, link.record(stream, timed=True)) for device, stream in streams
        )

    def _anchors(self, moments: Iterable[_Moment]) -> dict[torch.device, tuple[Event, int]]:
        """An event of each device, and when the host saw it; every moment has been reached then."""
        link = self._link
        last = {
            (device, stream): event
            for moment in moments
            for device, stream, event in moment.reached
        }
        for event in last.values():
            link.synchronize(event)
        anchors = {}
        for device in {device for device, _ in last}:
            event = link.record(link.current_stream(device), timed=True)
            link.synchronize(event)
            anchors[device] = event, self._clock.now_ns()
        return anchors


def _at(reached: Reached, anchors: Mapping[torch.device, tuple[Event, int]], link: CudaLink) -> int:
    """When all devices had come so far, by the host's clock, in ns."""
    times = []
    for device, _, event in reached:
        anchor, seen_ns = anchors[device]
        times.append(seen_ns - link.elapsed_ns(event, anchor))
    return max(times)
