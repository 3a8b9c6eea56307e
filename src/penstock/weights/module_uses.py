"""Modules that run, and the weights that each uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn import (
    Embedding,
    Module,
    MultiheadAttention,
    Parameter,
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
        if is_compiled(module):
            owned = [each for inner in module.modules() for each in inner._parameters.values()]
        else:
            owned = [*module._parameters.values(), *_fused(module)]
        seen: set[int] = set()
        for parameter in owned:
            stay = None if parameter is None else self._table.stay_of(parameter)
            if stay is not None and stay.index not in seen and not stay.home.is_gathered:
                seen.add(stay.index)
                yield stay
        users = self._users.get(module, [])
        if any(stay.home.parameter is None for stay in users):  # the program has dropped it
            users[:] = [stay for stay in users if stay.home.parameter is not None]
        for stay in users:
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


def _fused(module: Module) -> list[Parameter]:
    """Return the weights that torch gives to one kernel for a whole module, if it may do so.

    It does without autograd in attention and encoder layers of ``torch.nn``, if none of these weights has
    a class of its own. The kernel rounds differently from the modules, and an encoder asks the weights of
    its first layer whether to leave out what is masked. The input may forbid it, and is not known here.
    """
    if not isinstance(module, _FUSED) or not torch.backends.mha.get_fastpath_enabled():
        return []
    asked = module.layers[0] if isinstance(module, TransformerEncoder) else module
    if asked.training or torch.is_autocast_enabled() or not _has_kernel(module):
        return []
    named = dict(asked.named_parameters(remove_duplicate=False))
    weights = [named[name] for name in _GIVEN if name in named]
    if torch.is_grad_enabled() and any(each.requires_grad for each in weights):
        return []
    return weights


def _has_kernel(module: Any) -> bool:
    """Return whether torch has a kernel for what an attention, encoder layer or encoder computes."""
    forward = type(module).forward
    if forward is TransformerEncoder.forward:
        return bool(getattr(module, "use_nested_tensor", False))
    attention = getattr(module, "self_attn", module)
    if not (
        getattr(attention, "batch_first", False)
        and getattr(attention, "_qkv_same_embed_dim", True)
        and attention._parameters.get("in_proj_bias") is not None
        and attention.num_heads % 2 == 0
    ):
        return False
    if forward is MultiheadAttention.forward:
        return module.bias_k is None and module.bias_v is None and not module.add_zero_attn
    return (
        forward is TransformerEncoderLayer.forward
        and module.activation_relu_or_gelu != 0
        and getattr(module.norm1, "eps", None) == getattr(module.norm2, "eps", None)
        and not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    )


_FUSED: Final = (MultiheadAttention, TransformerEncoder, TransformerEncoderLayer)

_OF_ATTENTION: Final = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
_GIVEN: Final = (
    *_OF_ATTENTION,
    *(f"self_attn.{name}" for name in _OF_ATTENTION),
    *(
        f"{part}.{name}"
        for part in ("norm1", "norm2", "linear1", "linear2")
        for name in ("weight", "bias")
    ),
)
"""Names of the weights that torch gives to the kernels of attention, and of encoder layers."""
