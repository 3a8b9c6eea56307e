"""Gradients that wait for their tile, under a budget of memory: those beyond it wait on flash.

1. ``settle``, when autograd has accumulated a gradient: if those that wait exceed the budget, this one is
   offloaded in its own dtype, cut as tiles are (:mod:`offloaded_gradient` stands for it); its memory is
   free as soon as it is written.
2. Autograd adds to it in a later backward, or other code uses it: it is read, and settles again.
3. ``begin`` and ``of_tile``, in a step: the parts that tiles need are read ahead, in the order of tiles.

[Note: which gradients leave]
    Backward accumulates in the same order each time, so of those that wait the latest is needed last in
    the next backward. It is the one that leaves; the first ones of a backward stay, and are never
    written. A step needs each of them once, whichever left.

[Note: gradients and faults]
    A gradient is in memory until it is written. If it cannot be, it stays there, as do the others until
    the next step, and there is a warning, once. If it cannot be read, whoever needs it gets the error.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core.errors import PenstockWarning, SourceChangedError, TransferError
from penstock.core.locks import Lock
from penstock.io.engine import Engine, Transfer
from penstock.io.pages import trim_heap
from penstock.optim.gradient_spill import FLYING_BYTES, TILES_AHEAD, GradientRead, GradientSpill
from penstock.optim.layout import ParameterPiece, Tile
from penstock.optim.offloaded_gradient import (
    GradientPlace,
    OffloadedGradient,
    ReplacedGradients,
    discard_all,
)
from penstock.optim.params import Param, flat_like
from penstock.staging import copy_across, ready_event
from penstock.store.base import Ticket

LEAST_BYTES: Final = 1 << 16
"""Shorter gradients stay: it would take some pages of flash each, and free next to nothing."""

Share = tuple[Tensor, int]
"""Elements of a gradient, laid flat, and which of its elements the first of them is."""


class Gradients:
    """The gradients of one optimizer's parameters. Thread-safe.

    Attributes:
        budget_bytes: What may wait in memory.
        written: What has been written in all, in bytes.
        written_in_step: What of that was written from the end of a step to the end of the next one, the
            last; None: there was none.
        is_used_now: Whether a parameter's gradient, which is being added to, is used as soon as that is
            done, and need not leave before.
    """

    def __init__(
        self,
        params: Sequence[Param],
        tiles: Sequence[Tile],
        *,
        budget_bytes: int,
        directories: Sequence[str],
        engine: Callable[[], Engine],
        wants_norms: bool,
        allow_memory_filesystem: bool,
    ) -> None:
        """Keep nothing yet.

        Args:
            params: The optimizer's; more may come.
            tiles: The same.
            budget_bytes: What may wait in memory.
            directories: Where the rest waits.
            engine: Says what moves it.
            wants_norms: Whether the norm of what leaves will be asked for.
            allow_memory_filesystem: Accept a directory in memory.
        """
        self.budget_bytes = budget_bytes
        self.written = 0
        self.written_in_step: int | None = None
        self._written_before = 0
        self.is_used_now: Callable[[Param], bool] = lambda _: False
        self._params = params
        self._wants_norms = wants_norms
        self._spill = GradientSpill(
            params,
            tiles,
            directories=directories,
            engine=engine,
            allow_memory_filesystem=allow_memory_filesystem,
        )
        self._lock = Lock()
        self._listening: dict[int, Any] = {}
        self._flying: deque[Ticket] = deque()
        self._failure: BaseException | None = None
        self._is_told = False
        self._replaced = ReplacedGradients()
        self._freed = 0  # bytes, since the heap was trimmed
        self._ahead: deque[Tile] = deque()
        self._grads: Mapping[int, Tensor] = {}
        self._begun: dict[int, dict[int, GradientRead]] = {}  # by tile and parameter

    def lay(self) -> None:
        """Take note of the tiles that there are."""
        self._spill.lay()

    def listen(self) -> None:
        """Have each gradient settle when it is accumulated."""
        for param in self._params:
            if param.index not in self._listening and param.tensor.requires_grad:
                listen = param.tensor.register_post_accumulate_grad_hook
                self._listening[param.index] = listen(_settling(self, param.index))  # type: ignore[no-untyped-call]

    @property
    def held_bytes(self) -> int:
        """Bytes that wait in memory and are not being written."""
        return sum(_bytes_in_memory(param.tensor.grad) for param in self._params)

    def rest(self) -> None:
        """Hold no memory but for gradients."""
        self._spill.trim()

    def engine_changed(self) -> None:
        """Use the present engine from now on, if nothing is on flash."""
        self._spill.reopen()

    def close(self) -> None:
        """Discard what is on flash. Idempotent."""
        for handle in self._listening.values():
            handle.remove()
        self._listening.clear()
        self._forget_readings()
        self._spill.close()

    # -- where a gradient rests -------------------------------------------------------------------

    def settle(self, param: Param) -> None:
        """A parameter's gradient is there, or was added to: it leaves if there are too many."""
        grad = param.tensor.grad
        if grad is None or isinstance(grad, OffloadedGradient) or param.index in self._replaced:
            return
        if not self._must_leave(grad):
            return
        flat = param.flat_grad()
        assert flat is not None
        rest = GradientPlace(param.index, param.in_shape(flat))
        if self._leave(rest):
            nbytes = grad.nbytes
            param.tensor.grad = OffloadedGradient(rest, self, param.tensor)
            self._replaced.leaves(param.index)
            del grad, flat
            self._free_heap(nbytes)

    def bring(self, rest: GradientPlace, *, values: bool = True) -> Tensor:
        """See ``GradientSource``. What was read is the caller's own.

        Raises:
            TransferError: It cannot be read.
            ChecksumError: It is not what was written.
            ClosedError: The optimizer was closed.
        """
        param, real = self._params[rest.param], rest.real
        if real is None:
            flat = self._spill.empty(param.count, rest.dtype)
            for piece, found in self._read_all(rest) if values else ():
                flat[piece.start : piece.stop] = found
            real = param.in_shape(flat)
        device = param.tensor.device
        if real.device != device:
            there = torch.empty(param.count, dtype=real.dtype, device=device)
            if values:
                copy_across(flat_like(real, param.tensor), there, ready_event(device))
            real = param.in_shape(there)
        return real

    def changed(self, rest: GradientPlace, real: Tensor) -> None:
        """See ``GradientSource``. It settles anew."""
        param = self._params[rest.param]
        self._forget(rest)
        rest.real, rest.norm = real, None
        is_wanted = rest.stays or self.is_used_now(param)
        if not is_wanted and self._must_leave(real):
            self._leave(rest)

    def _free_heap(self, nbytes: int) -> None:
        """So much was freed: now and then, have it given back to the system.

        glibc would keep it, and a gradient of the same length does not fit in its place: what aligned
        memory needs beside it is not free.
        """
        self._freed += nbytes
        if self._freed >= FLYING_BYTES:
            self._freed = 0
            trim_heap()

    def _must_leave(self, grad: Tensor) -> bool:
        return (
            self._failure is None
            and grad.nbytes > LEAST_BYTES
            and grad.layout == torch.strided
            and self.held_bytes > self.budget_bytes
        )

    def _leave(self, rest: GradientPlace) -> bool:
        """Begin to write what is in memory; false: it cannot be, and stays."""
        assert rest.real is not None
        param = self._params[rest.param]
        flat = flat_like(rest.real, param.tensor)
        if self._wants_norms:
            rest.norm = torch.linalg.vector_norm(flat)
        self._let_land(flat.nbytes)
        try:
            flat = self._spill.take(flat)
            rest.real = param.in_shape(flat)
            tickets = self._spill.write(param, flat)
        except TransferError as error:
            self._could_not(error)
            return False
        self.written += flat.nbytes
        rest.hold(self._spill.open(), tickets)
        me, it = weakref.ref(self), weakref.ref(rest)
        for ticket in tuple(tickets):
            ticket.written.add_done_callback(lambda done: _was_written(me, it, tickets, done))
        self._flying.extend(tickets)
        return True

    def _let_land(self, nbytes: int) -> None:
        """Wait until so much can go on its way out, too; tell of what could not be written."""
        most = max(0, FLYING_BYTES - nbytes)
        with suppress(IndexError):  # another thread was quicker
            while self._flying[0].written.done:
                self._flying.popleft()
            while sum(ticket.nbytes for ticket in tuple(self._flying)) > most:
                with suppress(TransferError, CancelledError):
                    self._flying.popleft().written.wait()
        if self._failure is not None:
            self._could_not(self._failure)

    def _could_not(self, error: BaseException) -> None:
        self._failure = error
        if not self._is_told:
            self._is_told = True
            warnings.warn(
                "gradients beyond gradient_memory cannot be written and stay in memory, until they"
                f" can: {error}",
                PenstockWarning,
                stacklevel=2,
            )

    def _forget(self, rest: GradientPlace) -> None:
        with self._lock:
            tickets, rest.tickets = rest.tickets, []
        if tickets:
            discard_all(self._spill.open(), tickets)

    # -- what a step needs ------------------------------------------------------------------------

    def begin(self, order: Sequence[Tile], grads: Mapping[int, Tensor]) -> None:
        """A step is about to use gradients, by parameter, tile by tile in this order."""
        self.listen()  # to parameters that were frozen before
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
        """The step is over, or was given up."""
        if self._failure is not None:
            self._could_not(self._failure)
            self._failure = None  # the next ones are tried again
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
            if readings is None:
                with suppress(ValueError):
                    self._ahead.remove(tile)
                readings = self._begin_tile(tile, grads)
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
        real = grad.rest.real
        if real is None:  # it was written since
            return self._spill.begin_read(grad.rest.tickets, piece).wait(grad.dtype), piece.start
        return flat_like(real, self._params[piece.param].tensor), 0

    def _read_ahead(self) -> None:
        while self._ahead and len(self._begun) < TILES_AHEAD:
            tile = self._ahead.popleft()
            self._begun[tile.index] = self._begin_tile(tile, self._grads)

    def _begin_tile(self, tile: Tile, grads: Mapping[int, Tensor]) -> dict[int, GradientRead]:
        begun = {}
        for piece in tile.pieces:
            grad = grads.get(piece.param)
            if isinstance(grad, OffloadedGradient) and grad.rest.real is None:
                begun[piece.param] = self._spill.begin_read(grad.rest.tickets, piece)
        return begun

    # -- reading ----------------------------------------------------------------------------------

    def _read_all(self, rest: GradientPlace) -> Iterator[tuple[ParameterPiece, Tensor]]:
        under_way: deque[tuple[ParameterPiece, GradientRead]] = deque()
        for piece in self._spill.pieces(rest.param):
            under_way.append((piece, self._spill.begin_read(rest.tickets, piece)))
            if len(under_way) > TILES_AHEAD:
                first, reading = under_way.popleft()
                yield first, reading.wait(rest.dtype)
        for first, reading in under_way:
            yield first, reading.wait(rest.dtype)


def _settling(keeper: Gradients, index: int) -> Callable[[Tensor], None]:
    """A hook: a model does not keep its optimizers alive."""
    me = weakref.ref(keeper)

    def accumulated(_: Tensor) -> None:
        mine = me()
        if mine is not None:
            mine.settle(mine._params[index])

    return accumulated


def _was_written(
    keeper: weakref.ref[Gradients],
    resting: weakref.ref[GradientPlace],
    tickets: list[Ticket],
    done: Transfer,
) -> None:
    """Free the memory of values that are on flash. In a thread of the engine.

    Where an operator is changing them in place, which it reports when it returns, they stay in memory.
    """
    mine, rest = keeper(), resting()
    if mine is None or rest is None:
        return
    error = done.error
    with mine._lock:
        if rest.tickets is not tickets:  # it was changed, or another piece has failed
            return
        if error is None:
            rest.unwritten -= 1
            if rest.unwritten:
                return
            real, rest.real = rest.real, None
        else:
            rest.tickets, rest.norm = [], None
            if not isinstance(error, SourceChangedError):
                mine._failure = error
    if error is not None:
        discard_all(mine._spill.open(), tickets)
    else:
        del real  # not under the lock


def _bytes_in_memory(grad: Tensor | None) -> int:
    if grad is None:
        return 0
    if not isinstance(grad, OffloadedGradient):
        return grad.nbytes
    rest = grad.rest
    return 0 if rest.tickets or rest.real is None else rest.real.nbytes
