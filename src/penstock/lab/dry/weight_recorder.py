"""Recorder of the weights of a network: whose they are, which operators use them, and their gradients.

An operator uses a weight if it is called with it, or with a view of it. Operators of one module that
follow each other are one use: its weights stay in memory between them. A gradient is final when autograd
has accumulated it. It is there from the first operator of backward that uses the weight, or of the run of
operators at whose end it is final.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from penstock.lab.dry.operator_work import tensors_in
from penstock.plan.operators import Operator
from penstock.plan.weights import ModuleWeights, WeightUse


class WeightRecorder:
    """Uses of the parameters of one module tree, by the module that owns them."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Find the parameters. One that shares a storage belongs to the module that is found first."""
        self._owned: dict[str, list[torch.nn.Parameter]] = {}
        self._owner: dict[int, str] = {}
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                cdata = parameter.untyped_storage()._cdata
                if cdata not in self._owner:
                    self._owner[cdata] = path
                    self._owned.setdefault(path, []).append(parameter)
        self._used: dict[str, list[int]] = {path: [] for path in self._owned}
        self._final: dict[str, int] = {}

    def watch(self, operators: Sequence[Operator]) -> None:
        """Note after which of ``operators``, which grows, each gradient is final."""
        for path, parameters in self._owned.items():
            for one in parameters:
                if one.requires_grad:
                    one.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        self._noting(path, operators)
                    )

    def _noting(self, path: str, operators: Sequence[Operator]) -> Any:
        def note(_: torch.Tensor) -> None:
            self._final[path] = max(0, len(operators) - 1)

        return note

    def used(self, args: Sequence[Any], options: Mapping[str, Any], index: int) -> None:
        """Note the arguments of the operator of this index."""
        for tensor in tensors_in((*args, *options.values())):
            path = self._owner.get(tensor.untyped_storage()._cdata)
            if path is not None:
                used = self._used[path]
                if not used or used[-1] != index:
                    used.append(index)

    def found(self, operators: Sequence[Operator]) -> tuple[ModuleWeights, ...]:
        """Return the weights of each module, after the step."""
        runs = _Runs(operators)
        return tuple(self._of(path, runs) for path in self._owned)

    def _of(self, path: str, runs: _Runs) -> ModuleWeights:
        parameters = self._owned[path]
        trained = [one for one in parameters if one.requires_grad]
        places = set(map(runs.of, self._used[path]))
        gradient = None
        if path in self._final:
            end = runs.of(self._final[path])
            places.add(end)  # the update needs the weights
            begin = min(place for place in places if place == end or runs.use(place).backward)
            gradient = WeightUse(runs.use(begin).first, runs.use(end).last, backward=True)
        return ModuleWeights(
            module=path,
            nbytes=sum(map(_nbytes, parameters)),
            trained_bytes=sum(map(_nbytes, trained)),
            trained=sum(one.numel() for one in trained),
            dtype=str((trained or parameters)[0].dtype).removeprefix("torch."),
            uses=tuple(map(runs.use, sorted(places))),
            gradient=gradient,
        )


class _Runs:
    """Runs of operators of one module and direction that follow each other."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._uses = list(_runs(operators))
        self._of = [place for place, use in enumerate(self._uses) for _ in _indices(use)]

    def of(self, operator: int) -> int:
        return self._of[operator]

    def use(self, place: int) -> WeightUse:
        return self._uses[place]


def _runs(operators: Sequence[Operator]) -> Iterator[WeightUse]:
    if not operators:
        return
    first = 0
    for index, (one, other) in enumerate(pairwise(operators)):
        if (one.module, one.backward) != (other.module, other.backward):
            yield WeightUse(first, index, one.backward)
            first = index + 1
    yield WeightUse(first, len(operators) - 1, operators[-1].backward)


def _indices(use: WeightUse) -> range:
    return range(use.first, use.last + 1)


def _nbytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()
