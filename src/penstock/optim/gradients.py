"""Gradients that wait for their tile, under a budget of memory: those beyond it wait on flash.

The budget is the user's, or what a session leaves to the gradients of its weights.

1. ``settle``, when autograd has accumulated a gradient: if those that wait exceed the budget, this one is
   offloaded in its own dtype, cut as tiles are (:mod:`offloaded_gradient` stands for it); its memory is
   free as soon as it is written.
2. Autograd adds to it in a later backward, or other code uses it: it is read, and settles again.
3. ``begin`` and ``of_tile``, in a step: the parts that tiles need are read ahead, in the order of tiles.

[Note: which gradients are offloaded]
    Backward accumulates in the same order each time, so of the gradients that wait the latest is needed
    last in the next backward. It is the one that is offloaded. The first ones of a backward stay, and are
    never written. A step needs each of them once, wherever it is.

[Note: gradients and faults]
    A gradient is in memory until it is written. If it cannot be written, it stays there, as do the others
    until the next step, and there is one warning. If it cannot be read, its user gets the error.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core.config import UNLIMITED
from penstock.core.errors import PenstockWarning, SourceChangedError, TransferError
from penstock.core.locks import Lock
from penstock.homed import UpdateMemory
from penstock.io.engine import Engine, Transfer
from penstock.optim.gradient_spill import (
    FLYING_BYTES,
    TILES_AHEAD,
    GradientRead,
    GradientSpill,
    LeftMemory,
)
from penstock.optim.holds import memory_for, session_memory
from penstock.optim.offloaded_gradient import (
    GradientPlace,
    OffloadedGradient,
    ReplacedGradients,
    discard_all,
)
from penstock.optim.params import Param, ParameterPiece, Tile, flat_like
from penstock.optim.shards import gradient_here, set_local_gradient
from penstock.staging import copy_across, ready_event
from penstock.store.base import Ticket
from penstock.store.window import TransferWindow

LEAST_BYTES: Final = 1 << 16
"""Shorter gradients stay: it would take some pages of flash each, and free next to nothing."""

Share = tuple[Tensor, int]
"""Elements of a gradient, laid flat, and which of its elements the first of them is."""


class Gradients:
    """The gradients of one optimizer's parameters. Thread-safe.

    Attributes:
        written: Bytes written in all.
        written_in_step: Bytes written between the ends of the last two steps; None: there was no step.
        is_used_now: Returns whether a parameter's gradient, which is being accumulated, is used as soon
            as that is done, so that it need not be offloaded before.
    """

    def __init__(
        self,
        params: Sequence[Param],
        tiles: Sequence[Tile],
        *,
        budget_bytes: int | None,
        directories: Sequence[str],
        engine: Engine,
        wants_norms: bool,
        allow_memory_filesystem: bool,
    ) -> None:
        """Make a storage without gradients.

        Args:
            params: Parameters of the optimizer; more may come.
            tiles: Tiles of the optimizer; more may come.
            budget_bytes: Most bytes that wait in memory; None: what sessions give to each of them.
            directories: Directories in which the others wait.
            engine: Moves them.
            wants_norms: True if the norms of offloaded gradients are needed.
            allow_memory_filesystem: Accept a directory in memory.
        """
        self._given_bytes = budget_bytes
        self.written = 0
        self.written_in_step: int | None = None
        self._written_before = 0
        self.is_used_now: Callable[[Param], bool] = lambda _: False
        self._params = params
        self._wants_norms = wants_norms
        self._asked: UpdateMemory | None = None  # for room, by ``want``
        self._spill = GradientSpill(
            params,
            tiles,
            directories=directories,
            engine=engine,
            allow_memory_filesystem=allow_memory_filesystem,
        )
        self._lock = Lock()
        self._waiting = _Waiting(params)
        self._kept: dict[
            int, weakref.ref[Any]
        ] = {}  # by parameter: memory that a session has given
        self._listening: dict[int, Any] = {}
        self._writes = TransferWindow[Transfer](limit_bytes=self._flying_bytes())
        self._failure: BaseException | None = None
        self._is_told = False
        self._replaced = ReplacedGradients()
        self._left = LeftMemory()
        self._ahead: deque[Tile] = deque()
        self._grads: Mapping[int, Tensor] = {}
        self._begun: dict[int, dict[int, GradientRead]] = {}  # by tile and parameter

    def listen(self) -> None:
        """Settle each gradient when it is accumulated."""
        for param in self._params:
            if param.index not in self._listening and param.tensor.requires_grad:
                listen = param.tensor.register_post_accumulate_grad_hook
                self._listening[param.index] = listen(_settling(self, param.index))  # type: ignore[no-untyped-call]

    @property
    def is_given(self) -> bool:
        """True if the user has given the budget; False if sessions do."""
        return self._given_bytes is not None

    @property
    def budget_bytes(self) -> int:
        """Most bytes that wait in memory."""
        if self._given_bytes is not None:
            return self._given_bytes
        memory = session_memory(self._params)
        return UNLIMITED if memory is None else memory.waiting.limit_bytes

    def has_excess(self) -> bool:
        """Return whether more waits in memory than the user's budget. In any thread."""
        return self._given_bytes is not None and self._waiting.exceed(self._given_bytes)

    def want(self) -> None:
        """Tell sessions how much would wait in memory: nothing, where they give none any more."""
        memory = None if self.is_given else session_memory(self._params)
        if self._asked is not None and self._asked is not memory:
            self._asked.want(self, ())
        self._asked = memory
        if memory is not None:
            memory.want(
                self,
                [one.local.nbytes for one in self._params if memory_for(one) is memory],
            )

    def _flying_bytes(self) -> int:
        memory = None if self.is_given else session_memory(self._params)
        return FLYING_BYTES if memory is None else min(FLYING_BYTES, memory.flying_bytes)

    def note(self, param: Param) -> None:
        """Note that a parameter's gradient has come, has left memory or was changed. In any thread."""
        self._waiting.note(param)

    def trim(self) -> None:
        """Free memory that holds no gradient."""
        self._left.free()
        self._spill.trim()

    def replace_engine(self, engine: Engine) -> None:
        """Use another engine from now on."""
        self._spill.replace_engine(engine)

    def close(self) -> None:
        """Discard what is on flash. Idempotent."""
        for handle in self._listening.values():
            handle.remove()
        self._listening.clear()
        self._forget_readings()
        if self._asked is not None:
            self._asked.want(self, ())
        self._left.drop()
        self._spill.close()

    # -- where a gradient rests -------------------------------------------------------------------

    def settle(self, param: Param) -> None:
        """Offload a parameter's gradient, which was accumulated, if too many wait in memory."""
        self.note(param)
        self._left.free()
        grad = gradient_here(param.tensor)
        if grad is None or isinstance(grad, OffloadedGradient) or param.index in self._replaced:
            return
        if not self._must_be_offloaded(param, grad):
            return
        flat = param.flat_grad()
        assert flat is not None
        place = GradientPlace(param.index, param.in_shape(flat))
        if self._offload(place):
            set_local_gradient(param.tensor, OffloadedGradient(place, self, param.local))
            self.note(param)
            self._replaced.leaves(param.index)
            self._left.add(grad)
            del grad, flat
            self._left.free()

    def bring(self, place: GradientPlace, *, values: bool = True) -> Tensor:
        """See ``GradientSource``. What was read is the caller's own.

        Raises:
            TransferError: It cannot be read.
            ChecksumError: It is not what was written.
            ClosedError: The optimizer was closed.
        """
        param, real = self._params[place.param], place.real
        if real is None:
            flat = self._empty(param, place.dtype)
            for piece, found in self._read_all(place) if values else ():
                flat[piece.start : piece.stop] = found
            real = param.in_shape(flat)
        device = param.local.device
        if real.device != device:
            there = torch.empty(param.count, dtype=real.dtype, device=device)
            if values:
                copy_across(flat_like(real, param.local), there, ready_event(device))
            real = param.in_shape(there)
        return real

    def changed(self, place: GradientPlace, real: Tensor) -> None:
        """See ``GradientSource``. The gradient settles again."""
        param = self._params[place.param]
        self._forget(place)
        place.real, place.norm = real, None
        self.note(param)
        is_wanted = place.stays or self.is_used_now(param)
        if not is_wanted and self._must_be_offloaded(param, real):
            self._offload(place)
            self.note(param)

    def _must_be_offloaded(self, param: Param, grad: Tensor) -> bool:
        if self._failure is not None or grad.layout != torch.strided:
            return False
        if grad.nbytes <= LEAST_BYTES:
            return False
        if self.is_given:
            return self.has_excess()
        memory = memory_for(param)
        return memory is not None and not self._keep(param, grad, memory)

    def _keep(self, param: Param, grad: Tensor, memory: UpdateMemory) -> bool:
        """Let a gradient stay in the memory of a session if that has room; return whether it does."""
        known, storage = self._kept.get(param.index), grad.untyped_storage()
        if known is not None and known() is storage:
            return True
        if not memory.keep(grad):
            return False
        self._kept[param.index] = weakref.ref(storage)
        return True

    def _empty(self, param: Param, dtype: torch.dtype) -> Tensor:
        """Return memory for a gradient that was on flash: where it may stay, if there is room."""
        memory = None if self.is_given else memory_for(param)
        if memory is not None:
            flat = torch.empty(param.count, dtype=dtype)
            if self._keep(param, flat, memory):
                return flat
        return self._spill.empty(param.count, dtype)

    def _offload(self, place: GradientPlace) -> bool:
        """Begin to write a gradient; return false if that cannot be, and it stays."""
        assert place.real is not None
        param = self._params[place.param]
        flat = flat_like(place.real, param.local)
        if self._wants_norms:
            place.norm = torch.linalg.vector_norm(flat)
        self._wait_for_room(flat.nbytes)
        try:
            flat = self._spill.take(flat)
            place.real = param.in_shape(flat)
            tickets = self._spill.write(param, flat)
        except TransferError as error:
            self._note_failure(error)
            return False
        self.written += flat.nbytes
        place.hold(self._spill.open(), tickets)
        me, it = weakref.ref(self), weakref.ref(place)
        written = tuple(tickets)
        for ticket in written:
            ticket.written.add_done_callback(lambda done: _note_written(me, it, tickets, done))
        with self._lock:
            for ticket in written:
                self._writes.add(ticket.written, ticket.written, ticket.nbytes)
        return True

    def _wait_for_room(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more may be in flight; warn of what could not be written."""
        while True:
            with self._lock:
                oldest = self._writes.pop_excess(nbytes)
            if oldest is None:
                break
            with suppress(TransferError, SourceChangedError, CancelledError):
                oldest.wait()
        if self._failure is not None:
            self._note_failure(self._failure)

    def _note_failure(self, error: BaseException) -> None:
        self._failure = error
        if not self._is_told:
            self._is_told = True
            warnings.warn(
                "gradients that are to wait on flash cannot be written and stay in memory, until they"
                f" can: {error}",
                PenstockWarning,
                stacklevel=2,
            )

    def _forget(self, place: GradientPlace) -> None:
        with self._lock:
            tickets, place.tickets = place.tickets, []
        if tickets:
            discard_all(self._spill.open(), tickets)

    # -- what a step needs ------------------------------------------------------------------------

    def begin(self, order: Sequence[Tile], grads: Mapping[int, Tensor]) -> None:
        """Begin a step, which uses these gradients, by parameter, in this order of tiles."""
        self.listen()  # to parameters that were frozen before
        self._left.free()
        in_vain = self._replaced.judge(grads)
        if in_vain:
            warnings.warn(
                f"{len(in_vain)} gradients had left to flash and were replaced by others in memory before"
                " step, twice (by DistributedDataParallel with gradient_as_bucket_view=True, or by the"
                " script): they stay from now on, beyond gradient_memory, which is of no use here",
                PenstockWarning,
                stacklevel=2,
            )
        with self._lock:
            self._begun.clear()
            self._ahead = deque(order)
            self._grads = grads
            self._read_ahead()

    def end(self) -> None:
        """End a step, completed or not."""
        if self._failure is not None:
            self._note_failure(self._failure)
            self._failure = None  # the next ones are tried again
        self._waiting.begin_again()
        self.written_in_step = self.written - self._written_before
        self._written_before = self.written
        self._forget_readings()

    def _forget_readings(self) -> None:
        with self._lock:
            self._begun.clear()
            self._ahead.clear()
            self._grads = {}

    @contextmanager
    def of_tile(self, tile: Tile, grads: Mapping[int, Tensor]) -> Iterator[dict[int, Share]]:
        """Yield a tile's gradients by parameter, valid inside the ``with`` block. Raises as ``bring``."""
        with self._lock:
            readings = self._begun.pop(tile.index, None)
            is_begun = readings is not None and not (self._ahead and self._ahead[0] is tile)
            if not is_begun:
                with suppress(ValueError):
                    self._ahead.remove(tile)
        readings = readings or {}
        if not is_begun:
            self._begin_rest(tile, grads, readings)
        with self._lock:
            self._read_ahead()
        yield {
            piece.param: self._share(piece, grads[piece.param], readings)
            for piece in tile.pieces
            if piece.param in grads
        }

    def _share(
        self, piece: ParameterPiece, grad: Tensor, readings: Mapping[int, GradientRead]
    ) -> Share:
        if piece.param in readings:
            return readings[piece.param].wait(grad.dtype), piece.start
        if not isinstance(grad, OffloadedGradient):
            return grad, 0
        real = grad.place.real
        if real is None:  # it was written since
            return self._spill.begin_read(grad.place.tickets, piece).wait(grad.dtype), piece.start
        return flat_like(real, self._params[piece.param].local), 0

    def _read_ahead(self) -> None:
        """Begin to read what the next tiles need, as far as there is memory. Under the lock.

        Of the first tile that is still ahead some pieces may have been begun before.
        """
        while self._ahead:
            tile = self._ahead[0]
            if tile.index not in self._begun and len(self._begun) >= TILES_AHEAD:
                return
            begun = self._begun.setdefault(tile.index, {})
            for piece, place in self._away(tile, self._grads):
                if piece.param in begun:
                    continue
                read = self._spill.begin_read_ahead(place.tickets, piece)
                if read is None:  # it is read later, or when it is needed
                    return
                begun[piece.param] = read
            self._ahead.popleft()

    def _begin_rest(
        self, tile: Tile, grads: Mapping[int, Tensor], begun: dict[int, GradientRead]
    ) -> None:
        """Begin to read what a tile needs and was not begun."""
        for piece, place in self._away(tile, grads):
            if piece.param not in begun:
                begun[piece.param] = self._spill.begin_read(place.tickets, piece)

    def _away(
        self, tile: Tile, grads: Mapping[int, Tensor]
    ) -> Iterator[tuple[ParameterPiece, GradientPlace]]:
        """Yield the pieces of a tile whose gradients are on flash."""
        for piece in tile.pieces:
            grad = grads.get(piece.param)
            if isinstance(grad, OffloadedGradient) and grad.place.real is None:
                if not grad.place.tickets:  # another optimizer has used it up
                    grad.source.bring(grad.place)
                yield piece, grad.place

    # -- reading ----------------------------------------------------------------------------------

    def _read_all(self, place: GradientPlace) -> Iterator[tuple[ParameterPiece, Tensor]]:
        with TransferWindow[tuple[ParameterPiece, GradientRead]]() as reads:
            for piece in self._spill.pieces(place.param):
                read = self._spill.begin_read(place.tickets, piece)
                reads.add((piece, read), read.transfer)
                if len(reads) > TILES_AHEAD:
                    first, read = reads.pop()
                    yield first, read.wait(place.dtype)
            while reads:
                first, read = reads.pop()
                yield first, read.wait(place.dtype)


def _settling(source: Gradients, index: int) -> Callable[[Tensor], None]:
    """Return a hook that settles a gradient; it does not keep the optimizer alive."""
    me = weakref.ref(source)

    def accumulated(_: Tensor) -> None:
        mine = me()
        if mine is not None:
            mine.settle(mine._params[index])

    return accumulated


def _note_written(
    source: weakref.ref[Gradients],
    placed: weakref.ref[GradientPlace],
    tickets: list[Ticket],
    done: Transfer,
) -> None:
    """Free the memory of values that are on flash. In a thread of the engine.

    Where an operator is changing them in place, which it reports when it returns, they stay in memory.
    """
    mine, place = source(), placed()
    if mine is None or place is None:
        return
    error = done.error
    with mine._lock:
        if place.tickets is not tickets:  # it was changed, or another piece has failed
            return
        if error is None:
            place.unwritten -= 1
            if place.unwritten:
                return
            real, place.real = place.real, None
        else:
            place.tickets, place.norm = [], None
            if not isinstance(error, SourceChangedError):
                mine._failure = error
    if error is not None:
        mine.note(mine._params[place.param])
        discard_all(mine._spill.open(), tickets)
    else:
        del real  # not under the lock


class _Waiting:
    """Bytes of gradients that wait in memory and are not being written. Thread-safe.

    To ask all parameters at each gradient takes the square of their number. So each is asked when its
    gradient comes or leaves, and all are when that seems too much, but not more often than it pays.
    """

    def __init__(self, params: Sequence[Param]) -> None:
        """Count none."""
        self._params = params
        self._lock = Lock()
        self._nbytes: dict[int, int] = {}  # by parameter
        self._total = 0
        self._asked: int | None = None  # since all were; None: all are to be

    def begin_again(self) -> None:
        """Ask all parameters when the next gradient comes: some may have one that no hook has told of."""
        self._asked = None

    def note(self, param: Param) -> None:
        """Ask a parameter."""
        with self._lock:
            if self._asked is None:
                self._ask_all(range(len(self._params)))
            else:
                self._asked += 1
                self._ask(param.index)

    def exceed(self, limit_bytes: int) -> bool:
        """Return whether there are more bytes than this."""
        with self._lock:
            is_due = self._asked is not None and self._asked >= len(self._nbytes)
            if is_due and self._total > limit_bytes:
                self._ask_all(list(self._nbytes))
            return self._total > limit_bytes

    def _ask_all(self, indices: Iterable[int]) -> None:
        self._asked = 0
        for index in indices:
            self._ask(index)

    def _ask(self, index: int) -> None:
        self._total -= self._nbytes.pop(index, 0)
        nbytes = _bytes_in_memory(gradient_here(self._params[index].tensor))
        if nbytes:
            self._nbytes[index] = nbytes
            self._total += nbytes


def _bytes_in_memory(grad: Tensor | None) -> int:
    if grad is None or grad.layout != torch.strided:  # step refuses a sparse one
        return 0
    if not isinstance(grad, OffloadedGradient):
        return grad.nbytes
    place = grad.place
    return 0 if place.tickets or place.real is None else place.real.nbytes
