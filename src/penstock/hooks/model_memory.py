"""Memory of the program's own tensors: weights, gradients and the states of optimizers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from penstock.homed import local_of


def model_memory(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, int]:
    """Return the bytes of weights and buffers, of gradients, and of states in torch's optimizers.

    A storage counts once. Takes time in proportion to the number of tensors.
    """
    found = {"weights": _Storages(), "gradients": _Storages(), "states": _Storages()}
    with torch._C.DisableTorchFunctionSubclass():  # a resting weight is not used here
        for module in modules:
            for parameter in module.parameters():
                found["weights"].add(parameter)
                found["gradients"].add(parameter.grad)
            for buffer in module.buffers():
                found["weights"].add(buffer)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    found["states"].add(value)
    return {f"{name}_bytes": each.nbytes for name, each in found.items()}


class _Storages:
    """Sum of the bytes of storages, each counted once."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self.nbytes = 0

    def add(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        try:
            storage = local_of(tensor).untyped_storage()
        except (RuntimeError, ValueError):
            return  # a subclass without a storage of its own, or a lazy module that has not run
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.nbytes += storage.nbytes()
