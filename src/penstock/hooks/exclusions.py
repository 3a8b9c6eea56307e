"""Storages that are never offloaded: parameters, buffers, and views or casts of them.

``isinstance(tensor, Parameter)`` misses ``weight.t()``, slices of flat parameters and autocast's copies
(TRAPS rules 2 and 3). So parameters are recognized by their storages, and other tensors are followed
along their graph, through views and casts, to the leaf that they came from.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

import torch

from penstock.homed import local_of
from penstock.runtime.storage import TensorRef

_TRANSPARENT: Final = frozenset(
    {
        "AliasBackward0",
        "AsStridedBackward0",
        "DetachBackward0",
        "ExpandBackward0",
        "NarrowBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SqueezeBackward1",
        "TBackward0",
        "TransposeBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""Nodes whose output is a view of their input."""
_CASTS: Final = frozenset({"ToCopyBackward0"})
"""Nodes whose output is a copy of their input in another dtype."""
_DEPTH: Final = 8
_OPAQUE: Final[set[type]] = set()
"""Types of nodes found to be neither: looking up the type is cheaper than reading the name."""


class ProtectedStorages:
    """Storages of parameters, buffers and optimizer state. Only ``holds`` is thread-safe.

    Attributes:
        storages: The storages by address; an address may have been used again.
    """

    def __init__(self) -> None:
        """Protect nothing yet."""
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add_module(self, module: torch.nn.Module) -> None:
        """Protect the parameters and buffers of a module, now and after each ``refresh``."""
        self._modules.add(module)
        self._protect(module.parameters())
        self._protect(module.buffers())

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Protect an optimizer's parameters and state tensors, now and after each ``refresh``."""
        self._optimizers.add(optimizer)
        for group in optimizer.param_groups:
            self._protect(group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                self._protect(value for value in state.values() if isinstance(value, torch.Tensor))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The known optimizers that are alive."""
        return list(self._optimizers)

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The known root modules that are alive."""
        return list(self._modules)

    def refresh(self) -> None:
        """Collect the storages again: moving, loading or unsharding parameters replaces them."""
        self.storages = {}
        for module in tuple(self._modules):
            self.add_module(module)
        for optimizer in tuple(self._optimizers):
            self.add_optimizer(optimizer)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether this very storage is protected; a reused address does not count."""
        known = self.storages.get(storage._cdata)
        return known is not None and known() is storage

    def _protect(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            try:
                with torch._C.DisableTorchFunctionSubclass():  # a resting weight is not used here
                    storage = local_of(tensor).untyped_storage()
            except (RuntimeError, ValueError):
                continue  # a subclass without a storage of its own, or a lazy module that has not run
            self.storages[storage._cdata] = TensorRef(storage)


def leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:  # noqa: PLR0911  (each rules one kind out)
    """Return the leaf requiring gradients of which ``tensor`` is a view or a cast, or which it is."""
    node = tensor.grad_fn
    if node is None:
        return tensor if tensor.requires_grad else None
    if not tensor._is_view():
        if type(node) in _OPAQUE:  # most tensors: hot
            return None
    elif (base := tensor._base) is not None and base.is_leaf and base.requires_grad:
        return base
    for _ in range(_DEPTH):
        if node is None:
            return None
        kind = type(node)
        if kind in _OPAQUE:
            return None
        name = node.name()
        if name == "torch::autograd::AccumulateGrad":
            leaf = node.variable  # type: ignore[attr-defined]
            return leaf if isinstance(leaf, torch.Tensor) else None
        if name not in _TRANSPARENT and name not in _CASTS:
            if kind.__name__ == name:  # otherwise several kinds of nodes share the type
                _OPAQUE.add(kind)
            return None
        node = node.next_functions[0][0]
    return None
