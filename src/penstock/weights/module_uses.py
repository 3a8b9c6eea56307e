"""Modules that run, and the weights that each uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch.nn import (
    Embedding,
    Module,
    MultiheadAttention,
    TransformerEncoder,
    TransformerEncoderLayer,
)

from penstock.weights.compiled import is_compiled
from penstock.weights.stays import Stay, WeightTable


class _Calls(threading.local):
    """Modules that this thread runs, the innermost last, with what each has pinned."""

    def __init__(self) -> None:
        self.stack: list[tuple[Module, list[Stay]]] = []


class ModuleUses:
    """Weights that modules use: their own, and those of others that they have touched."""

    def __init__(self, table: WeightTable) -> None:
        """Know no module yet."""
        self._table = table
        self._calls = _Calls()
        self._users: WeakKeyDictionary[Module, list[Stay]] = (
            WeakKeyDictionary()
        )  # weights that a module touches beside its own

    @property
    def stack(self) -> list[tuple[Module, list[Stay]]]:
        """Modules that this thread runs, the innermost last, with what each has pinned."""
        return self._calls.stack

    def weights_of(self, module: Module) -> Iterator[Stay]:
        """Yield the weights that a module is known to use, its own first."""
        whole = module if is_compiled(module) else _fused(module)
        if whole is not None:
            owned = [each for inner in whole.modules() for each in inner._parameters.values()]
        else:
            owned = [*module._parameters.values()]
        seen: set[int] = set()
        for parameter in owned:
            stay = None if parameter is None else self._table.stay_of(parameter)
            if stay is not None and stay.index not in seen and not stay.home.is_gathered:
                seen.add(stay.index)
                yield stay
        for stay in self._users.get(module, ()):
            if stay.index not in seen and self._fits_beside_pinned(stay):
                yield stay

    def _fits_beside_pinned(self, stay: Stay) -> bool:
        """Return whether this thread's modules would pin no more than half of the memory with a weight.

        A module may use those of the whole model, which do not fit.
        """
        pinned = sum(each.home.nbytes for _, stays in self.stack for each in stays)
        fits = pinned + stay.home.nbytes <= self._table.account.limit_bytes // 2
        return fits and stay.home.parameter is not None

    def note_user(self, stay: Stay) -> None:
        """Note that the module that runs uses a weight, which is then brought with it."""
        if self.stack:
            module, _ = self.stack[-1]
            users = self._users.setdefault(module, [])
            if stay not in users and not isinstance(module, Embedding):
                users.append(stay)


def _fused(module: Module) -> Module | None:
    """Return the module whose weights torch gives to one kernel, if none has a class of its own.

    So it does without autograd in attention and encoder layers of ``torch.nn``. The kernel rounds
    differently from the modules, and an encoder asks its first layer whether to leave out what is masked.
    """
    if module.training or not isinstance(module, _FUSED):
        return None
    whole = module.layers[0] if isinstance(module, TransformerEncoder) else module
    if torch.is_grad_enabled() and any(each.requires_grad for each in whole.parameters()):
        return None
    return whole


_FUSED: Final = (MultiheadAttention, TransformerEncoder, TransformerEncoderLayer)
