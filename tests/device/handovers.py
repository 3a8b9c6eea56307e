"""Where Penstock's threads hand work and memory to each other, for the order checker.

Each entry is a promise of the design: whoever comes after it knows what the other knew. Nothing else
joins the clocks of two threads (see ``[Note: threads]`` in ``penstock.testing.access_order``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, thread
from functools import partial, wraps
from typing import Any

import numpy as np
import torch

from penstock import staging
from penstock.checkpoint import Saving
from penstock.io.engine import Transfer
from penstock.optim import gradients as gradients_module
from penstock.optim.holds import WeightHolds
from penstock.optim.overlap import Overlap
from penstock.optim.params import Param
from penstock.optim.pipeline import RecordBuffer, TilePipeline
from penstock.optim.update import UpdatePass
from penstock.runtime.cuda.direct import DirectInbound, DirectMover, DirectOutbound
from penstock.runtime.cuda.inbound import Inbound
from penstock.runtime.cuda.lanes import CopyLane
from penstock.runtime.cuda.mover import CudaMover
from penstock.runtime.cuda.pinned import Slab
from penstock.runtime.cuda.tickets import Fill
from penstock.staging import CopyStep, Staging
from penstock.store.arena import Arena
from penstock.store.base import Tier
from penstock.store.frames import FrameJob, FrameScratch, FrameWorker
from penstock.store.pool import Block
from penstock.testing.access_order import AccessOrder, Span
from penstock.weights.access import WeightKeeper
from penstock.weights.device import DeviceMemory
from penstock.weights.eviction import WeightEviction
from penstock.weights.stays import Stay, WeightTable

try:
    import emulator
except ImportError:  # on a GPU, whose order is observed: it serves all threads alike
    emulator = None

_order: AccessOrder | None = None


def use(order: AccessOrder | None) -> None:
    """From now on tell ``order``."""
    global _order  # noqa: PLW0603
    _order = order
    staging.free_idle()  # what one checker was told of, the next one was not


def install() -> None:
    """Wrap the places; for the whole process."""
    threads()
    futures()
    transfers()
    lanes()
    fills()
    slabs()
    arenas()
    encoding()
    tiers()
    direct()
    gradients()
    records()
    pieces()
    savings()
    weights()


def _around(kind: Any, name: str, before: Callable[..., None] | None, after: Any = None) -> None:
    """Wrap a method: ``before(order, self, *arguments)``, ``after(order, result, self, *arguments)``."""
    method = getattr(kind, name)

    @wraps(method)
    def wrapper(self: Any, *arguments: Any, **named: Any) -> Any:
        if _order is not None and before is not None:
            before(_order, self, *arguments)
        result = method(self, *arguments, **named)
        if _order is not None and after is not None:
            after(_order, result, self, *arguments)
        return result

    setattr(kind, name, wrapper)


def _key(what: object) -> tuple[str, int]:
    return type(what).__name__, id(what)


def threads() -> None:
    """A thread knows what its starter knew; who joins it knows what it knew."""
    _around(threading.Thread, "start", lambda order, self: order.hand_over(_key(self)))
    _around(
        threading.Thread,
        "run",
        lambda order, self: order.take_over(_key(self)),
        lambda order, _, self: order.hand_over(("ended", id(self))),
    )
    _around(
        threading.Thread,
        "join",
        None,
        lambda order, _, self, *__: order.take_over(("ended", id(self))),
    )
    if emulator is None:
        return
    run = threading.Thread.run

    def late(self: threading.Thread) -> None:
        """What only the library's own threads wait for comes late."""
        if not self.name.startswith("penstock"):
            return run(self)
        with emulator.served_last():
            return run(self)

    threading.Thread.run = late  # type: ignore[method-assign]


def futures() -> None:
    """A task knows what its submitter knew; who reads its result knows what it knew."""
    _around(
        thread._WorkItem, "__init__", None, lambda order, _, self, *__: order.hand_over(_key(self))
    )
    _around(thread._WorkItem, "run", lambda order, self, *_: order.take_over(_key(self)))
    for name in ("set_result", "set_exception"):
        _around(Future, name, lambda order, self, *_: order.hand_over(_key(self)))
    for name in ("result", "exception"):
        _around(Future, name, None, lambda order, _, self, *__: order.take_over(_key(self)))


def transfers() -> None:
    """Whoever waits for a transfer, or sees that it is settled, knows what its settler knew."""
    _around(Transfer, "__init__", None, lambda order, _, self, *__: order.forget(_key(self)))
    _around(Transfer, "settle", lambda order, self, *_: order.hand_over(_key(self)))
    _around(Transfer, "_wait", None, lambda order, _, self, *__: order.take_over(_key(self)))
    _around(Transfer, "_call", lambda order, self, _: order.take_over(_key(self)))
    add = Transfer.add_done_callback

    def add_done_callback(self: Transfer, callback: Callable[[Transfer], None]) -> None:
        def called(transfer: Transfer) -> None:
            if _order is not None:
                _order.take_over(_key(transfer))
            callback(transfer)

        add(self, called)

    Transfer.add_done_callback = add_done_callback  # type: ignore[method-assign]
    done = Transfer.done.fget
    assert done is not None

    def seen(self: Transfer) -> bool:
        if done(self) and _order is not None:
            _order.take_over(_key(self))
        return done(self)

    Transfer.done = property(seen)  # type: ignore[method-assign, assignment]


def lanes() -> None:
    """A lane's thread knows what the submitter of a copy knew; it lets go of what it has held."""
    _around(CopyLane, "submit", lambda order, _, copy: order.hand_over(_key(copy)))
    _around(CopyLane, "_see_end", lambda order, _, copy: order.take_over(_key(copy)), _let_go)
    _around(CopyLane, "_issue", lambda order, _, copy: order.take_over(_key(copy)))


def _let_go(order: AccessOrder, _: object, __: CopyLane, copy: Any) -> None:
    order.forget(_key(copy))
    if copy.storage is not None and copy.end is not None:
        order.released(copy.storage.data_ptr())


def fills() -> None:
    """Who finds that a copy to the device has landed knows what the lane's thread knew then."""
    _around(Inbound, "_landed", lambda order, _, fill, *__: order.hand_over(_key(fill)))
    _around(CudaMover, "finish", lambda order, _, target: _landed(order, target.fill))
    # afterwards: it may land while it is looked for
    for name in ("precede", "settle"):
        _around(Fill, name, None, lambda order, _, fill, *__: _landed(order, fill))


def _landed(order: AccessOrder, fill: Any) -> None:
    if fill.landed:
        order.take_over(_key(fill))


def slabs() -> None:
    """Whoever frees a buffer knows what those knew who left it; a queue knows what each in it knew.

    Copies hold memory that was lent, and let go of it after they have left it.
    """

    def left(order: AccessOrder, _: Slab, buffer: Any) -> None:
        order.hand_over(_key(buffer))
        start = _start_of(buffer.memory)
        if start is not None:
            order.hand_over(("lent", start))

    _around(Slab, "leave", left)
    _around(Slab, "_free_unneeded", lambda order, _, buffer: order.take_over(_key(buffer)))
    _around(Slab, "_add", None, lambda order, buffer, *_: order.forget(_key(buffer)))
    _around(Slab, "take_or_wait", lambda order, _, waiting: order.hand_over(_key(waiting)))
    following = Slab._next

    def served(self: Slab) -> Any:
        found = following(self)
        if found is not None and _order is not None:
            _order.take_over(_key(found[0]))
            _order.forget(_key(found[0]))
        return found

    Slab._next = served  # type: ignore[method-assign]


_lent: dict[int, int] = {}
"""Where the array begins that a block was lent to, by the block's address."""


def arenas() -> None:
    """Memory for copies is judged from its allocation until it is given back.

    A block that was lent is given back by whoever drops the last reference to its array, so after all
    that have dropped one: I/O drops its own at its end.
    """
    _around(Block, "lend", _is_lent)
    _around(
        Arena,
        "allocate",
        None,
        lambda order, block, *_: block and order.host_allocated(block.address, block.nbytes),
    )
    _around(Arena, "_free_block", _given_back)


def _is_lent(_: AccessOrder, block: Block, skew: int, __: int) -> None:
    _lent[block.address] = block.address + skew


def _given_back(order: AccessOrder, _: object, block: Block, __: object) -> None:
    start = _lent.pop(block.address, None)
    if start is not None:
        order.take_over(("lent", start))
        order.forget(("lent", start))
    order.host_freed(block.address)


def _start_of(keep_alive: object) -> int | None:
    """Where the array begins that I/O holds; None: it holds something else."""
    if isinstance(keep_alive, torch.Tensor):
        return keep_alive.untyped_storage().data_ptr()
    return keep_alive.ctypes.data if isinstance(keep_alive, np.ndarray) else None


def encoding() -> None:
    """The thread of codecs knows what they knew who submitted a job, brought a frame or freed a slot.

    Whoever lets go of a source knows what they knew who ended its pieces.
    """
    for name in ("submit", "_arrived"):
        _around(FrameWorker, name, lambda order, _, job, *__: order.hand_over(_key(job)))
    for name in ("_encode", "_read", "_decode"):
        _around(FrameWorker, name, lambda order, _, job, *__: order.take_over(_key(job)))
    _around(FrameWorker, "_ended", lambda order, _, job, *__: order.hand_over(_key(job)))
    _around(FrameJob, "free_memory", _let_go_of_source)
    _around(FrameScratch, "release", lambda order, self, _: order.hand_over(_key(self)))
    _around(FrameScratch, "take", None, lambda order, _, self, **__: order.take_over(_key(self)))


def _let_go_of_source(order: AccessOrder, job: FrameJob) -> None:
    if job.is_read:
        return
    order.take_over(_key(job))
    order.forget(_key(job))
    if job.memory is not None:
        order.released(job.memory.data_ptr())


def tiers() -> None:
    """Flash reads and writes memory from the submission on; its end is known to its callbacks."""
    write, read = Tier.write, Tier.read

    @wraps(write)
    def writing(self: Tier, address: int, nbytes: int, **named: Any) -> Any:
        begun = _Begun((address, nbytes, bool(self.spec.gpu_direct)), writes=False)
        ticket = write(self, address, nbytes, **_held(begun, named))
        ticket.written.add_done_callback(partial(_end, begun))
        return ticket

    @wraps(read)
    def reading(self: Tier, ticket: Any, address: int, **named: Any) -> Any:
        span = address, ticket.window.nbytes, bool(self.spec.gpu_direct)
        begun = _Begun(span, writes=True)
        transfer = read(self, ticket, address, **_held(begun, named))
        transfer.add_done_callback(partial(_end, begun))
        return transfer

    Tier.write, Tier.read = writing, reading  # type: ignore[method-assign]


class _Begun:
    """I/O that was submitted."""

    def __init__(self, span: Span, *, writes: bool) -> None:
        self.is_array = False
        """Whether it holds an array, and tells of its end itself when it drops that."""
        self._span, self._writes = span, writes
        self.touch()

    def touch(self) -> None:
        """The memory is still read or written now, and until now."""
        if _order is not None:
            _order.take_over(_key(self))
            _order.accessed(self._span, writes=self._writes, what="flash")
            _order.hand_over(_key(self))

    def __del__(self) -> None:
        if _order is not None:
            _order.forget(_key(self))


class _Held:
    """An array that I/O holds: whoever drops it may be the last one, even before the callbacks run."""

    def __init__(self, begun: _Begun, array: object, start: int) -> None:
        self._begun, self._array, self._start = begun, array, start
        begun.is_array = True

    def __del__(self) -> None:
        if _order is not None:
            self._begun.touch()
            _order.hand_over(("lent", self._start))


def _held(begun: _Begun, named: dict[str, Any]) -> dict[str, Any]:
    array = named.get("keep_alive")
    start = _start_of(array)
    return named if start is None else named | {"keep_alive": _Held(begun, array, start)}


def _end(begun: _Begun, transfer: Transfer) -> None:
    if _order is not None:
        if begun.is_array:
            _order.take_over(_key(begun))
        else:
            begun.touch()
        _order.hand_over(_key(transfer))


def direct() -> None:
    """GPU-direct: whoever frees memory, or uses what was read, comes after the end of its transfer."""
    _around(DirectOutbound, "_settle", lambda order, _, ticket, __: _over(order, ticket.source))
    _around(
        DirectInbound,
        "_settle",
        lambda order, _, read, __: _over(order, read.target and read.target.storage),
    )
    _around(
        DirectMover,
        "finish",
        None,
        lambda order, storage, *_: order.hand_over(("read", storage.data_ptr())),
    )
    _around(
        DirectMover, "use", lambda order, _, storage: order.take_over(("read", storage.data_ptr()))
    )


def _over(order: AccessOrder, storage: torch.UntypedStorage | None) -> None:
    if storage is not None:
        order.released(storage.data_ptr())


def gradients() -> None:
    """Counting the last piece of a gradient as written frees its memory, knowing of the others.

    Whoever frees one that was used up knows of all that have used it, or another in the same memory.
    """
    _around(gradients_module, "_note_written", _counted)
    _around(Overlap, "_use_up", _used)


def _counted(order: AccessOrder, _: object, __: object, tickets: list[Any], ___: object) -> None:
    order.hand_over(_key(tickets))
    order.take_over(_key(tickets))


def _used(order: AccessOrder, _: Overlap, param: Param, step: UpdatePass) -> None:
    if param.index in step.grads:
        order.released(step.grads[param.index].untyped_storage().data_ptr())


def records() -> None:
    """Whoever takes a buffer of records, or finds all settled, knows what those knew who have left it.

    Those are threads of the engine and visitors; whoever takes it may be about to read ahead. What one of
    them begins under the lock, any may hand to the engine, and then knows what the first knew.
    """
    for name in ("_was_read", "_was_written", "release", "drop"):
        _around(TilePipeline, name, lambda order, self, *_: order.hand_over(_key(self)))
    for name in ("_wait_for", "_settle"):
        _around(TilePipeline, name, None, lambda order, _, self, *__: order.take_over(_key(self)))
    _around(RecordBuffer, "__init__", lambda order, self, *_: order.forget(_key(self)))
    for name in ("_fetch", "_write"):
        _around(
            TilePipeline,
            name,
            lambda order, self, *_: order.take_over(_key(self)),
            lambda order, _, __, *begun: order.hand_over(_key(begun[-1])),
        )
    for name in ("_start_read", "_start_write"):
        _around(TilePipeline, name, lambda order, _, __, buffer: order.take_over(_key(buffer)))


def pieces() -> None:
    """Who takes staging memory knows what its last user knew; the host reads and writes it, too."""
    _around(staging, "_give", lambda order, mine: order.hand_over(_key(mine)))
    _around(staging, "_take", None, lambda order, mine, _: order.take_over(_key(mine)))
    _around(Staging, "__init__", lambda order, self, _: order.forget(_key(self)), _judged)
    for name, writes in (("to_host", False), ("to_device", True)):
        setattr(Staging, name, _telling(getattr(Staging, name), writes))


def _judged(order: AccessOrder, _: object, mine: Any, *__: object) -> None:
    for piece in mine._pieces:
        order.host_allocated(piece.data_ptr(), piece.nbytes)


def _telling(move: Callable[..., None], writes: bool) -> Callable[..., None]:
    """With the host's accesses told as they happen."""

    @wraps(move)
    def wrapper(self: Staging, steps: Any, after: Any) -> None:
        move(
            self, (each._replace(on_host=partial(_on_host, each, writes)) for each in steps), after
        )

    return wrapper


def _on_host(step: CopyStep, writes: bool, piece: Any) -> None:
    if _order is not None:
        _order.accessed((piece.data_ptr(), piece.nbytes, False), writes=writes, what="the host")
    step.on_host(piece)


def weights() -> None:
    """Who writes a weight home, or lets its memory go, knows what those knew who let go of the weight.

    Who is about to change one, or to read it again, knows of the end of its last write. Threads that hold
    a weight together know who has brought it, and who ends the hold knows of all.
    """

    def written(order: AccessOrder, _: WeightEviction, stay: Stay, transfer: Transfer) -> None:
        order.take_over(_key(transfer))  # which may have been deferred to another thread
        order.hand_over(_key(stay.home))

    _around(WeightHolds, "_leave", lambda order, self, *_: order.hand_over(_key(self)))
    _around(WeightHolds, "_let_go", lambda order, self, *_: order.take_over(_key(self)))
    _around(WeightHolds, "_bring", None, _held_together)
    _around(WeightKeeper, "let_go", lambda order, _, home: order.hand_over(_key(home)))
    _around(WeightEviction, "_written", written)
    _around(DeviceMemory, "begin", lambda order, _, home, __: order.take_over(_key(home)))
    _around(Stay, "begin_use", lambda order, stay: order.take_over(_key(stay.home)))
    _around(
        WeightEviction,
        "wait_for_write",
        None,
        lambda order, _, __, stay: order.take_over(_key(stay.home)),
    )
    _around(DeviceMemory, "write", lambda order, _, home, __: order.take_over(_key(home)))
    _around(WeightTable, "send_home", lambda order, _, stay: order.take_over(_key(stay.home)))


def _held_together(order: AccessOrder, _: object, holds: WeightHolds, __: object) -> None:
    order.take_over(_key(holds))
    order.hand_over(_key(holds))


def savings() -> None:
    """Who may change what is being saved knows what they knew who have read it."""
    _around(Saving, "__init__", lambda order, self, *_: order.forget(_key(self)))
    _around(Saving, "has_read", lambda order, self: order.hand_over(_key(self)))
    _around(Saving, "_let_change", None, lambda order, _, self, *__: order.take_over(_key(self)))
