"""What a forward changes beside its outputs: buffers, attributes, and the states of random generators.

A module that is run again has to find what it found the first time, and may leave no trace: the running
statistics of a BatchNorm count a batch once, and spectral normalization goes one step, not two. So the
state is noted before a forward, and put in place while that is run again. Tensors are exchanged, never
written to: no version counter moves, and whoever holds a buffer holds the same one afterwards.

Not seen, as under ``torch.utils.checkpoint``: what a forward changes within a list, a dictionary or
another object, and what does not belong to the module or to one inside it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from penstock.core.errors import InPlaceError
from penstock.core.units import KIB

SMALL_BYTES: Final = 64 * KIB
"""Buffers up to this size are copied without looking whether they change: on a GPU to look is to wait."""
_ABSENT: Final = object()
_Attributes = dict[str, Any]


class ModuleState:
    """The state of a module, and of those inside it, before one of its forwards.

    1. Make it before the forward.
    2. ``settle`` it after: what has not changed is let go.
    3. ``restored`` as often as the forward is run again.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        """Note the state of ``root`` as it is."""
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
        """The forward is over: keep only what it has changed."""
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
        """Within, everything is as it was before the forward; afterwards, as it was on entering.

        Raises:
            InPlaceError: A parameter of ``name``, as the module is called, has changed since.
        """
        self._check_parameters(name)
        now = [(module, dict(module.__dict__), dict(module._buffers)) for module in self._modules]
        python, numpy = random.getstate(), np.random.get_state()
        try:
            self._put_back()
            yield
        finally:
            for module, attributes, buffers in now:
                _assign(module.__dict__, attributes)
                _assign(module._buffers, buffers)
            if self._python is not None:
                random.setstate(python)
            if self._numpy is not None:
                np.random.set_state(numpy)

    def _put_back(self) -> None:
        copies = {key: copy.clone() for key, (_, copy) in self._copies.items()}  # for one run
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

    def _check_parameters(self, name: str) -> None:
        for parameter, version in self._versions:
            if parameter._version != version:
                raise InPlaceError(
                    f"{name} is to be run again for its backward, but a parameter of it of"
                    f" {tuple(parameter.shape)} has been modified by an inplace operation since its"
                    f" forward: it is at version {parameter._version}, not {version}; do that after the"
                    " backward, or give recompute=False"
                )


def _copies(buffers: list[_Attributes]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Each buffer and a copy of it, by the buffer's id, which it keeps from being used again."""
    with torch.no_grad():
        return {
            id(each): (each, each.detach().clone())
            for named in buffers
            for each in named.values()
            if each is not None
        }


def _changed(before: _Attributes, now: _Attributes) -> _Attributes:
    """What ``before`` has instead of what ``now`` has, without the tables of parameters and the like."""
    changed = {name: value for name, value in before.items() if now.get(name, _ABSENT) is not value}
    changed.update((name, _ABSENT) for name in now if name not in before)
    return changed


def _assign(target: _Attributes, wanted: _Attributes) -> None:
    for name in [name for name in target if name not in wanted]:
        del target[name]
    for name, value in wanted.items():
        if target.get(name, _ABSENT) is not value:
            target[name] = value


def _same_numpy(left: Any, right: Any) -> bool:
    return bool(left[2:] == right[2:] and np.array_equal(left[1], right[1]))
