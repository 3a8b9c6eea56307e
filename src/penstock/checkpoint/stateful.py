"""Parts of a state: objects with a state of their own, optimizers, tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
import torch

from penstock.checkpoint.values import MAX_DEPTH
from penstock.core.errors import CheckpointError, PenstockError
from penstock.optim import OnFlash

LIKE_LISTS: Final = (list, tuple)


class Stateful(Protocol):
    """Modules, optimizers, schedulers, scalers, samplers and what else has these two."""

    def state_dict(self) -> Any:
        """Return the state to save."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Set it."""


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether ``value`` is an object with ``state_dict`` and ``load_state_dict``."""
    kind = type(value)
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def is_plain_value(value: object, depth: int = 0) -> bool:
    """Return whether nothing in it has memory or a state of its own: only numbers, words and the like."""
    if isinstance(value, torch.Tensor | np.ndarray) or is_stateful(value) or depth > MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return all(is_plain_value(each, depth + 1) for each in value.values())
    if isinstance(value, list | tuple):
        return all(is_plain_value(each, depth + 1) for each in value)
    return True


def refilled(target: object, made: Any) -> Any:
    """A list, set or dictionary of plain values with others in it, however many; or those."""
    if isinstance(target, list) and isinstance(made, list):
        target[:] = made
        return target
    is_dict = isinstance(target, MutableMapping) and isinstance(made, dict)
    if is_dict or (isinstance(target, set) and isinstance(made, set)):
        both: Any = target
        both.clear()
        both.update(made)
        return both
    return made


def plain_state(state: object, private: list[Any], depth: int = 0) -> Any:
    """A state with objects replaced by their ``state_dict()``.

    Args:
        state: It.
        private: Where those are added that were made for the occasion and have memory of their own.
        depth: How deep this lies.
    """
    if is_stateful(state):
        made = state.state_dict()
        if isinstance(stepped(state), OnFlash):
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
        optimizer = stepped(state)
        return [] if optimizer is None or isinstance(optimizer, OnFlash) else [optimizer]
    if depth > MAX_DEPTH or is_stateful(state):
        return []
    if isinstance(state, Mapping):
        return [found for each in state.values() for found in optimizers_in(each, depth + 1)]
    if isinstance(state, list | tuple):
        return [found for each in state for found in optimizers_in(each, depth + 1)]
    return []


def stepped(value: object) -> torch.optim.Optimizer | None:
    """The optimizer that steps where one stands, which may be a wrapper around it.

    Those of accelerate and Lightning are optimizers by their class, and were never made one; what
    torch keeps of an optimizer, its hooks among it, is the other's. None: there is none to be found.
    """
    for _ in range(MAX_DEPTH):
        if not isinstance(value, torch.optim.Optimizer):
            return None
        if "_optimizer_step_pre_hooks" in vars(value):
            return value
        value = getattr(value, "optimizer", None)
    return None


def taker_of(target: Stateful) -> Stateful:
    """Return the object that loads a state: the optimizer itself where torch would load its wrapper."""
    if isinstance(target, torch.optim.Optimizer) and not _has_own_load(target):
        return stepped(target) or target
    return target


def _has_own_load(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors within dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for each in value.values() for found in tensors_in(each)]
    if isinstance(value, list | tuple):
        return [found for each in value for found in tensors_in(each)]
    return []


def give_state(target: Stateful, state: Any, name: str) -> Stateful:
    """Give an object its state, every bit of it, and return it.

    Args:
        target: It.
        state: As its ``state_dict`` was.
        name: What to call it in errors.

    Raises:
        CheckpointError: It does not take it.
    """
    try:
        target.load_state_dict(state)
        if isinstance(target, torch.optim.Optimizer) and not _has_own_load(target):
            _undo_casts(target, state)
    except PenstockError:
        raise
    except Exception as error:
        kind = type(target).__name__
        raise CheckpointError(
            f"{name}: load_state_dict of {kind} does not take what the checkpoint has"
            f" ({type(error).__name__}: {error}), which is another kind's or no one's. Other parts have"
            " been set by now: do not train on before another checkpoint is loaded over all of them"
        ) from error
    return target


def _undo_casts(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put back what torch has cast to the type of its parameter, as NAdam's numbers to bfloat16."""
    has_hooks = (
        optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
    )
    if has_hooks:
        return  # what they have made of it is theirs
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [each for group in state["param_groups"] for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        ours = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(number, {}).items():
            cast = ours.get(key)
            if isinstance(value, torch.Tensor) and isinstance(cast, torch.Tensor):
                ours[key] = cast if cast.dtype == value.dtype else value.to(cast.device)
