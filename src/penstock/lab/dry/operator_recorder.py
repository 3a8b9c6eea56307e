"""Recorder of every operator of a step, with its time by the roofline and its module.

[Note: which module an operator belongs to]
    In forward an operator belongs to the innermost running module. In backward no module runs, and it
    belongs to the autograd node that is being evaluated. Nodes are numbered when they are created, while
    their module runs and before their operator is called. So whenever an operator is seen in forward, all
    nodes created since the last change of module belong to this module. A gradient that is stored or
    accumulated belongs to the node that it came from, which was evaluated just before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.hooks.modules import ModuleTracker
from penstock.lab.dry.ledger import StorageLedger
from penstock.lab.dry.operator_work import tensors_in, work_of
from penstock.lab.dry.roofline import operator_ns
from penstock.lab.dry.weight_recorder import WeightRecorder
from penstock.observe.clock import ManualClock
from penstock.plan.machine import Compute
from penstock.plan.operators import Operator

_next_node: Final[Callable[[], int]] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_node: Final[Callable[[], Any]] = torch._C._current_autograd_node
_task: Final[Callable[[], int]] = torch._C._current_graph_task_id
_ACCUMULATE_NODE: Final = "torch::autograd::AccumulateGrad"


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of operators; it advances the clock by their times. Enter it within a FakeTensorMode.

    Attributes:
        operators: The operators called so far.
        place: Path of the module that the last operator belongs to.
    """

    def __init__(
        self,
        *,
        clock: ManualClock,
        compute: Compute,
        ledger: StorageLedger,
        modules: ModuleTracker,
        nonzero_count: int | None,
        weights: WeightRecorder,
    ) -> None:
        """Prepare for one step.

        Args:
            clock: Clock to advance.
            compute: Compute of the machine for which operators are timed.
            ledger: Account of storages.
            modules: Tracker of the running module.
            nonzero_count: Number of elements that ``aten.nonzero`` is assumed to find.
            weights: Is told which operators use which weights.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.place = ""
        self._clock = clock
        self._compute = compute
        self._ledger = ledger
        self._modules = modules
        self._nonzero_count = nonzero_count
        self._weights = weights
        self._nodes_until: list[int] = []
        self._places: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator on shapes."""
        options = kwargs or {}
        if func is torch.ops.prim.device.default:  # called more often than all others together
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args)
        backward = _task() != -1
        self.place = self._module_in_backward() if backward else self._module_in_forward()
        if func is torch.ops.aten.nonzero.default and self._nonzero_count is not None:
            shape = (self._nonzero_count, args[0].dim())
            out = torch.empty(shape, dtype=torch.int64, device=args[0].device)
        else:
            out = func(*args, **options)
        self._record(func, args, options, out, backward=backward)
        return out

    def _record(
        self, func: Any, args: tuple[Any, ...], options: Mapping[str, Any], out: Any, backward: bool
    ) -> None:
        start_ns = self._clock.now_ns()
        for tensor in tensors_in((out,)):
            self._ledger.add(tensor, at_ns=start_ns)
        work = work_of(func, args, options, out)
        if work is None:
            return
        took_ns = operator_ns(
            self._compute,
            flops=work.flops,
            moved_bytes=work.moved_bytes,
            half=work.half,
            dense=work.dense,
            product=work.product,
        )
        self._clock.advance(took_ns)
        self._weights.used(func, args, options, len(self.operators))
        self.operators.append(
            Operator(
                name=work.name,
                module=self.place,
                pass_index=1,
                backward=backward,
                start_ns=start_ns,
                end_ns=start_ns + took_ns,
                flops=work.flops,
                moved_bytes=work.moved_bytes,
                convolution=work.convolution,
                half=work.half,
                product=work.product,
            )
        )

    def _module_in_forward(self) -> str:
        """Return the running module; see [Note: which module an operator belongs to]."""
        place = self._modules.here.path
        until = _next_node()
        if self._places and self._places[-1] == place:
            self._nodes_until[-1] = until
        else:
            self._places.append(place)
            self._nodes_until.append(until)
        return place

    def _module_in_backward(self) -> str:
        """Return the running module in a recomputation of forward, else the one that made the node."""
        if self._modules.here.kind:
            return self._module_in_forward()
        node = _node()
        if node is None or node.name() == _ACCUMULATE_NODE:
            return self.place
        found = bisect_right(self._nodes_until, node._sequence_nr())
        return self._places[found] if found < len(self._places) else self.place
