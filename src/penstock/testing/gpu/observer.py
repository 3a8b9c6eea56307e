"""Reports of the reads and writes of operators on a real device to the order checker.

A dispatch mode sees each operator after it was enqueued: it reads its operands and writes its results on
the current stream. Torch's own callbacks report events, waits and allocations.

Complaints are only hints: there is no callback for blocks that torch's C++ code keeps for other streams,
so a complaint may be wrong, and temporary memory inside an operator is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.testing.access_order import AccessOrder, Span, stream_here, watch

_NO_KERNEL: Final = frozenset(
    {"is_pinned", "record_stream", "resize_", "set_", "_pin_memory", "is_set_to", "lift_fresh"}
)
"""Operators that launch no kernel, although they seem to write."""
_WAITS: Final = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "item", "nonzero"})
"""Operators for whose result the host waits."""


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the operators of the thread that enters it to ``order``."""

    def __init__(self, order: AccessOrder) -> None:
        """Remember the checker."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._order = order

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and report an operator."""
        named = kwargs or {}
        result = func(*args, **named)
        operands = _tensors((args, named))
        device = next(
            (each.device for each in (*operands, *_tensors(result)) if each.is_cuda), None
        )
        name = func._schema.name.rpartition("::")[2]
        if device is None or name in _NO_KERNEL or name.startswith(("empty", "new_empty")):
            return result
        changed = {id(each) for each in _changed(func, args, named)}
        given = {_start(each) for each in operands}
        written = [each for each in operands if id(each) in changed]
        written += [each for each in _tensors(result) if _start(each) not in given]
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                read = [each for each in operands if id(each) not in changed]
                self._tell(name, read, written)
        return result

    def _tell(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        stream = stream_here(torch.cuda.current_stream().cuda_stream)
        if written:  # otherwise it is a view
            self._order.enqueued(stream, map(_span, read), map(_span, written), name)
        if name in _WAITS or any(_pageable(each) for each in written):
            self._order.saw_stream(stream)


@contextmanager
def observed(order: AccessOrder) -> Iterator[None]:
    """Observe this thread, its backward passes, and threads started inside the block."""
    run = threading.Thread.run

    def observe(self: threading.Thread) -> None:
        with OperatorObserver(order):
            run(self)

    watch(order)
    threading.Thread.run = observe  # type: ignore[method-assign]
    try:
        with OperatorObserver(order):
            yield
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
        watch(None)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and _has_memory(each)
    ]


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type in ("cuda", "cpu")


def _changed(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator writes to, by its schema."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[number] if number < len(args) else named.get(argument.name))


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: torch.Tensor) -> Span:
    if not tensor.numel():
        return tensor.data_ptr(), 0, tensor.is_cuda
    reach = sum(
        (length - 1) * step for length, step in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), (reach + 1) * tensor.element_size(), tensor.is_cuda


def _pageable(tensor: torch.Tensor) -> bool:
    """Return whether a copy to the tensor blocks the host."""
    return not tensor.is_cuda and not tensor.is_pinned()
