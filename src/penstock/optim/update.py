"""The update of a tile: the optimizer's own step, on views of weights, gradients and states.

A tile's pieces are taken a few at a time, small enough to stay in the cache. Of each piece:

1. *bring*: the weight is a view of the parameter, or its float32 master; packed states are unpacked;
   the gradient is a view, or a copy where its dtype, its device or a clipping factor ask for one;
2. *step*: the optimizer's class steps, on these tensors as if they were its parameters;
3. *keep*: packed states are packed, the master is rounded to the weight.

For Adam with compact states one kernel does all three (:mod:`compact_adam`).

Since every piece begins at a multiple of ``UNIT`` of its parameter's elements, torch's vectors and what
is left over after them fall on the same elements as in a step on the whole parameter.

[Note: what a step comes after]
    A step on the device itself comes after all that its stream was told before, and other streams are
    the program's to order. The same holds here. At the begin of a pass an event is recorded, for each
    device, on the stream that is current in the thread that calls ``step``; every copy of that pass, of
    gradients and of weights, in both directions, waits for it. So kernels that still read the old
    weights (backward, an evaluation between backward and ``step``) have read them if they run on that
    stream, or on another one that it has waited for. A reader on a stream that ``step`` knows nothing of
    is overwritten, as it would be by an optimizer of torch.

    With ``overlap`` a tile is updated during backward, and an event for each parameter is recorded where
    its gradient was accumulated: autograd has had that stream wait for all uses of the weight in this
    graph. An evaluation after backward then reads the new weights, or some of them.

    When ``step`` returns, the host has seen the end of every copy: all streams may use the weights.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.units import round_up
from penstock.optim import compact_adam, packing
from penstock.optim.formats import MASTER, UNIT, Array, Form
from penstock.optim.gradients import Share
from penstock.optim.params import Param, ParameterPiece, Tile, fresh_scalars
from penstock.optim.pipeline import RecordBuffer
from penstock.optim.probe import KeptStates, ProbedOptimizer, raw_step, workhorse
from penstock.staging import copy_across, pinned

CHUNK: Final = 1 << 18
"""Elements brought at a time."""
_BROUGHT: Final = "brought"
"""Name of the scratch that gradients on a device are copied to."""


@dataclass(frozen=True, slots=True)
class UpdatePass:
    """Values that all tiles of one step share."""

    number: int
    """Number of the step; with the seed it decides the random rounding."""
    options: Sequence[Mapping[str, Any]]
    """Options of each group, without the parameters."""
    grads: dict[int, Tensor]
    """By the parameter's number: its gradient, laid flat. Those without one are left alone."""
    factor: Tensor | None
    """Factor by which gradients are multiplied; None: they are not."""
    scalars: dict[int, dict[str, Any]]
    """By the parameter's number: what the step makes of its scalars; written by the threads."""
    ready: dict[int, Any]
    """By the parameter's number: what copies of its gradient and weight come after; None on the host."""
    was_set: frozenset[int] = frozenset()
    """Numbers of parameters that may have been set since the last step, by others."""


@dataclass(slots=True)
class _Item:
    """A piece while it is updated."""

    piece: ParameterPiece
    param: Param
    weight: Tensor
    """Values that the optimizer updates."""
    states: dict[str, Any]
    words: NDArray[np.uint32] | None
    """The bits of ``weight``, where that is a scratch master."""
    places: dict[int, str]
    """By address: the state whose place in the record that is."""


class _Scratch(threading.local):
    """Memory of one thread, by what it is for: tensors of ``CHUNK`` elements."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.horse: torch.optim.Optimizer | None = None

    def take(self, name: str, dtype: torch.dtype, at: int, count: int) -> Tensor:
        key = f"{name}.{dtype}"
        if key not in self.tensors:
            is_filled_by_device = name == _BROUGHT
            self.tensors[key] = (
                pinned(CHUNK * dtype.itemsize).view(dtype)
                if is_filled_by_device
                else torch.empty(CHUNK, dtype=dtype)
            )
        return self.tensors[key][at : at + count]


class Updater:
    """Runs steps of one optimizer on tiles, in any thread."""

    def __init__(
        self,
        source: ProbedOptimizer,
        params: Sequence[Param],
    ) -> None:
        self._source = source
        self._step = raw_step(source.cls)
        self._params = params
        self._seed = source.config.seed
        self._scratch = _Scratch()

    def update(
        self,
        tile: Tile,
        buffer: RecordBuffer,
        step: UpdatePass,
        *,
        grads: Mapping[int, Share],
        kept: KeptStates,
        initial: Mapping[str, Any],
    ) -> None:
        """Update everything in a tile that has a gradient.

        Args:
            tile: The tile.
            buffer: Holds its record.
            step: What the step is.
            grads: The gradients of the tile's pieces, by parameter; not all need have one.
            kept: What the optimizer keeps in the tile's group.
            initial: States that exist before a parameter's first step, and what they are.
        """
        arrays = {array.name: array for array in tile.arrays}
        work = _Work(tile, buffer.memory, arrays, step, grads, kept, initial)
        left = tile.pieces
        if compact_adam.is_for(self._source.cls, tile.form):
            left = tuple(piece for piece in tile.pieces if not self._did_at_once(piece, work))
        for pieces in _chunks(left, grads):
            items = [self._bring(piece, at, work) for piece, at in pieces]
            self._run(items, step.options[tile.group])
            for item in items:
                self._keep(item, work)

    def update_empty(
        self, param: Param, form: Form, step: UpdatePass, initial: Mapping[str, Any]
    ) -> None:
        """Step a parameter of which this process has no element, so that it counts as torch's does."""
        weight = torch.empty(0, dtype=form.master_dtype)
        weight.grad = torch.empty_like(weight)
        states: dict[str, Any] = fresh_scalars(param.scalars)
        for state in form.states:
            if param.has_state or state.name in initial:
                states[state.name] = torch.empty(0, dtype=state.dtype)
        horse = workhorse(self._source)
        horse.param_groups = [{**step.options[param.group], "params": [weight]}]
        horse.state = defaultdict(dict, {weight: states})
        self._step(horse)
        names = {state.name for state in form.states}
        made = horse.state[weight]
        step.scalars[param.index] = {k: v for k, v in made.items() if k not in names}

    def _did_at_once(self, piece: ParameterPiece, work: _Work) -> bool:
        """Update a piece in one pass, unless it has no states yet, or no gradient."""
        param, step = self._params[piece.param], work.step
        if piece.param not in work.grads or not param.has_state:
            return False
        scalars = fresh_scalars(param.scalars)
        scalars["step"] += 1
        numbers = compact_adam.numbers_of(step.options[work.tile.group], int(scalars["step"]))
        keys = [
            packing.random_key(self._seed, step.number, piece.param, state)
            for state in range(len(work.tile.form.states))
        ]
        weights, grad = param.flat(), work.grad(piece)
        is_plain = grad.dtype in (torch.bfloat16, torch.float32) and step.factor is None
        is_plain = is_plain and grad.device == weights.device
        for part in (piece,) if is_plain else piece.cut(CHUNK):
            mine = weights[part.start : part.stop]
            if is_plain:
                bits: NDArray[Any] = packing.bits_of(grad)
            else:
                bits = packing.bits_of(self._grad(part, 0, mine.device, torch.float32, work))
            compact_adam.step(
                work.arrays,
                work.memory,
                part.at,
                packing.bits_of(mine),
                bits,
                numbers=numbers,
                keys=keys,
                first=part.start,
            )
        param.note_change()
        step.scalars[piece.param] = scalars
        return True

    def _run(self, items: Sequence[_Item], options: Mapping[str, Any]) -> None:
        horse = self._scratch.horse
        if horse is None:
            horse = self._scratch.horse = workhorse(self._source)
        horse.param_groups = [{**options, "params": [item.weight for item in items]}]
        horse.state = defaultdict(dict, {item.weight: item.states for item in items})
        self._step(horse)
        for item in items:
            item.states = horse.state[item.weight]
            item.weight.grad = None
        horse.state = defaultdict(dict)
        horse.param_groups = []

    # -- bring ------------------------------------------------------------------------------------

    def _bring(self, piece: ParameterPiece, at: int, work: _Work) -> _Item:
        param = self._params[piece.param]
        weight, words = self._weight(piece, at, param, work)
        states: dict[str, Any] = fresh_scalars(param.scalars)
        places = {}
        for state in work.tile.form.states:
            array = work.arrays[state.name]
            if not param.has_state and state.name not in work.initial:
                continue  # the step makes it
            if array.packing == "plain":
                values = packing.plain(array, work.memory, piece.at, weight.numel())
                places[values.data_ptr()] = state.name
            else:
                values = self._scratch.take(state.name, state.dtype, at, weight.numel())
            if not param.has_state:
                values.fill_(work.initial[state.name])
            elif array.packing != "plain":
                packing.unpack(array, work.memory, piece.at, packing.bits_of(values))
            states[state.name] = values
        weight.grad = self._grad(piece, at, weight.device, weight.dtype, work)
        return _Item(piece, param, weight, states, words, places)

    def _weight(
        self, piece: ParameterPiece, at: int, param: Param, work: _Work
    ) -> tuple[Tensor, NDArray[np.uint32] | None]:
        array = work.arrays.get(MASTER)
        mine = param.flat()[piece.start : piece.stop]
        if array is None or packing.is_copy(array, mine):
            return mine, None
        if array.packing == "plain":
            master = packing.plain(array, work.memory, piece.at, mine.numel())
            after = work.step.ready[piece.param]
            if not param.has_state:
                copy_across(mine, master, after)
            elif param.index in work.step.was_set:
                _take_over(mine, master, after)
            return master, None
        master = self._scratch.take(MASTER, torch.float32, at, mine.numel())
        words = packing.bits_of(master)
        if param.has_state:
            packing.join(array, work.memory, piece.at, packing.bits_of(mine), words)
        else:
            master.copy_(mine)
        return master, words

    def _grad(
        self, piece: ParameterPiece, at: int, device: torch.device, dtype: torch.dtype, work: _Work
    ) -> Tensor:
        grad, step = work.grad(piece), work.step
        if grad.device != device:
            host = self._scratch.take(_BROUGHT, grad.dtype, at, grad.numel())
            grad = copy_across(grad, host, step.ready[piece.param])
        if step.factor is not None:
            own = self._scratch.take("clipped", grad.dtype, at, grad.numel())
            grad = torch.mul(grad, step.factor.to(grad.device), out=own)
        if grad.dtype != dtype:
            grad = self._scratch.take("grad", dtype, at, grad.numel()).copy_(grad)
        return grad

    # -- keep -------------------------------------------------------------------------------------

    def _keep(self, item: _Item, work: _Work) -> None:
        self._keep_states(item, work)
        array = work.arrays.get(MASTER)
        if array is None:
            return
        mine = item.param.flat()[item.piece.start : item.piece.stop]
        if item.words is not None:
            packing.cut(array, work.memory, item.piece.at, item.words, packing.bits_of(mine))
            item.param.note_change()
        elif packing.is_copy(array, mine):
            packing.plain(array, work.memory, item.piece.at, mine.numel()).copy_(mine)
        else:
            copy_across(item.weight.to(mine.dtype), mine, work.step.ready[item.piece.param])

    def _keep_states(self, item: _Item, work: _Work) -> None:
        piece, states = item.piece, item.states
        moved = {}
        for state in work.tile.form.states:
            values = states.pop(state.name)
            place_of = item.places.get(values.data_ptr())
            if place_of != state.name:  # one in the place of another is read before that is written
                moved[state.name] = values if place_of is None else values.clone()
        for number, state in enumerate(work.tile.form.states):
            if state.name not in moved:
                continue
            array, values = work.arrays[state.name], moved[state.name]
            if array.packing == "plain":
                packing.plain(array, work.memory, piece.at, values.numel()).copy_(values)
                continue
            key = packing.random_key(self._seed, work.step.number, piece.param, number)
            packing.pack(
                array,
                work.memory,
                piece.at,
                packing.bits_of(values.contiguous()),
                key=key,
                first=piece.start,
            )
        unknown = states.keys() - set(work.kept.scalars)
        if unknown:
            raise ConfigError(
                f"{self._source.name} keeps {sorted(unknown)} for parameter {item.param.name} now,"
                " which it did not when it was put on flash: an option of the group has changed that"
                " decides what is kept; make a new optimizer"
            )
        work.step.scalars[piece.param] = states


@dataclass(frozen=True, slots=True)
class _Work:
    """Values that the update of one tile needs throughout."""

    tile: Tile
    memory: NDArray[np.uint8]
    arrays: Mapping[str, Array]
    step: UpdatePass
    grads: Mapping[int, Share]
    kept: KeptStates
    initial: Mapping[str, Any]

    def grad(self, piece: ParameterPiece) -> Tensor:
        """Return the gradient of a piece of the tile, or of a part of one."""
        elements, first = self.grads[piece.param]
        return elements[piece.start - first : piece.stop - first]


def _chunks(
    whole_pieces: Sequence[ParameterPiece], grads: Mapping[int, Share]
) -> Iterator[list[tuple[ParameterPiece, int]]]:
    """Pieces that have gradients, with their places in scratch, up to ``CHUNK`` at a time."""
    batch: list[tuple[ParameterPiece, int]] = []
    at = 0
    for whole in whole_pieces:
        if whole.param not in grads:
            continue
        for piece in whole.cut(CHUNK):
            length = round_up(piece.stop - piece.start, UNIT)
            if at + length > CHUNK:
                yield batch
                batch, at = [], 0
            batch.append((piece, at))
            at += length
    if batch:
        yield batch


def _take_over(weight: Tensor, master: Tensor, after: Any) -> None:
    """Set the elements of a master of which the weight is not that any more."""
    own = copy_across(weight, torch.empty_like(weight, device=master.device), after)
    torch.where(master.to(own.dtype) == own, master, own.to(master.dtype), out=master)
