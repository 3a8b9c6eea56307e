"""Values as torch has them: tensors in the memory of the arrays they are made of, or pinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.core import graph_captures


def to_torch(value: Any, bfloat16: frozenset[str] = frozenset(), name: str = "") -> Any:
    """Arrays become tensors, through dicts, tuples and lists.

    Args:
        value: What was decoded.
        bfloat16: Names of fields whose 16-bit words are bfloat16; ``""``: the value itself.
        name: Of the field that ``value`` is.
    """
    if isinstance(value, np.ndarray):
        tensor = torch.from_numpy(value)
        return tensor.view(torch.bfloat16) if name in bfloat16 else tensor
    if isinstance(value, np.generic):
        return torch.as_tensor(value.item())
    if isinstance(value, dict):
        return {key: to_torch(each, bfloat16, str(key)) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(to_torch(each, bfloat16, name) for each in value)
    if isinstance(value, list) and any(isinstance(each, np.ndarray) for each in value):
        return [to_torch(each, bfloat16, name) for each in value]
    return value


def current_cuda_device() -> int | None:
    """This thread's; None: there is no device."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def pinned(value: Any, device: int | None = None) -> Any:
    """Tensors in page-locked memory, from which copies to a CUDA device need not be waited for.

    Args:
        value: What was decoded.
        device: To be this thread's from now on: a thread's first is device 0, and whoever pins memory
            there while training on another takes some of the memory of both.
    """
    if device is not None:
        torch.cuda.set_device(device)
    with graph_captures.relaxed():
        return _each(value, lambda tensor: tensor.pin_memory())


def nbytes_of(value: Any) -> int:
    """Return the bytes of all tensors of a batch."""
    if type(value) is Tensor:
        return value.untyped_storage().nbytes()
    total = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.untyped_storage().nbytes()
        return tensor

    _each(value, count)
    return total


def _each(value: Any, action: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return action(value)
    if isinstance(value, Mapping):
        return {key: _each(each, action) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_each(each, action) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_each(each, action) for each in value)
    return value
