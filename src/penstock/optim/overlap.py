"""Updates of tiles during backward.

A hook of autograd reports when a parameter's gradient is accumulated. Once the gradients of all
parameters in a tile are final, a thread updates the tile, from a record that was read while earlier
layers computed. ``step`` updates the other tiles and waits.

[Note: a weight that is updated during its backward]
    A parameter's gradient is accumulated after every use of it in the graph, so its old value is not
    needed any more, except where it is used without its gradient (detached, or in a second forward for
    checkpointing). The parameter's version is raised before it is written, so autograd refuses such a
    use, as it does after any change in place. A gradient that is accumulated again after it was used, or
    changed before ``step`` (clipping, unscaling), is an error: the update cannot be undone.

[Note: gradients that are averaged later]
    FSDP2 calls a parameter's hooks when it has reduced its gradient, so what they report is final.
    ``DistributedDataParallel`` averages gradients after autograd's hooks. ``follow`` has it report each
    one when that is done (:mod:`averaged`); what autograd reports of those parameters is not used. A
    module that averages and was not named is looked for before the first update.

    Until ``step`` the gradients must stay as they were reported. DDP copies them from its bucket to
    ``.grad`` after that, so these values are compared with the bucket's. With ``gradient_as_bucket_view``
    both are the same memory, which DDP leaves alone from then on: its version must stay.

[Note: changes of a DTensor's gradient]
    torch's functions for lists of tensors, as clipping uses them, change a DTensor without raising any
    version. So a fingerprint of all its shard is kept to compare: clipping by value may change few
    elements, and few may be other than zero.

[Note: gradients that are used up]
    With a budget for gradients, or if the weight has a home on flash and is not averaged later, a
    gradient is freed as soon as all tiles of its parameter are updated. Until ``step`` has ended, a
    gradient without memory stands for it, and whoever uses that gets an error: clipping would have no
    effect. Backward waits while gradients beyond the budget wait for their tiles.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from penstock.core.errors import ConfigError
from penstock.core.locks import Lock
from penstock.homed import home_of
from penstock.observe.clients import waiting_for
from penstock.observe.events import StallCause
from penstock.optim.averaged import (
    Bucket,
    average_and_report,
    check_all_take_part,
    check_can_follow,
    check_none_averages,
)
from penstock.optim.config import RING
from penstock.optim.offloaded_gradient import GradientPlace, OffloadedGradient
from penstock.optim.params import Param, Tile
from penstock.optim.shards import gradient_here, set_local_gradient, shard_fingerprint
from penstock.optim.states import FlashStates
from penstock.optim.update import UpdatePass
from penstock.optim.update_queue import UpdateQueue
from penstock.staging import ready_event

_NOTHING: Final = torch.empty(0)
_listeners: Any = WeakIdKeyDictionary()  # parameter: a weak reference to its Overlap


class Overlap:
    """Updates of tiles as soon as their gradients are final. See ``BackwardUpdates``."""

    def __init__(self, states: FlashStates) -> None:
        """Prepare; ``listen`` begins."""
        self._states = states
        self._lock = Lock()  # hooks of several devices come from several threads
        self._tiles_of: dict[int, list[Tile]] = {}
        self._listening: set[int] = set()
        self._handles: list[Any] = []
        self._order: list[Tile] = []  # in which tiles became ready in the last pass
        self._step: UpdatePass | None = None
        self._times: dict[int, int] = {}
        # gradients, and their versions and fingerprints then
        self._used: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        self._missing: dict[int, int] = {}  # by tile: parameters whose gradient is not final
        self.updates = UpdateQueue()
        self._left: dict[int, int] = {}  # by parameter: tiles that are not updated yet
        # what stands for gradients that were used up, by parameter
        self._freed: dict[int, OffloadedGradient] = {}
        # parameters whose gradients are freed when they are used up
        self._freeable: set[int] = set()
        self._norms: dict[int, Tensor] = {}  # of gradients that will be used up
        # parameters whose gradients are averaged and then reported
        self._followed: set[int] = set()
        self._modules: list[weakref.ref[torch.nn.Module]] = []  # which average them
        # gradients that were reported and used, laid flat, if DDP copies them to ``.grad`` later
        self._averaged: dict[int, Tensor] = {}
        self._failure: BaseException | None = None  # of a report
        self._has_looked = False  # for modules that average
        if states.gradients is not None:
            states.gradients.is_used_now = self.is_used_now

    @property
    def is_under_way(self) -> bool:
        """Return whether backward has begun a pass that ``step`` has not ended."""
        return self._step is not None

    def listen(self) -> None:
        """Listen to parameters that were added.

        Raises:
            ConfigError: Another optimizer updates one of them in backward.
        """
        states = self._states
        for param in states.params:
            _check_alone(param, self)
        self._tiles_of = {}
        for tile in states.tiles:
            for piece in tile.pieces:
                mine = self._tiles_of.setdefault(piece.param, [])
                if tile not in mine[-1:]:
                    mine.append(tile)
        self._note_followed()
        self.updates.takes_part = all(param.local.device.type == "cpu" for param in states.params)
        for param in states.params:
            if param.index not in self._listening and param.tensor.requires_grad:
                self._listening.add(param.index)
                _listeners[param.tensor] = weakref.ref(self)
                hook = self._hook(param)
                listen = param.tensor.register_post_accumulate_grad_hook
                self._handles.append(listen(hook))  # type: ignore[no-untyped-call]

    def follow(self, parallel: object) -> None:
        """Update after this ``DistributedDataParallel`` has averaged. Raises ConfigError.

        See [Note: gradients that are averaged later].
        """
        module, states = check_can_follow(parallel), self._states
        if states.config.gradient_bytes is not None:
            raise ConfigError(
                "gradient_memory does not go with update_after: gradients are in the buckets of"
                " DistributedDataParallel; leave gradient_memory out"
            )
        wanted = {id(param) for param in module.parameters()}
        if not any(id(param.tensor) in wanted for param in states.params):
            raise ConfigError("update_after: none of that module's parameters are this optimizer's")
        average_and_report(module, self)
        self._modules.append(weakref.ref(module))
        self._note_followed()

    def _note_followed(self) -> None:
        """Note which of the parameters are those of modules that report their gradients."""
        modules = [module for module in (each() for each in self._modules) if module is not None]
        wanted = {id(param) for module in modules for param in module.parameters()}
        self._followed |= {p.index for p in self._states.params if id(p.tensor) in wanted}
        self._has_looked = False

    def averaged(self, bucket: Bucket) -> None:
        """See ``penstock.optim.averaged.AverageListener``. An error is raised by ``finish``."""
        params = {id(param.tensor): param for param in self._states.params}
        try:
            with self._lock, torch.no_grad():
                for tensor, grad in bucket:
                    param = params.get(id(tensor))
                    if param is not None and self._failure is None:
                        self._accumulated(param, grad)
        except BaseException as error:  # noqa: BLE001  (the thread is of torch)
            self._failure = error

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._followed.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for param in self._states.params:
            other = _listeners.get(param.tensor)
            if other is not None and other() is self:
                del _listeners[param.tensor]
        self.updates.close()

    def finish(self) -> None:
        """Update what is left, and wait for everything. Raises as ``FlashStates.step``."""
        states, begun = self._states, time.perf_counter()
        states.check_can_step()
        step = self._step
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if self.updates:
                states.mark_inconsistent(failure)
            self._give_up()
            raise failure
        # once, as other ranks do whose passes have begun in backward
        has_norm = step is None
        if step is None:
            step = states.begin_pass()
            states.begin_visits(states.order(step.grads))
        states.pipeline.is_awaited = True
        try:
            self._check_unchanged(step)
            self._take_the_rest(step)
            while self.updates.make_next():
                pass
            self.updates.wait()
        except BaseException as error:
            if self.updates:
                states.mark_inconsistent(error)
            self._give_up()
            raise
        if states.config.clip_norm is not None and not has_norm:
            states.note_norm(step.grads, self._norms)
        states.end_pass(step, begun)
        self._order = [states.tiles[index] for index in self.updates]
        self._clear()
        self._read_ahead()

    # -- hooks ------------------------------------------------------------------------------------

    def _hook(self, param: Param) -> Any:
        me, index = weakref.ref(self), param.index  # a model does not keep its optimizers alive

        def accumulated(_: Tensor) -> None:
            overlap = me()
            if overlap is not None:
                states = overlap._states
                param = states.params[index]
                if index in overlap._followed:
                    overlap._check_is_awaited(param)
                    states.check_can_step()
                    states.make_buffers()
                    return
                if overlap.is_used_now(param):  # without the lock: they may wait
                    states.check_can_step()
                    states.make_buffers()
                    states.holds.take(index)
                try:
                    with overlap._lock:
                        overlap._accumulated(param)
                except BaseException:
                    overlap._let_go_of_unused()
                    raise
                overlap._make_room(param)

        return accumulated

    def _check_is_awaited(self, param: Param) -> None:
        """Raise ConfigError if the average of a gradient to come cannot be used.

        It was used already in this step, or ranks have run out of inputs.
        """
        for reference in self._modules:
            module = reference()
            if module is not None:
                check_all_take_part(module)
        times = self._times.get(param.index, 0)
        if times >= self._states.config.accumulation and self._step is not None:
            raise self._too_many(param, times + 1)

    def _too_many(self, param: Param, times: int) -> ConfigError:
        return ConfigError(
            f"parameter {param.name} got gradient number {times} since the last step, and"
            f" overlap=True was told to use number {self._states.config.accumulation}: call step()"
            " after each backward, or tell how many make a step by accumulation=..., or leave"
            " overlap out"
        )

    def _accumulated(self, param: Param, averaged: Tensor | None = None) -> None:
        """Use a parameter's gradient if it is final: that in ``.grad``, or the one reported."""
        self._look_for_averages()
        times = self._times[param.index] = self._times.get(param.index, 0) + 1
        if times < self._states.config.accumulation or not self._may_begin():
            return
        if times > self._states.config.accumulation:
            raise self._too_many(param, times)
        step = self._begin()
        if averaged is None:
            grad = param.flat_grad()
            if grad is None:
                return
            assert param.tensor.grad is not None
            mine = param.tensor.grad
            self._used[param.index] = mine, mine._version, shard_fingerprint(mine)
        else:
            grad = param.flat_like_me(averaged.detach())
            view = param.tensor.grad
            if view is not None and view.data_ptr() == averaged.data_ptr():
                self._used[param.index] = view, view._version, None
            else:
                self._averaged[param.index] = grad
        step.grads[param.index] = grad
        step.ready[param.index] = ready_event(param.local.device)
        if self._frees_gradient(param):
            self._freeable.add(param.index)
            if self._states.config.clip_norm is not None:
                self._norms[param.index] = torch.linalg.vector_norm(grad)
        param.note_change()
        for tile in self._tiles_of.get(param.index, ()):
            self._missing[tile.index] -= 1
            if not self._missing[tile.index]:
                self._submit(tile, step)

    def _may_begin(self) -> bool:
        self._states.check_can_step()
        return self._knows_norm

    @property
    def _knows_norm(self) -> bool:
        return self._states.config.clip_norm is None or self._states.last_norm is not None

    def is_used_now(self, param: Param) -> bool:
        """Return whether what autograd is about to tell of is a gradient's last accumulation."""
        times = self._times.get(param.index, 0) + 1
        return times >= self._states.config.accumulation and self._knows_norm

    def _let_go_of_unused(self) -> None:
        """End holds of weights if no pass has begun that would end them."""
        if self._step is None:
            self._states.holds.end()

    def _make_room(self, param: Param) -> None:
        """Keep to the budget of gradients and to the memory of weights with a home.

        It waits for updates that use some up, if there are any. They are late because flash is; to
        write gradients to it would make it later.
        """
        states, gradients = self._states, self._states.gradients
        if gradients is not None:
            gradients.note(param)
            is_used = self._step is not None and param.index in self._step.grads
            if not (gradients.is_given or is_used):
                gradients.settle(param)
        while True:
            has_excess = gradients is not None and gradients.has_excess()
            is_crowded = states.holds.is_crowded
            if not (has_excess or is_crowded or states.holds.is_full):
                return
            under_way = self.updates.under_way()
            if not under_way:
                if is_crowded:
                    states.holds.interrupt()
                if gradients is not None and has_excess and param.index not in self._used:
                    gradients.settle(param)
                return
            states.pipeline.is_awaited = True
            try:
                with waiting_for(StallCause.UPDATE, param.name):
                    if not self._update_next():
                        wait(under_way, return_when="FIRST_COMPLETED")
            finally:
                states.pipeline.is_awaited = False

    def _begin(self) -> UpdatePass:
        if self._step is None:
            states = self._states
            factor = None
            if states.config.clip_norm is not None:
                factor = states.factor_of(states.last_norm)
            states.groups.check()
            states.pipeline.is_awaited = False
            states.note_begun()
            self._step = states.make_pass({}, factor)
            wanted = [
                p.index
                for p in states.params
                if p.tensor.requires_grad or p.tensor.grad is not None
            ]
            self._missing = dict.fromkeys(range(len(states.tiles)), 0)
            self._left = {index: len(tiles) for index, tiles in self._tiles_of.items()}
            for index in wanted:
                for tile in self._tiles_of.get(index, ()):
                    self._missing[tile.index] += 1
            self._read_ahead()
        return self._step

    def _look_for_averages(self) -> None:
        """Raise ConfigError if a module will average gradients that are used before that."""
        if self._has_looked:
            return
        alone = [p for p in self._states.params if p.index not in self._followed]
        names = {id(param.tensor): param.name for param in alone}
        check_none_averages([param.tensor for param in alone], lambda param: names[id(param)])
        self._has_looked = True

    def _submit(self, tile: Tile, step: UpdatePass) -> None:
        self.updates.submit(tile.index, partial(self._update, tile, step), self._states.pool)

    def _update_next(self) -> bool:
        """Make an update in this thread: see ``UpdateQueue.make_next``. An interrupt ends the pass."""
        try:
            return self.updates.make_next()
        except BaseException as error:
            self._states.mark_inconsistent(error)
            self._give_up()
            raise

    def _update(self, tile: Tile, step: UpdatePass) -> None:
        """In a thread of the pool, or one that waits for it."""
        self._states.update(tile, step)
        with self._lock:
            for piece in tile.pieces:
                self._use_up(self._states.params[piece.param], step)

    def _frees_gradient(self, param: Param) -> bool:
        """Return whether a gradient is freed as soon as it was used."""
        if self._states.config.gradient_bytes is not None:
            return True
        return home_of(param.tensor) is not None and param.index not in self._followed

    def _use_up(self, param: Param, step: UpdatePass) -> None:
        """Count an updated tile of a parameter; free its gradient after the last one."""
        index, tensor = param.index, param.tensor
        if index not in self._used or index not in self._freeable:
            return
        self._left[index] -= 1
        grad, version, _ = self._used[index]
        if not self._left[index] and tensor.grad is grad and grad._version == version:
            del self._used[index]
            step.grads[index] = _NOTHING
            place = GradientPlace(index, grad)
            place.real = None
            self._freed[index] = OffloadedGradient(place, self, param.local)
            set_local_gradient(tensor, self._freed[index])
            if self._states.gradients is not None:
                self._states.gradients.note(param)

    # -- for who uses a gradient that was used up -------------------------------------------------

    def bring(self, place: GradientPlace, *, values: bool = True) -> Tensor:
        """Raise ConfigError: the values are gone."""
        raise ConfigError(
            f"the gradient of parameter {self._states.params[place.param].name} is gone: overlap=True has"
            " updated the parameter in backward, and freed it; use clip_norm=... for clipping, no"
            " GradScaler, scale_grads=False in schedules of pipelines, tell how many backwards make a"
            " step by accumulation=..., or leave overlap out"
        )

    def changed(self, place: GradientPlace, real: Tensor) -> None:
        """Do nothing: nobody has changed what is gone."""

    # -- the end of a pass ------------------------------------------------------------------------

    def _take_the_rest(self, step: UpdatePass) -> None:
        states = self._states
        for param in states.params:
            if param.index in step.grads or not param.count:
                continue
            grad = param.flat_grad()
            if grad is not None:
                if any(t.index in self.updates for t in self._tiles_of.get(param.index, ())):
                    raise ConfigError(
                        f"the gradient of parameter {param.name} came after its tile was updated, which"
                        " overlap=True has done in backward (a frozen parameter that was given one?);"
                        " set it before backward, or leave overlap out"
                    )
                step.grads[param.index] = grad
                step.ready[param.index] = ready_event(param.local.device)
        for tile in states.order(step.grads):
            if tile.index not in self.updates:
                self._submit(tile, step)

    def _check_unchanged(self, step: UpdatePass) -> None:
        states = self._states
        now = states.make_pass({}, None).options
        for old, new in zip(step.options, now, strict=True):
            if not _same(old, new):
                raise ConfigError(
                    "an option of a parameter group was changed between backward and step, when"
                    " overlap=True had used it already; change it after step"
                )
        with self._lock:
            reported, averaged = list(self._used | self._freed), dict(self._averaged)
        for index in reported:
            with self._lock:  # so that it is not used up meanwhile
                is_same = self._is_unchanged(index)
            if not is_same:
                raise self._changed(states.params[index])
        for index, used_values in averaged.items():
            values = states.params[index].flat_grad()
            if values is None or not torch.equal(values, used_values):
                raise self._changed(states.params[index])

    def _is_unchanged(self, index: int) -> bool:
        """Return whether a gradient is as it was reported, or gone. Under the lock."""
        tensor = self._states.params[index].tensor
        if index in self._freed:
            return tensor.grad is None or gradient_here(tensor) is self._freed[index]
        grad, version, fingerprint = self._used[index]
        if tensor.grad is not grad or grad._version != version:
            return False
        return fingerprint is None or _equal(shard_fingerprint(grad), fingerprint)

    def _changed(self, param: Param) -> ConfigError:
        return ConfigError(
            f"the gradient of parameter {param.name} was changed between"
            " backward and step (clipping, unscaling, zero_grad, DistributedDataParallel, the schedule of"
            " a pipeline?), when overlap=True had used it already; use clip_norm=... for clipping,"
            " scale_grads=False in schedules of pipelines, or leave overlap out"
        )

    def _give_up(self) -> None:
        """Forget a pass that failed, when no thread is at work on it any more."""
        try:
            with suppress(BaseException):  # of the updates: the pass has failed already
                self.updates.cancel()
                self.updates.wait()
        finally:
            self._clear()

    def _clear(self) -> None:
        self._step = None
        self._states.holds.end()
        if self._states.gradients is not None:
            self._states.gradients.end()
        self._times.clear()
        self._used.clear()
        self._missing.clear()
        self.updates.clear()
        self._left.clear()
        self.forget_freed()
        self._freeable.clear()
        self._norms.clear()
        self._averaged.clear()
        self._failure = None

    def forget_freed(self) -> None:
        """Take away what stands for gradients that were used up, when no thread is at work on them."""
        for index, stand_in in self._freed.items():
            param = self._states.params[index].tensor
            if gradient_here(param) is stand_in:
                param.grad = None
        self._freed.clear()

    def _read_ahead(self) -> None:
        """Tiles will be visited as in the last pass; in the first, from the last layer on."""
        states = self._states
        known = {tile.index for tile in self._order}
        order = self._order + [t for t in reversed(states.tiles) if t.index not in known]
        rank = {tile.index: place for place, tile in enumerate(order)}
        states.begin_records(order, rank, rotating=RING)


def _check_alone(param: Param, mine: Overlap) -> None:
    """Raise ConfigError if another optimizer updates a parameter in backward."""
    for attempt in range(2):
        reference = _listeners.get(param.tensor)
        other = None if reference is None else reference()
        if other is None or other is mine:
            return
        del other
        if not attempt:
            gc.collect()  # it may be unreachable, and wait for that
    raise ConfigError(
        f"parameter {param.name} is updated in backward by another optimizer with overlap=True, and"
        " would be by both: close() that one first"
    )


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if old.keys() != new.keys():
        return False
    for key, value in old.items():
        other = new[key]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            if value is not other and not torch.equal(value, other):
                return False
        elif value != other:
            return False
    return True
