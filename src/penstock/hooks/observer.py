"""Observer of a pass from which a plan is made: which module made each storage, and which ran when.

The module tracker reports every call of one pass. Facts are exact, or they are not reported:

* The *maker* of a storage is the innermost call that had begun when the storage was created: the call of
  a module which returns it without having received it; otherwise the call that saves it first, unless
  the number of its autograd node shows that it is older. Storages from before the pass have no maker.
* The *producer* of a slot is the innermost call that contains its maker and all calls that saved it.
  Only if that call, or one around it, is recomputed can the storage be freed in between.
* An *operator* is one uninterrupted run of a module's own code. In backward it belongs to the module
  whose node unpacks a saved tensor: nodes are numbered in the order in which modules create them.
"""

from __future__ import annotations

import gc
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from penstock.hooks.modules import OUTSIDE, ModuleTracker, SavingPlace
from penstock.hooks.pure import is_pure
from penstock.hooks.recipe_notes import RecipeNotes
from penstock.plan.operators import Operator
from penstock.runtime.completion import sequence_number
from penstock.runtime.storage import SlotRecord, TensorRef

_node: Final[Callable[[], Any]] = torch._C._current_autograd_node
_task: Final[Callable[[], int]] = torch._C._current_graph_task_id
_StorageOf = Callable[[torch.Tensor], torch.UntypedStorage | None]


@dataclass(slots=True, eq=False)
class _Call:
    """One call of a module."""

    module: torch.nn.Module
    place: SavingPlace
    parent: _Call | None
    depth: int
    number: int
    first_node: int
    """Number of the next autograd node when the call began."""
    end_node: int | None = None
    """Number of the next autograd node when the call had ended."""
    refused: bool = False
    """True if the call did something that cannot be recomputed."""


@dataclass(slots=True, eq=False)
class _Claim:
    """A claim that a storage was made in a call."""

    storage: weakref.ref[torch.UntypedStorage]
    call: _Call | None


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot, the claim on its storage, and the innermost call that contains all its saves."""

    record: SlotRecord
    claim: _Claim | None
    savers: _Call | None


@dataclass(slots=True)
class _Input:
    """An input of a call, with its version at the end of the call."""

    path: str
    tensor: weakref.ref[torch.Tensor]
    version: int


@dataclass(slots=True)
class _Versions:
    """The versions at which a tensor was seen, each with the number of calls begun before."""

    tensor: weakref.ref[torch.Tensor]
    seen: list[tuple[int, int]]


@dataclass
class PassObserver:
    """Observes one pass in the thread that runs its forward.

    Attributes:
        thread: Identifier of that thread.
        unrepeatable: Paths of the modules that were seen to do something that cannot be recomputed.
    """

    modules: ModuleTracker
    thread: int
    compute_ns: Callable[[], int]
    storage_of: _StorageOf
    """Function that returns the storage of a tensor if its values are just strided bytes of one."""
    left_out: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context for work of Penstock's that is no part of what ``compute_ns`` tells."""
    unrepeatable: set[str] = field(default_factory=set)
    _stack: list[_Call] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)
    _first_nodes: list[int] = field(default_factory=list)
    _claims: dict[int, _Claim] = field(default_factory=dict)
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _inputs: list[_Input] = field(default_factory=list)
    _versions: dict[int, _Versions] = field(default_factory=dict)
    _operators: list[Operator] = field(default_factory=list)
    _forward: tuple[_Call, int] | None = None
    _backward: tuple[SavingPlace, int] | None = None

    def __post_init__(self) -> None:
        self._recipes = RecipeNotes(self.storage_of)

    def attach(self) -> None:
        """Begin to observe, in any thread. Existing storages have no maker."""
        self.modules.observer = self
        for tensor in _tensors_alive():
            storage = self.storage_of(tensor)
            if storage is not None:
                self._claims[storage._cdata] = _Claim(TensorRef(storage), None)

    def detach(self) -> None:
        """Stop observing."""
        self.modules.observer = None

    def finish(self, start_ns: int) -> tuple[Operator, ...]:
        """Set the producers in the records and return the operators that ended after ``start_ns``."""
        self._end_backward(self.compute_ns())
        for slot in self._slots.values():
            maker = None if slot.claim is None else slot.claim.call
            both = _common(maker, slot.savers)
            known = both is not None and both.end_node is not None
            slot.record.producer = both.place.path if both is not None and known else None
        for each in self._inputs:  # a recomputation would get a changed input
            tensor = each.tensor()
            if tensor is not None and tensor._version != each.version:
                self.unrepeatable.add(each.path)
        return tuple(each for each in self._operators if each.end_ns > start_ns)

    def refuse_running(self) -> None:
        """Mark the running calls as not recomputable under ``torch.utils.checkpoint``."""
        for call in self._stack:
            call.refused = True
            self.unrepeatable.add(call.place.path)

    # -- calls ------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, place: SavingPlace, args: Any) -> None:
        """Handle the beginning of a call, unless no backward will end what it begins."""
        if threading.get_ident() != self.thread:
            return
        if not self._stack and not torch.is_grad_enabled():
            return
        with self.left_out():
            self._enter(module, place, args)

    def _enter(self, module: torch.nn.Module, place: SavingPlace, args: Any) -> None:
        parent = self._stack[-1] if self._stack else None
        call = _Call(module, place, parent, len(self._stack), len(self._calls), sequence_number())
        self._switch(call)
        self._stack.append(call)
        for tensor in _tensors(args):
            self._note_version(tensor)
        self._recipes.enter(args, pure=is_pure(module))
        self._calls.append(call)
        self._first_nodes.append(call.first_node)
        if not module.training:
            self.unrepeatable.add(place.path)

    def leave(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """Handle the end of a call."""
        stack = self._stack
        if threading.get_ident() != self.thread or not stack or stack[-1].module is not module:
            return
        with self.left_out():
            self._leave(stack.pop(), arguments, output)

    def _leave(self, call: _Call, arguments: Any, output: Any) -> None:
        call.end_node = sequence_number()
        self._switch(call.parent)
        given = set()
        for tensor in _tensors(arguments):
            self._check_unchanged(tensor, call)
            storage = self.storage_of(tensor)
            if storage is not None:
                given.add(storage._cdata)
                self._note_input(storage, call)
        for tensor in _tensors(output):
            self._note_version(tensor)
            storage = self.storage_of(tensor)
            if storage is not None and storage._cdata not in given:
                self._claim(tensor, storage, call)
        named = any(arguments[1])
        self._recipes.leave(output, lambda: call.place.path, refused=call.refused or named)

    def _note_version(self, tensor: torch.Tensor) -> None:
        if tensor.is_inference():  # it has no version, and is not saved
            return
        known = self._versions.get(id(tensor))
        if known is None or known.tensor() is not tensor:
            known = self._versions[id(tensor)] = _Versions(TensorRef(tensor), [])
        if not known.seen or known.seen[-1][1] != tensor._version:
            known.seen.append((len(self._calls), tensor._version))

    def _check_unchanged(self, tensor: torch.Tensor, call: _Call) -> None:
        """Mark a module that changed its input: without the input it cannot be recomputed."""
        if tensor.is_inference():
            return
        known = self._versions.get(id(tensor))
        seen = known.seen if known is not None and known.tensor() is tensor else []
        before = [version for begun, version in seen if begun <= call.number]
        if tensor._version != (before[-1] if before else 0):
            self.unrepeatable.add(call.place.path)
        self._note_version(tensor)
        self._inputs.append(_Input(call.place.path, TensorRef(tensor), tensor._version))

    # -- storages ---------------------------------------------------------------------------------

    def packed(self, record: SlotRecord, tensor: torch.Tensor) -> None:
        """Record that a tensor is saved as the slot ``record``."""
        if _task() != -1 or threading.get_ident() != self.thread or not self._stack:
            self._slots[id(record)] = _Slot(record, None, None)
            return
        self._recipes.packed(record, tensor)
        call = self._stack[-1]
        slot = self._slots.get(id(record))
        if slot is not None:
            slot.savers = _common(slot.savers, call)
            return
        storage = self.storage_of(tensor)
        claim = None if storage is None else self._claim(tensor, storage, call)
        self._slots[id(record)] = _Slot(record, claim, call)

    def _claim(self, tensor: torch.Tensor, storage: torch.UntypedStorage, call: _Call) -> _Claim:
        """Return the claim on a storage; if there is none, make one for the call that made it."""
        known = self._claims.get(storage._cdata)
        if known is not None and known.storage() is storage:
            return known
        base = tensor if tensor._base is None else tensor._base
        maker: _Call | None = call
        if base.grad_fn is not None and base.grad_fn._sequence_nr() < call.first_node:
            maker = self._call_of(base.grad_fn._sequence_nr())
        claim = self._claims[storage._cdata] = _Claim(TensorRef(storage), maker)
        return claim

    def _note_input(self, storage: torch.UntypedStorage, call: _Call) -> None:
        """Correct the claim of a call inside ``call`` to have made ``storage``, an input of ``call``."""
        known = self._claims.get(storage._cdata)
        if known is None or known.storage() is not storage or known.call is None:
            return
        if known.call.number >= call.number:
            known.call = call.parent

    def _call_of(self, node: int) -> _Call | None:
        """Return the innermost call in which an autograd node was created."""
        place = bisect_right(self._first_nodes, node)
        call = self._calls[place - 1] if place else None
        while call is not None and call.end_node is not None and call.end_node <= node:
            call = call.parent
        return call

    # -- operators --------------------------------------------------------------------------------

    def _switch(self, call: _Call | None) -> None:
        """Record that the own code of ``call`` runs from now on."""
        now_ns = self.compute_ns()
        if self._forward is not None:
            running, start_ns = self._forward
            self._add(running.place, start_ns, now_ns, backward=False)
        self._forward = None if call is None or _task() != -1 else (call, now_ns)

    def unpacked(self) -> None:
        """Record that backward unpacks a saved tensor."""
        node = _node()
        if node is None or _task() == -1:
            return
        self.refuse_running()  # the running module runs a backward itself
        call = self._call_of(node._sequence_nr())
        place = OUTSIDE if call is None else call.place
        if self._backward is None or self._backward[0] is not place:
            now_ns = self.compute_ns()
            self._end_backward(now_ns)
            self._backward = place, now_ns

    def _end_backward(self, now_ns: int) -> None:
        if self._backward is not None:
            place, start_ns = self._backward
            self._add(place, start_ns, now_ns, backward=True)
            self._backward = None

    def _add(self, place: SavingPlace, start_ns: int, end_ns: int, *, backward: bool) -> None:
        if end_ns > start_ns:
            self._operators.append(Operator(place.kind, place.path, 0, backward, start_ns, end_ns))


def _common(one: _Call | None, other: _Call | None) -> _Call | None:
    """Return the innermost call that contains both."""
    while one is not other:
        if one is None or other is None:
            return None
        if one.depth >= other.depth:
            one = one.parent
        else:
            other = other.parent
    return one


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _tensors_alive() -> Iterable[torch.Tensor]:
    """Return every tensor that Python code can reach."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
