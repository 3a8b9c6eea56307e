"""Parameters as an optimizer on flash sees them: laid flat, with a number and what is kept in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.core.errors import ConfigError
from penstock.optim.offloaded_gradient import OffloadedGradient


class Param:
    """One parameter.

    Attributes:
        tensor: The user's.
        group: Number of its group.
        index: Its number in the optimizer.
        name: For messages.
        count: Its elements.
        scalars: What the optimizer keeps for it besides a value for each element.
        has_state: Whether it was updated before.
    """

    __slots__ = (
        "_flat",
        "_key",
        "_seen",
        "count",
        "group",
        "has_state",
        "index",
        "name",
        "scalars",
        "tensor",
    )

    def __init__(self, tensor: Tensor, *, group: int, index: int, name: str) -> None:
        """Take note of a parameter.

        Raises:
            ConfigError: Its elements do not lie densely in memory, are not real floats, or are kept in
                other tensors.
        """
        check_is_plain(tensor, name)
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            raise ConfigError(
                f"parameter {name} is {tensor.dtype}, {tensor.layout}; states on flash are for"
                " strided real floats: keep this one's states in memory, with an optimizer of its own"
            )
        if tensor.device.type == "meta":
            raise ConfigError(
                f"parameter {name} is on the meta device and has no values; materialize the model"
                " first: to_empty(device=...), and load or initialize its weights"
            )
        self.tensor = tensor
        self.group = group
        self.index = index
        self.name = name
        self.count = tensor.numel()
        self.scalars: dict[str, Any] = {}
        self.has_state = False
        self._key = self._now()
        self._flat: Tensor | None = None
        self._seen: tuple[int, int] | None = None
        if not _is_dense(tensor):
            raise ConfigError(
                f"parameter {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} has"
                " gaps or overlaps in memory; make it contiguous"
            )

    def check(self) -> None:
        """Raise ConfigError if it is not what it was."""
        now = self._now()
        if now != self._key:
            old, new = self._key, now
            raise ConfigError(
                f"parameter {self.name} was shape {tuple(old[0])}, {old[2]} on {old[3]}, and is now"
                f" {tuple(new[0])}, {new[2]} on {new[3]} (strides {old[1]}, {new[1]}): its states do"
                " not fit any more; make a new optimizer, or load a state dict into one"
            )

    def note(self) -> None:
        """Remember that its value is what its master says."""
        self._seen = self.tensor._version, self.tensor.data_ptr()

    @property
    def was_set(self) -> bool:
        """Return whether anything else may have changed it since the last ``note``."""
        return self._seen not in (None, (self.tensor._version, self.tensor.data_ptr()))

    def flat(self) -> Tensor:
        """Elements of the parameter in memory order, which share its memory and version."""
        return flat_like(self.tensor.detach(), self.tensor)

    def flat_grad(self) -> Tensor | None:
        """Its gradient in the same order; None: it has none. A copy only if it lies otherwise.

        One that is on flash is given as it is; who reads it there reads it in that order.

        Raises:
            ConfigError: The gradient is sparse.
        """
        grad = self.tensor.grad
        if grad is None or isinstance(grad, OffloadedGradient):
            return grad
        if grad.layout != torch.strided:
            raise ConfigError(
                f"parameter {self.name} has a sparse gradient; states on flash need dense ones:"
                " Embedding(..., sparse=False)"
            )
        grad = grad.detach()
        if grad.stride() != self.tensor.stride():
            laid = torch.empty_like(self.tensor, dtype=grad.dtype, requires_grad=False)
            grad = laid.copy_(grad)
        return flat_like(grad, self.tensor)

    def in_shape(self, flat: Tensor) -> Tensor:
        """Values in the order of ``flat``, in the parameter's shape; shares memory."""
        return flat.as_strided(self.tensor.shape, self.tensor.stride())

    def _now(self) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
        tensor = self.tensor
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check_is_plain(tensor: Any, name: str) -> None:
    """Raise ConfigError for a parameter that keeps its values in other tensors, as a DTensor does."""
    if is_traceable_wrapper_subclass(tensor):
        raise ConfigError(
            f"parameter {name} is a {type(tensor).__name__}, which keeps its values in other tensors"
            " (FSDP2's fully_shard and tensor parallelism turn parameters into DTensors); states on"
            " flash are for plain tensors: keep the states of this optimizer in memory, or train with"
            " DistributedDataParallel"
        )


def flat_like(tensor: Tensor, model: Tensor) -> Tensor:
    """``tensor``, of the strides of the dense ``model``, as one line."""
    return tensor.as_strided((model.numel(),), (1,))


def fresh_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that a step may change."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars.items()}


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory, in whichever order."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
