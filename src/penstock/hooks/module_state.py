"""State that a forward changes beside its outputs: buffers, attributes and random generators.

A recomputed module must see the same state as the first time and must leave no trace: the running
statistics of a BatchNorm count a batch once, and spectral normalization advances one step, not two. So
the state is recorded before a forward and restored while the module is recomputed. Tensors are
exchanged, never written to: no version counter changes, and references to buffers stay valid.

As under ``torch.utils.checkpoint``, two changes are not seen: those inside a list, a dictionary or
another object, and those outside the module and its submodules.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from penstock.core.errors import InPlaceError
from penstock.core.units import KIB

SMALL_BYTES: Final = 64 * KIB
"""Maximum size of a buffer that is copied without comparing it: on a GPU a comparison is a wait."""
_ABSENT: Final = object()
_Attributes = dict[str, Any]


class ModuleState:
    """The state of a module and its submodules before one of its forwards.

    1. Create it before the forward.
    2. Call ``settle`` after the forward: it drops what has not changed.
    3. Enter ``restored`` each time the forward is recomputed.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        """Record the present state of ``root``."""
        self._modules = tuple(root.modules())
        self._training = [module.training for module in self._modules]
        self._attributes = [dict(module.__dict__) for module in self._modules]
        self._buffers = [dict(module._buffers) for module in self._modules]
        self._names = [frozenset(buffers) for buffers in self._buffers]
        self._copies = _copies(self._buffers)
        self._versions = [(each, each._version) for each in root.parameters()]
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state()

    def settle(self) -> None:
        """Keep only what the forward, which is over, has changed."""
        self._attributes = [
            _changed(before, module.__dict__)
            for before, module in zip(self._attributes, self._modules, strict=True)
        ]
        for module, buffers in zip(self._modules, self._buffers, strict=True):
            for name, before in tuple(buffers.items()):
                if module._buffers.get(name) is before and not self._may_have_changed(before):
                    del buffers[name]
        kept = {id(before) for buffers in self._buffers for before in buffers.values()}
        self._copies = {key: pair for key, pair in self._copies.items() if key in kept}
        if random.getstate() == self._python:
            self._python = None
        if _same_numpy(np.random.get_state(), self._numpy):
            self._numpy = None

    def _may_have_changed(self, before: torch.Tensor | None) -> bool:
        if before is None:
            return False
        copy = self._copies[id(before)][1]
        if copy.numel() * copy.element_size() <= SMALL_BYTES:
            return copy.numel() > 0
        return not torch.equal(before, copy)

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Restore the state before the forward inside the block, and the present state after it.

        Args:
            name: The module's name, for messages.

        Raises:
            InPlaceError: A parameter of the module has changed since.
        """
        check_parameters(name, self._versions)
        now = [(module, dict(module.__dict__), dict(module._buffers)) for module in self._modules]
        python: Any = None if self._python is None else random.getstate()  # takes long
        numpy: Any = None if self._numpy is None else np.random.get_state()
        try:
            self._put_back()
            yield
        finally:
            for module, attributes, buffers in now:
                _assign(module.__dict__, attributes)
                _assign(module._buffers, buffers)
            if python is not None:
                random.setstate(python)
            if numpy is not None:
                np.random.set_state(numpy)

    def _put_back(self) -> None:
        copies = {
            key: copy.clone() for key, (_, copy) in self._copies.items()
        }  # used up by one recomputation
        for module, training, attributes, names, buffers in zip(
            self._modules,
            self._training,
            self._attributes,
            self._names,
            self._buffers,
            strict=True,
        ):
            module.training = training
            for name, value in attributes.items():
                if value is _ABSENT:
                    module.__dict__.pop(name, None)
                else:
                    module.__dict__[name] = value
            for name in [each for each in module._buffers if each not in names]:
                del module._buffers[name]
            for name, before in buffers.items():
                module._buffers[name] = None if before is None else copies[id(before)]
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            np.random.set_state(self._numpy)


def check_parameters(name: str, versions: Iterable[tuple[torch.Tensor | None, int]]) -> None:
    """Raise InPlaceError if a parameter of the module of this name has another version than then."""
    for parameter, version in versions:
        if parameter is not None and parameter._version != version:
            raise InPlaceError(
                f"cannot recompute {name} for its backward: a parameter of shape"
                f" {tuple(parameter.shape)} has been modified by an inplace operation since its"
                f" forward (version {parameter._version}, expected {version}); modify it after the"
                " backward, or pass recompute=False"
            )


def _copies(buffers: list[_Attributes]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return each buffer with a copy of it, by the buffer's id; holding it keeps the id unique."""
    with torch.no_grad():
        return {
            id(each): (each, each.detach().clone())
            for named in buffers
            for each in named.values()
            if each is not None
        }


def _changed(before: _Attributes, now: _Attributes) -> _Attributes:
    """Return the entries of ``before`` that differ in ``now``; ``_ABSENT`` for those only in ``now``."""
    if _are_same(before, now):
        return {}
    changed = {name: value for name, value in before.items() if now.get(name, _ABSENT) is not value}
    changed.update((name, _ABSENT) for name in now if name not in before)
    return changed


def _are_same(left: _Attributes, right: _Attributes) -> bool:
    """Return whether they surely hold the same objects: most do, in the same order."""
    return (
        len(left) == len(right)
        and all(map(operator.is_, left.values(), right.values()))
        and all(map(operator.eq, left, right))
    )


def _assign(target: _Attributes, wanted: _Attributes) -> None:
    if _are_same(target, wanted):
        return
    for name in [name for name in target if name not in wanted]:
        del target[name]
    for name, value in wanted.items():
        if target.get(name, _ABSENT) is not value:
            target[name] = value


def _same_numpy(left: Any, right: Any) -> bool:
    return bool(left[2:] == right[2:] and np.array_equal(left[1], right[1]))
