"""Recorder of the weights of a network: whose they are, which operators use them, and their gradients.

An operator uses a weight if it is called with it, or with a view of it. Operators of one module that
follow each other are one use: its weights stay in memory between them. An embedding of which few rows are
looked up is not used: they are read where it rests. A gradient is final when autograd has accumulated it.
It is there from the first operator of backward that uses the weight, or of the run of operators at whose
end it is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.hooks.module_weights import ParameterOwners
from penstock.lab.dry.operator_work import tensors_in
from penstock.plan.operators import Operator
from penstock.plan.weights import ModuleWeights
from penstock.weights.homes import ROWS_SHARE


class WeightRecorder:
    """Uses of the parameters of one module tree, by the module that owns them."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Find the parameters. One that shares a storage belongs to the module that is found first."""
        self._owners = ParameterOwners(model.named_modules())
        self._used: dict[str, list[int]] = {path: [] for path in self._owners.owned}
        self._final: dict[str, int] = {}

    def watch(self, operators: Sequence[Operator]) -> None:
        """Note after which of ``operators``, which grows, each gradient is final."""
        for path, parameters in self._owners.owned.items():
            for one in parameters:
                if one.requires_grad:
                    one.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        self._noting(path, operators)
                    )

    def _noting(self, path: str, operators: Sequence[Operator]) -> Any:
        def note(_: torch.Tensor) -> None:
            self._final[path] = max(0, len(operators) - 1)

        return note

    def used(self, func: Any, args: Sequence[Any], options: Mapping[str, Any], index: int) -> None:
        """Note the arguments of the operator of this index."""
        if func is torch.ops.aten.embedding.default and _looks_up_few(*args[:2]):
            return
        for tensor in tensors_in((*args, *options.values())):
            path = self._owners.owner_of(tensor)
            if path is not None:
                used = self._used[path]
                if not used or used[-1] != index:
                    used.append(index)

    def found(self, operators: Sequence[Operator]) -> tuple[ModuleWeights, ...]:
        """Return the weights of each module, after the step."""
        return self._owners.weights(operators, self._used, self._final)


def _looks_up_few(weight: torch.Tensor, indices: torch.Tensor) -> bool:
    return indices.numel() * ROWS_SHARE < weight.size(0)
