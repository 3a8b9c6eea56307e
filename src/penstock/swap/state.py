"""What a job holds between two steps: parameters, gradients, buffers, states of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from penstock.io.mapping import PAGE_BYTES
from penstock.io.pages import Pages, PrivateMemory, whole_pages

LEAST_BYTES: Final = 16 * PAGE_BYTES
"""A storage with less of whole pages stays: to move it would cost more than it holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A storage that can be suspended."""

    name: str
    """Of the first tensor that was found to be in it, as ``"layer.weight"``."""
    storage: torch.UntypedStorage = field(repr=False)  # which reads it, and it may be closed
    pages: Pages | None
    """Its whole pages; None: it is in the memory of a device, and goes as a whole."""

    @property
    def nbytes(self) -> int:
        """How much of it goes."""
        return self.storage.nbytes() if self.pages is None else self.pages.nbytes


def tensors_of(
    modules: Iterable[tuple[str, torch.nn.Module]],
    optimizers: Iterable[torch.optim.Optimizer],
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a step leaves behind, by name. One may come more than once.

    Args:
        modules: By a name for each.
        optimizers: Their parameters and what ``state`` holds of them, however it is nested.
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
    """It, or what a sparse one is made of, which is what has memory."""
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
) -> tuple[list[Held], dict[str, str]]:
    """The storages that can be suspended, each once; and of the tensors that stay, why.

    Storages that are small stay and are not named.
    """
    private = PrivateMemory()
    held: dict[int, Held] = {}
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
            held[storage._cdata] = Held(name=name, storage=storage, pages=None)
            continue
        pages = whole_pages(storage.data_ptr(), storage.nbytes())
        if storage.is_shared():
            stay[name] = "its memory is shared with other processes"
        elif not private.holds(pages):
            stay[name] = "its memory is mapped from a file, or read-only"
        elif pages.nbytes >= LEAST_BYTES:
            held[storage._cdata] = Held(name=name, storage=storage, pages=pages)
    return list(held.values()), stay
