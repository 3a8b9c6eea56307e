"""Judge the order of every access to device memory and to the host memory that copies use.

A device runs behind the interpreter, so a program with a missing wait is often right by luck. This
checker judges order, not luck: each stream and each thread has a *vector clock*, joined where one waits
for the other (Mattern 1989; for CUDA: ``torch.cuda._sanitizer``). Two accesses to the same bytes, one of
which writes, must be ordered by what the program waits for, or it is told. So must whatever a stream does
with memory and the reuse of that memory by the stream that it was allocated on, once it is freed.

Whoever runs operators says so (``enqueued``); events, waits and allocations are told by torch's own
callbacks (``watch``). It differs from torch's sanitizer in four ways: operators of every thread count;
ranges of bytes, not addresses of tensors; host memory too; and freed memory is judged when its stream is
next given memory, whether or not it is the same.

[Note: threads]
    All threads of the program are one *actor*, because torch and the interpreter order them. Each thread
    of Penstock is an actor of its own, and learns of others' waits only where the design hands something
    over, which ``hand_over`` and ``take_over`` tell: a lock that two threads happen to have taken one
    after the other excuses nothing.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch.utils import checkpoint

from penstock.hooks import recompute

Actor: TypeAlias = tuple[object, ...]
"""``(device index, stream handle)``, or ``(thread,)``."""
Clock: TypeAlias = dict[Actor, int]
Span: TypeAlias = tuple[int, int, bool]
"""Where a range of bytes begins, how many there are, and whether they are a device's."""

PROGRAM: Final[Actor] = ("the program",)
OWN_THREADS: Final = "penstock"
"""How the names of threads begin that are actors of their own."""


@dataclass(slots=True, frozen=True)
class Access:
    """Something that was done with a range of bytes."""

    start: int
    end: int
    actor: Actor
    tick: int
    """The actor's own time."""
    writes: bool
    what: str

    def covers(self, other: Access) -> bool:
        """Whether nothing that conflicts with ``other`` does not conflict with this."""
        if other.start < self.start or other.end > self.end:
            return False
        return self.writes or (not other.writes and other.actor == self.actor)


@dataclass(slots=True)
class Block:
    """Memory between its allocation and its release."""

    stream: Actor | None
    """That it was allocated on; ``None`` for host memory."""
    nbytes: int | None = None
    """If that is known: torch does not tell it of device memory."""
    accesses: list[Access] = field(default_factory=list)
    kept: set[Actor] = field(default_factory=set)
    """Streams that torch's allocator waits for before the memory is used again."""


@dataclass(slots=True)
class Freed:
    """Memory that may still be in use when it is freed."""

    thread: int
    """Which has freed it."""
    using: list[Access]
    waited_for: Clock = field(default_factory=dict)
    """What torch's allocator waits for before the memory is used again."""


class _Blocks:
    """Blocks by where they begin."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, start: int, block: Block) -> None:
        if start not in self._blocks:
            insort(self._starts, start)
        self._blocks[start] = block

    def remove(self, start: int) -> Block | None:
        block = self._blocks.pop(start, None)
        if block is not None:
            self._starts.remove(start)
        return block

    def at(self, address: int) -> Block | None:
        """The one that an address is in; None if it was given out before this checker was told."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start = self._starts[index]
        block = self._blocks[start]
        return block if block.nbytes is None or address < start + block.nbytes else None


class Order:
    """The clocks, and what has been complained of. Thread-safe."""

    def __init__(self, recorded_at_free: Callable[[int], set[int]] | None = None) -> None:
        """Know of nothing yet.

        Args:
            recorded_at_free: Given a thread's identifier, handles of the streams on which torch's
                allocator has recorded an event since the last call because that thread has freed
                something: blocks are kept by torch's own C++ code, too, of which there is no callback.
        """
        self.checked = 0
        """How many accesses were judged."""
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
        """By the stream that it is freed to: memory that may still be in use."""
        self._complaints: dict[str, None] = {}

    @property
    def complaints(self) -> list[str]:
        """What is wrong, each once, in the order of its discovery."""
        with self._lock:
            return list(self._complaints)

    # -- what streams do --------------------------------------------------------------------------

    def enqueued(
        self, stream: Actor, reads: Iterable[Span], writes: Iterable[Span], what: str
    ) -> None:
        """The calling thread has told a stream to read and write."""
        with self._lock:
            self._begin(stream)
            where = f"{what} on {_name(stream)}"
            for spans, writing in ((reads, False), (writes, True)):
                for span in spans:
                    self._judge(span, stream, writing, where)

    def recorded(self, event: int, stream: Actor) -> None:
        """An event was recorded on a stream."""
        with self._lock:
            self._events[event] = dict(self._begin(stream))

    def waits(self, stream: Actor, event: int) -> None:
        """A stream waits for an event as it is now."""
        with self._lock:
            _join(self._begin(stream), self._events.get(event))

    # -- what threads see -------------------------------------------------------------------------

    def saw(self, event: int) -> None:
        """The calling thread knows that an event has been reached."""
        with self._lock:
            _join(self._clock(_here()), self._events.get(event))

    def saw_stream(self, stream: Actor) -> None:
        """The calling thread knows that all that a stream was told is done."""
        with self._lock:
            _join(self._clock(_here()), self._clocks.get(stream))

    def saw_device(self, device: int) -> None:
        """The calling thread knows that a device is idle."""
        with self._lock:
            for actor, clock in tuple(self._clocks.items()):
                if actor[0] == device:
                    _join(self._clock(_here()), clock)

    def accessed(self, span: Span, *, writes: bool, what: str) -> None:
        """The calling thread itself reads or writes memory, or has the system do so."""
        with self._lock:
            actor = _here()
            clock = self._clock(actor)
            clock[actor] = clock.get(actor, 0) + 1
            self._judge(span, actor, writes, f"{what} in {actor[0]}")

    def hand_over(self, key: Hashable) -> None:
        """What the calling thread knows now, whoever takes ``key`` over will know."""
        with self._lock:
            actor = _here()
            clock = self._clock(actor)
            clock[actor] = clock.get(actor, 0) + 1
            _join(self._handed.setdefault(key, {}), clock)

    def take_over(self, key: Hashable) -> None:
        """The calling thread knows what was handed over under ``key``."""
        with self._lock:
            _join(self._clock(_here()), self._handed.get(key))

    def let_go(self, start: int) -> None:
        """The calling thread will not hold a storage any more: whoever frees it comes after that."""
        self.hand_over(("storage", start))

    def forget(self, key: Hashable) -> None:
        """Nobody will take ``key`` over any more."""
        with self._lock:
            self._handed.pop(key, None)

    # -- memory -----------------------------------------------------------------------------------

    def allocated(self, start: int, stream: Actor) -> None:
        """Device memory was given out, for use on a stream: what was freed to it may be used again.

        What that stream has done so far may have been with the same memory, so any other user comes
        after it, as after an access to all of the block.
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
            self._device.add(start, Block(stream, accesses=[before]))

    def kept(self, start: int, stream: Actor) -> None:
        """When the block is freed, it is not used again before a stream has done what it then has."""
        with self._lock:
            block = self._device.at(start)
            if block is not None:
                block.kept.add(stream)

    def freed(self, start: int) -> None:
        """The calling thread is about to free the block that begins at ``start``.

        Whatever still uses it then, and is not known to be over, must be waited for by the stream that
        it was allocated on before that stream is given memory again, or by torch's allocator.
        """
        with self._lock:
            if self._busy:  # a finalizer, in the midst of something else of this thread
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
                self._note_recorded(thread)  # of what was freed before
                self._freed.setdefault(block.stream, []).append(Freed(thread, using))

    def taken(self, start: int, nbytes: int) -> None:
        """Host memory for copies was given out; of other host memory accesses are not judged."""
        with self._lock:
            self._host.add(start, Block(None, nbytes))

    def given_back(self, start: int) -> None:
        """The calling thread gives it back; it must know that nothing uses it any more."""
        with self._lock:
            block = self._host.remove(start)
            known = self._clock(_here())
            for each in () if block is None else block.accesses:
                if each.tick > known.get(each.actor, 0):
                    self._complaints[
                        f"{each.what} {'writes' if each.writes else 'reads'} host memory that is"
                        f" given back in {_here()[0]}, which has not waited for it"
                    ] = None

    # -- inside; under the lock -------------------------------------------------------------------

    def _begin(self, stream: Actor) -> Clock:
        """A stream's clock, which knows now what the calling thread knows, one tick later."""
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
        """What is known of some memory after an access, which is compared with all before."""
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
        """What a thread has freed waits for the streams of which the allocator has just taken note."""
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
    """The calling thread as an actor."""
    thread = threading.current_thread()
    return (thread.name, thread.ident) if thread.name.startswith(OWN_THREADS) else PROGRAM


def _join(clock: Clock, other: Clock | None) -> None:
    if other:
        for actor, tick in other.items():
            if tick > clock.get(actor, 0):
                clock[actor] = tick


# -- torch's callbacks --------------------------------------------------------------------------------

_watching: list[Order] = []
"""The one that is told, if any: callbacks cannot be taken back."""
_registered = False
_to_the_end: Final = ExitStack()
"""Which ends with the process: checkpoints of torch are run to their end."""


def watch(order: Order | None) -> None:
    """From now on tell ``order`` of events, waits, allocations and releases; ``None``: nobody.

    Of the whole process. Torch's callbacks are kept until its end, and cost some microseconds each.
    """
    global _registered  # noqa: PLW0603
    if not _registered and order is not None:
        _registered = True
        _register()
    _watching[:] = () if order is None else (order,)


def stream_here(handle: int) -> Actor:
    """The stream of a handle on the calling thread's device: default streams have all the same."""
    return (torch.cuda.current_device(), handle)


def _register() -> None:
    trace: Any = __import__("torch.cuda._gpu_trace", fromlist=["_"])
    torch._C._activate_gpu_trace()
    # A Python error that passes through an operator of torch while memory is freed is lost in a callback
    # ("SystemError: error return without exception set"). So nothing is ended by one in a hook: neither
    # what we run again nor, by torch that cannot be told for each (before 2.10), what torch does.
    recompute.stop_early = lambda: None
    _to_the_end.enter_context(checkpoint.set_checkpoint_early_stop(False))
    tell: dict[str, Callable[..., None]] = {
        "event_record": lambda order, event, handle: order.recorded(event, stream_here(handle)),
        "event_wait": lambda order, event, handle: order.waits(stream_here(handle), event),
        "event_synchronization": lambda order, event: order.saw(event),
        "stream_synchronization": lambda order, handle: order.saw_stream(stream_here(handle)),
        "device_synchronization": lambda order: order.saw_device(torch.cuda.current_device()),
        "memory_allocation": lambda order, start: order.allocated(
            start, stream_here(torch.cuda.current_stream().cuda_stream)
        ),
        "memory_deallocation": lambda order, start: order.freed(start),
    }
    for name, method in tell.items():
        getattr(trace, f"register_callback_for_{name}")(_teller(method))
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


def _teller(method: Callable[..., None]) -> Callable[..., None]:
    def tell(*arguments: int) -> None:
        for order in _watching:
            method(order, *arguments)

    return tell


def _wrap(kind: Any, name: str, told: Callable[..., object]) -> None:
    """Have a method tell of its calls: ``told(order, self, result, *arguments)``."""
    method = getattr(kind, name)

    def wrapper(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        for order in _watching:
            told(order, self, result, *arguments)
        return result

    setattr(kind, name, wrapper)
