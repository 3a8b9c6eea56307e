"""Checker of the order of all accesses to device memory and to the host memory used for copies.

A device runs asynchronously, so a program with a missing wait often gives right results by luck. This
checker verifies the order itself: each stream and each thread has a *vector clock*, and clocks are
joined where one waits for the other (Mattern 1989; for CUDA: ``torch.cuda._sanitizer``). Two accesses to
the same bytes, one of which is a write, must be ordered by the program's waits, or they are reported. So
must be an access by a stream and the reuse of the memory, once freed, by the stream on which it was
allocated.

The code that runs operators reports them (``enqueued``); torch's own callbacks report events, waits and
allocations (``watch``). It differs from torch's sanitizer in four ways: it covers operators of every
thread; ranges of bytes, not addresses of tensors; host memory too; and freed memory is checked at the
next allocation on its stream, even of other memory.

[Note: threads]
    All threads of the program are one *actor*, because torch and the interpreter order them. Each thread
    of Penstock is a separate actor, and learns of others' waits only through explicit hand-overs, which
    ``hand_over`` and ``take_over`` report: two threads that happen to take a lock one after the other
    do not count as ordered.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch.utils import checkpoint

from penstock.hooks import recompute

Actor: TypeAlias = tuple[object, ...]
"""Stream or thread: ``(device index, stream handle)``, or ``(thread,)``."""
Clock: TypeAlias = dict[Actor, int]
Span: TypeAlias = tuple[int, int, bool]
"""Range of bytes: address, length, and whether it is device memory."""

PROGRAM: Final[Actor] = ("the program",)
OWN_THREADS: Final = "penstock"
"""Prefix of the names of threads that are separate actors."""


@dataclass(slots=True, frozen=True)
class Access:
    """An access to a range of bytes."""

    start: int
    end: int
    actor: Actor
    tick: int
    """Time on the actor's own clock."""
    writes: bool
    what: str

    def covers(self, other: Access) -> bool:
        """Return whether everything that conflicts with ``other`` conflicts with this, too."""
        if other.start < self.start or other.end > self.end:
            return False
        return self.writes or (not other.writes and other.actor == self.actor)


@dataclass(slots=True)
class MemoryBlock:
    """Allocated memory."""

    stream: Actor | None
    """Stream on which it was allocated; ``None`` for host memory."""
    nbytes: int | None = None
    """Size, if known: torch does not report it for device memory."""
    accesses: list[Access] = field(default_factory=list)
    kept: set[Actor] = field(default_factory=set)
    """Streams for which torch's allocator waits before it reuses the memory."""


@dataclass(slots=True)
class Freed:
    """Freed memory that may still be in use."""

    thread: int
    """Thread that has freed it."""
    using: list[Access]
    waited_for: Clock = field(default_factory=dict)
    """Clock of the events for which torch's allocator waits before it reuses the memory."""


class _Blocks:
    """Blocks by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, MemoryBlock] = {}

    def add(self, start: int, block: MemoryBlock) -> None:
        if start not in self._blocks:
            insort(self._starts, start)
        self._blocks[start] = block

    def remove(self, start: int) -> MemoryBlock | None:
        block = self._blocks.pop(start, None)
        if block is not None:
            del self._starts[bisect_left(self._starts, start)]
        return block

    def at(self, address: int) -> MemoryBlock | None:
        """Return the block that contains an address; None if it was allocated before checking began."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start = self._starts[index]
        block = self._blocks[start]
        return block if block.nbytes is None or address < start + block.nbytes else None


class AccessOrder:
    """Clocks of all actors, and complaints. Thread-safe."""

    def __init__(self, recorded_at_free: Callable[[int], set[int]] | None = None) -> None:
        """Start without accesses.

        Args:
            recorded_at_free: Function of a thread's identifier that returns the handles of the streams
                on which torch's allocator has recorded an event since the last call because that thread
                freed memory: torch's C++ code also keeps blocks, for which there is no callback.
        """
        self.checked = 0
        """Number of checked accesses."""
        self._recorded_at_free = recorded_at_free
        self._lock = threading.RLock()
        self._busy = False
        self._clocks: dict[Actor, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._handed: dict[Hashable, Clock] = {}
        self._host = _Blocks()
        self._device = _Blocks()
        self._late: list[Callable[[], None]] = []
        self._freed: dict[Actor, list[Freed]] = {}
        """Freed memory that may still be in use, by the stream to which it was freed."""
        self._complaints: dict[str, None] = {}

    @property
    def complaints(self) -> list[str]:
        """Distinct complaints in the order of their discovery."""
        with self._lock:
            return list(self._complaints)

    # -- streams ----------------------------------------------------------------------------------

    def enqueued(
        self, stream: Actor, reads: Iterable[Span], writes: Iterable[Span], what: str
    ) -> None:
        """Record that the calling thread has enqueued reads and writes on a stream."""
        with self._lock:
            self._begin(stream)
            where = f"{what} on {_name(stream)}"
            for spans, writing in ((reads, False), (writes, True)):
                for span in spans:
                    self._judge(span, stream, writing, where)

    def recorded(self, event: int, stream: Actor) -> None:
        """Record that an event was recorded on a stream."""
        with self._lock:
            self._events[event] = dict(self._begin(stream))

    def waits(self, stream: Actor, event: int) -> None:
        """Record that a stream waits for the present state of an event."""
        with self._lock:
            _join(self._begin(stream), self._events.get(event))

    # -- threads ----------------------------------------------------------------------------------

    def saw(self, event: int) -> None:
        """Record that the calling thread knows that an event has been reached."""
        with self._lock:
            _join(self._clock(_here()), self._events.get(event))

    def saw_stream(self, stream: Actor) -> None:
        """Record that the calling thread knows that all work of a stream has ended."""
        with self._lock:
            _join(self._clock(_here()), self._clocks.get(stream))

    def saw_device(self, device: int) -> None:
        """Record that the calling thread knows that a device is idle."""
        with self._lock:
            for actor, clock in tuple(self._clocks.items()):
                if actor[0] == device:
                    _join(self._clock(_here()), clock)

    def accessed(self, span: Span, *, writes: bool, what: str) -> None:
        """Record that the calling thread itself, or the system on its behalf, accesses memory."""
        with self._lock:
            actor = _here()
            clock = self._clock(actor)
            clock[actor] = clock.get(actor, 0) + 1
            self._judge(span, actor, writes, f"{what} in {actor[0]}")

    def hand_over(self, key: Hashable) -> None:
        """Pass the calling thread's knowledge to any thread that takes over ``key``."""
        with self._lock:
            actor = _here()
            clock = self._clock(actor)
            clock[actor] = clock.get(actor, 0) + 1
            _join(self._handed.setdefault(key, {}), clock)

    def take_over(self, key: Hashable) -> None:
        """Add the knowledge that was handed over under ``key`` to the calling thread's."""
        with self._lock:
            _join(self._clock(_here()), self._handed.get(key))

    def released(self, start: int) -> None:
        """Record that the calling thread drops a storage, which precedes its being freed."""
        self.hand_over(("storage", start))

    def forget(self, key: Hashable) -> None:
        """Drop the knowledge handed over under ``key``."""
        with self._lock:
            self._handed.pop(key, None)

    # -- memory -----------------------------------------------------------------------------------

    def allocated(self, start: int, stream: Actor) -> None:
        """Record an allocation of device memory on a stream, which may reuse memory freed to it.

        Earlier work of the stream may have used the same memory, so other users must come after it, as
        after an access to the whole block.
        """
        with self._lock:
            clock = self._begin(stream)
            self._judge_freed(stream)
            before = Access(
                start,
                sys.maxsize,
                stream,
                clock[stream],
                True,
                f"whatever had it on {_name(stream)}",
            )
            self._device.add(start, MemoryBlock(stream, accesses=[before]))

    def kept(self, start: int, stream: Actor) -> None:
        """Record that a block, when freed, is not reused before the work of a stream has ended."""
        with self._lock:
            block = self._device.at(start)
            if block is not None:
                block.kept.add(stream)

    def freed(self, start: int) -> None:
        """Record that the calling thread is about to free the block at ``start``.

        Uses that are not known to have ended must be waited for, by the stream on which the block was
        allocated before the next allocation there, or by torch's allocator.
        """
        with self._lock:
            if self._busy:  # a finalizer during another call of this thread
                self._late.append(lambda: self.freed(start))
                return
            block = self._device.remove(start)
            if block is None or block.stream is None:
                return
            known = dict(self._clock(_here()))
            _join(known, self._handed.pop(("storage", start), None))
            for stream in block.kept:
                _join(known, self._clocks.get(stream))
            using = [each for each in block.accesses if each.tick > known.get(each.actor, 0)]
            using = [each for each in using if each.actor != block.stream]
            if using:
                thread = threading.get_ident()
                self._note_recorded(thread)  # for memory freed earlier
                self._freed.setdefault(block.stream, []).append(Freed(thread, using))

    def host_allocated(self, start: int, nbytes: int) -> None:
        """Record an allocation of host memory for copies; other host memory is not checked."""
        with self._lock:
            self._host.add(start, MemoryBlock(None, nbytes))

    def host_freed(self, start: int) -> None:
        """Record that the calling thread frees host memory, for which it must know of no more use."""
        with self._lock:
            block = self._host.remove(start)
            known = self._clock(_here())
            for each in () if block is None else block.accesses:
                if each.tick > known.get(each.actor, 0):
                    self._complaints[
                        f"{each.what} {'writes' if each.writes else 'reads'} host memory that is"
                        f" freed in {_here()[0]}, which has not waited for it"
                    ] = None

    # -- private; under the lock ------------------------------------------------------------------

    def _begin(self, stream: Actor) -> Clock:
        """Advance a stream's clock, joined with the calling thread's, and return it."""
        clock = self._clock(stream)
        _join(clock, self._clock(_here()))
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _clock(self, actor: Actor) -> Clock:
        return self._clocks.setdefault(actor, {})

    def _judge(self, span: Span, actor: Actor, writes: bool, what: str) -> None:
        start, nbytes, on_device = span
        if not nbytes:
            return
        clock = self._clock(actor)
        access = Access(start, start + nbytes, actor, clock[actor], writes, what)
        self._busy = True
        try:
            self.checked += 1
            block = (self._device if on_device else self._host).at(start)
            if block is not None:
                block.accesses = self._compared(block.accesses, access, clock)
        finally:
            self._busy = False
        while self._late:
            self._late.pop(0)()

    def _compared(self, known: list[Access], access: Access, clock: Clock) -> list[Access]:
        """Compare an access with all earlier ones; return those that must be remembered."""
        remaining = []
        for each in known:
            if (
                (access.writes or each.writes)
                and each.actor != access.actor
                and each.tick > clock.get(each.actor, 0)
                and each.start < access.end
                and access.start < each.end
            ):
                self._complaints[
                    f"{access.what} {'writes' if access.writes else 'reads'} what {each.what}"
                    f" {'writes' if each.writes else 'reads'}, and nothing orders them"
                ] = None
            if not access.covers(each):
                remaining.append(each)
        remaining.append(access)
        return remaining

    def _judge_freed(self, stream: Actor) -> None:
        for freed in self._freed.get(stream, ()):
            self._note_recorded(freed.thread)
            known = dict(self._clock(stream))
            _join(known, freed.waited_for)
            for each in freed.using:
                if each.tick > known.get(each.actor, 0):
                    self._complaints[
                        f"{each.what} {'writes' if each.writes else 'reads'} memory that was freed to"
                        f" {_name(stream)}, which does not wait for it"
                    ] = None
        self._freed.pop(stream, None)

    def _note_recorded(self, thread: int) -> None:
        """Record the streams for which the allocator now waits because of a thread's frees."""
        if self._recorded_at_free is None:
            return
        handles = self._recorded_at_free(thread)
        for (device, *_), several in self._freed.items() if handles else ():
            for freed in several:
                if freed.thread == thread:
                    for handle in handles:
                        _join(freed.waited_for, self._clocks.get((device, handle)))


def _name(stream: Actor) -> str:
    return f"stream {stream[1] or 'default'} of device {stream[0]}"


def _here() -> Actor:
    """Return the calling thread as an actor."""
    thread = threading.current_thread()
    return (thread.name, thread.ident) if thread.name.startswith(OWN_THREADS) else PROGRAM


def _join(clock: Clock, other: Clock | None) -> None:
    if other:
        for actor, tick in other.items():
            if tick > clock.get(actor, 0):
                clock[actor] = tick


# -- torch's callbacks --------------------------------------------------------------------------------

_watching: list[AccessOrder] = []
"""Active checker, if there is one: callbacks cannot be unregistered."""
_registered = False
_until_exit: Final = ExitStack()
"""Contexts that stay open until the process ends."""


def watch(order: AccessOrder | None) -> None:
    """Report events, waits, allocations and frees of the process to ``order``; ``None`` stops that.

    Torch's callbacks stay registered until the process ends, and cost some microseconds each.
    """
    global _registered  # noqa: PLW0603
    if not _registered and order is not None:
        _registered = True
        _register()
    _watching[:] = () if order is None else (order,)


def stream_here(handle: int) -> Actor:
    """Return the stream of a handle on the current device: default streams share one handle."""
    return (torch.cuda.current_device(), handle)


def _current_stream() -> Actor:
    """Return the current stream, without an object for it: this is asked at every allocation."""
    device = torch.cuda.current_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


def _register() -> None:
    trace: Any = __import__("torch.cuda._gpu_trace", fromlist=["_"])
    torch._C._activate_gpu_trace()
    # A Python error that passes through an operator of torch while memory is freed is lost in a callback
    # ("SystemError: error return without exception set"). So no hook may end a recomputation by an error:
    # neither Penstock's nor torch's, which before 2.10 cannot be told so for each checkpoint.
    recompute.stop_early = lambda: None
    _until_exit.enter_context(checkpoint.set_checkpoint_early_stop(False))
    callbacks: dict[str, Callable[..., None]] = {
        "event_record": lambda order, event, handle: order.recorded(event, stream_here(handle)),
        "event_wait": lambda order, event, handle: order.waits(stream_here(handle), event),
        "event_synchronization": lambda order, event: order.saw(event),
        "stream_synchronization": lambda order, handle: order.saw_stream(stream_here(handle)),
        "device_synchronization": lambda order: order.saw_device(torch.cuda.current_device()),
        "memory_allocation": lambda order, start: order.allocated(start, _current_stream()),
        "memory_deallocation": lambda order, start: order.freed(start),
    }
    for name, method in callbacks.items():
        getattr(trace, f"register_callback_for_{name}")(_reporter(method))
    _wrap(
        torch.cuda.Event, "query", lambda order, event, done: done and order.saw(event.cuda_event)
    )
    _wrap(
        torch.cuda.Stream,
        "query",
        lambda order, stream, idle: (
            idle and order.saw_stream((stream.device_index, stream.cuda_stream))
        ),
    )
    _wrap(
        torch.Tensor,
        "record_stream",
        lambda order, tensor, _, stream: order.kept(
            tensor.untyped_storage().data_ptr(), (stream.device_index, stream.cuda_stream)
        ),
    )


def _reporter(method: Callable[..., None]) -> Callable[..., None]:
    def report(*arguments: int) -> None:
        for order in _watching:
            method(order, *arguments)

    return report


def _wrap(kind: Any, name: str, report: Callable[..., object]) -> None:
    """Make a method report its calls to ``report(order, self, result, *arguments)``."""
    method = getattr(kind, name)

    def wrapper(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        for order in _watching:
            report(order, self, result, *arguments)
        return result

    setattr(kind, name, wrapper)
