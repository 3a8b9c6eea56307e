"""Memory of a job between two steps: parameters, gradients, buffers, states of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from penstock.io.mapping import PAGE_BYTES
from penstock.io.pages import PageRange, PrivateMemory, whole_pages

LEAST_BYTES: Final = 16 * PAGE_BYTES
"""Minimum size of a storage, in whole pages, that is moved: less is not worth the cost."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SuspendableStorage:
    """A storage that can be suspended."""

    name: str
    """Name of the first tensor found in it, such as ``"layer.weight"``."""
    storage: torch.UntypedStorage = field(repr=False)  # repr would read closed pages
    pages: PageRange | None
    """Whole pages of the storage; None for one in device memory, which is moved as a whole."""

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        return self.storage.nbytes() if self.pages is None else self.pages.nbytes


def tensors_of(
    modules: Iterable[tuple[str, torch.nn.Module]],
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that persist between steps, with names. Some may be repeated.

    Args:
        modules: Modules with their names.
        optimizers: Optimizers, whose parameters and nested ``state`` are included.
    """
    for prefix, module in modules:
        for name, parameter in module.named_parameters(prefix):
            yield from _with_gradient(name, parameter)
        yield from module.named_buffers(prefix)
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield from _with_gradient(f"{kind}.{number}.{place}", parameter)
        for place, state in enumerate(tuple(optimizer.state.values())):
            yield from _nested(f"{kind}.state.{place}", state)


def _with_gradient(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, parameter
    if parameter.grad is not None:
        yield from _parts(f"{name}.grad", parameter.grad)


def _parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the dense tensors that back ``tensor``."""
    if tensor.layout is torch.sparse_coo:
        yield f"{name}.indices", tensor._indices()
        yield f"{name}.values", tensor._values()
    else:
        yield name, tensor


def _nested(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield from _parts(name, value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _nested(f"{name}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _nested(f"{name}.{place}", each)


def storages_of(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[list[SuspendableStorage], dict[str, str]]:
    """Return the storages that can be suspended, and the reasons for tensors that cannot, by name.

    Small storages stay resident and are not named.
    """
    private = PrivateMemory()
    held: dict[int, SuspendableStorage] = {}
    stay: dict[str, str] = {}
    for name, tensor in tensors:
        try:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        except (RuntimeError, ValueError):  # a subclass without one, or lazy
            stay[name] = f"a {type(tensor).__name__} has no storage of its own"
            continue
        if storage._cdata in held or storage.nbytes() < LEAST_BYTES:
            continue
        if storage.device.type == "meta":
            stay[name] = "it is on the meta device, without data"
            continue
        if storage.device.type != "cpu":
            held[storage._cdata] = SuspendableStorage(name=name, storage=storage, pages=None)
            continue
        pages = whole_pages(storage.data_ptr(), storage.nbytes())
        if storage.is_shared():
            stay[name] = "its memory is shared with other processes"
        elif not private.holds(pages):
            stay[name] = "its memory is mapped from a file, or read-only"
        elif pages.nbytes >= LEAST_BYTES:
            held[storage._cdata] = SuspendableStorage(name=name, storage=storage, pages=pages)
    return list(held.values()), stay
