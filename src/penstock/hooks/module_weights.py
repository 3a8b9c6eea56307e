"""Weights of a network for plans: the module that owns each, the operators that use it, its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch

from penstock.homed import home_of, local_of
from penstock.plan.operators import Operator
from penstock.plan.weights import SMALL_BYTES, ModuleWeights, OperatorRuns

_NO_OPERATORS: Final[Sequence[int]] = ()


class ParameterOwners:
    """Parameters by the module that owns them. A shared one belongs to the module that comes first.

    Attributes:
        owned: Parameters of each module that owns any, by its path.
    """

    def __init__(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Find the parameters of modules, each given with its path."""
        self.owned: dict[str, list[torch.nn.Parameter]] = {}
        self._owner: dict[tuple[str, int], str] = {}
        for path, module in modules:
            for parameter in module.parameters(recurse=False):
                memory = _memory_of(parameter)
                if memory not in self._owner:
                    self._owner[memory] = path
                    self.owned.setdefault(path, []).append(parameter)

    def owner_of(self, tensor: torch.Tensor) -> str | None:
        """Return the path of the module that owns the storage of a tensor; None if none does."""
        return self._owner.get(_memory_of(tensor))

    def weights(
        self,
        operators: Sequence[Operator],
        used: Mapping[str, Iterable[int]],
        final: Mapping[str, int],
        records: Mapping[torch.Tensor, int] = MappingProxyType({}),
    ) -> tuple[ModuleWeights, ...]:
        """Return the weights of each module; of a sharded one this process's part.

        Args:
            operators: Operators of one step.
            used: Indices of the operators that use the weights of a module, by its path.
            final: Index of the operator after which its gradient is final; modules without one get none.
            records: Bytes of the records of parameters whose optimizer has them on flash.
        """
        runs = OperatorRuns(operators)
        return tuple(
            replace(
                self._weights_of(path, runs, used, final),
                record_bytes=sum(records.get(one, 0) for one in parameters),
            )
            for path, parameters in self.owned.items()
        )

    def _weights_of(
        self,
        path: str,
        runs: OperatorRuns,
        used: Mapping[str, Iterable[int]],
        final: Mapping[str, int],
    ) -> ModuleWeights:
        parameters = self.owned[path]
        large = [one for one in parameters if local_of(one).nbytes >= SMALL_BYTES]
        is_small, large = not large, large or parameters
        trained = [local_of(one) for one in parameters if one.requires_grad]
        uses, gradient = runs.uses_of(used[path], final.get(path))
        return ModuleWeights(
            module=path,
            nbytes=sum(local_of(one).nbytes for one in large),
            trained_bytes=sum(local_of(one).nbytes for one in large if one.requires_grad),
            trained=sum(one.numel() for one in trained),
            dtype=str((trained or parameters)[0].dtype).removeprefix("torch."),
            uses=uses,
            gradient=gradient,
            small_bytes=sum(local_of(one).nbytes for one in parameters)
            - sum(local_of(one).nbytes for one in large),
            is_small=is_small,
            on_host=all(_is_on_host(one) for one in large),
        )


def _is_on_host(parameter: torch.nn.Parameter) -> bool:
    home = home_of(parameter)
    return home is not None and home.is_in_memory


def _memory_of(tensor: torch.Tensor) -> tuple[str, int]:
    """Return what identifies the memory of a tensor; that of a weight on flash is its home."""
    home = home_of(tensor)
    return ("storage", tensor.untyped_storage()._cdata) if home is None else ("home", id(home))


def named_modules(
    roots: Iterable[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield all modules with the paths that operators have, from the outermost ones with their names."""
    for name, root in roots:
        for path, module in root.named_modules():
            yield f"{name}.{path}" if path else name, module


def recorded_weights(
    modules: Sequence[tuple[str, torch.nn.Module]],
    operators: Sequence[Operator],
    *,
    has_gradient: Callable[[torch.nn.Parameter], bool] = lambda one: one.grad is not None,
    records: Mapping[torch.Tensor, int] = MappingProxyType({}),
) -> tuple[ModuleWeights, ...]:
    """Return the weights of a step that was observed, which names the module of each operator.

    A weight is used while a module runs that has it; if that module was never called, while the module
    around it runs. Its gradient is final after the last such run in backward.

    Args:
        modules: All modules with the paths that operators have, the outer ones first.
        operators: Operators of the step, in order.
        has_gradient: Returns whether the step makes a gradient of a trained parameter.
        records: Bytes of the records of parameters whose optimizer has them on flash.
    """
    by_path: dict[str, list[int]] = {}
    for index, one in enumerate(operators):
        by_path.setdefault(one.module, []).append(index)
    owners = ParameterOwners(modules)
    used: dict[str, set[int]] = {path: set() for path in owners.owned}
    final: dict[str, int] = {}
    for path, module in modules:
        for parameter in module.parameters(recurse=False):
            owner = owners.owner_of(parameter)
            assert owner is not None
            used[owner].update(_operators_of(path, by_path))
            if parameter.requires_grad and has_gradient(parameter):
                last = max((i for i in used[owner] if operators[i].backward), default=-1)
                final[owner] = last if last >= 0 else len(operators) - 1
    return owners.weights(operators, used, final, records)


def session_weights(
    roots: Iterable[tuple[str, torch.nn.Module]],
    optimizers: Iterable[torch.optim.Optimizer],
    operators: Sequence[Operator],
) -> tuple[ModuleWeights, ...]:
    """Return the weights of a step that was observed, after it: gradients may be gone.

    Args:
        roots: The outermost modules with their names.
        optimizers: Those that have stepped; if their records are on flash, each counts for its weights.
        operators: Operators of the step, in order.
    """
    records: dict[torch.Tensor, int] = {}
    for optimizer in optimizers:
        record_bytes = getattr(optimizer, "record_bytes", None)
        records |= {} if record_bytes is None else record_bytes()
    return recorded_weights(
        list(named_modules(roots)), operators, has_gradient=lambda _: True, records=records
    )


def _operators_of(path: str, by_path: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the operators of a module, or of the nearest one around it that has any."""
    while path not in by_path and "." in path:
        path = path.rpartition(".")[0]
    return by_path.get(path, _NO_OPERATORS)
