"""What is in a state: objects with a state of their own, optimizers, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeGuard

import torch

from penstock.checkpoint.values import MAX_DEPTH
from penstock.optim import OnFlash

LIKE_LISTS: Final = (list, tuple)


class Stateful(Protocol):
    """Modules, optimizers, schedulers, scalers, samplers and what else has these two."""

    def state_dict(self) -> Any:
        """What is to be saved."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Set it."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether it is an object with ``state_dict`` and ``load_state_dict``."""
    kind = type(value)
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def plain_state(state: object, private: list[Any], depth: int = 0) -> Any:
    """A state with objects replaced by their ``state_dict()``.

    Args:
        state: It.
        private: Where those are added that were made for the occasion and have memory of their own.
        depth: How deep this lies.
    """
    if is_stateful(state):
        made = state.state_dict()
        if isinstance(state, OnFlash):
            private.append(made)
        return made
    if depth < MAX_DEPTH:
        if type(state) is dict:
            return {key: plain_state(each, private, depth + 1) for key, each in state.items()}
        if type(state) in LIKE_LISTS:
            items: Any = state
            return type(items)(plain_state(each, private, depth + 1) for each in items)
    return state


def frozen_in(state: object, depth: int = 0) -> list[torch.Tensor]:
    """The parameters of modules in a state that need no gradient."""
    if isinstance(state, torch.nn.Module):
        return [each for each in state.parameters() if not each.requires_grad]
    if depth < MAX_DEPTH and isinstance(state, Mapping):
        return [found for each in state.values() for found in frozen_in(each, depth + 1)]
    if depth < MAX_DEPTH and isinstance(state, list | tuple):
        return [found for each in state for found in frozen_in(each, depth + 1)]
    return []


def optimizers_in(state: object, depth: int = 0) -> list[torch.optim.Optimizer]:
    """The optimizers of a state whose states are in memory."""
    if isinstance(state, torch.optim.Optimizer):
        return [] if isinstance(state, OnFlash) else [state]
    if depth > MAX_DEPTH or is_stateful(state):
        return []
    if isinstance(state, Mapping):
        return [found for each in state.values() for found in optimizers_in(each, depth + 1)]
    if isinstance(state, list | tuple):
        return [found for each in state for found in optimizers_in(each, depth + 1)]
    return []


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors within dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for each in value.values() for found in tensors_in(each)]
    if isinstance(value, list | tuple):
        return [found for each in value for found in tensors_in(each)]
    return []
