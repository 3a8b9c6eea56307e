"""Parts of a state: objects with a state of their own, optimizers, tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
import torch

from penstock.checkpoint.values import MAX_DEPTH
from penstock.core.errors import CheckpointError, PenstockError
from penstock.homed import has_address
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


def parts_of(state: object, depth: int = 0) -> Iterator[object]:
    """Yield the values within nested dictionaries, lists and tuples, down to objects with a state.

    A container that is nested too deeply is yielded itself.
    """
    if depth > MAX_DEPTH or is_stateful(state):
        yield state
    elif isinstance(state, Mapping):
        for each in state.values():
            yield from parts_of(each, depth + 1)
    elif isinstance(state, list | tuple):
        for each in state:
            yield from parts_of(each, depth + 1)
    else:
        yield state


def is_plain_value(value: object) -> bool:
    """Return whether nothing in it has memory or a state of its own: only numbers, words and the like."""
    others = (torch.Tensor, np.ndarray, Mapping, list, tuple)
    return not any(isinstance(each, others) or is_stateful(each) for each in parts_of(value))


def refilled(target: object, made: Any) -> Any:
    """Return a list, set or dictionary with its contents replaced; or, for another value, the new one."""
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
    """Return a state with objects replaced by their ``state_dict()``.

    Args:
        state: The state.
        private: List to which parts are added that were made for this call, in memory of their own.
        depth: Number of containers around it.
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


def frozen_in(state: object) -> list[torch.Tensor]:
    """Return the parameters of a state's modules that need no gradient and have an address."""
    modules = (each for each in parts_of(state) if isinstance(each, torch.nn.Module))
    found = (each for module in modules for each in module.parameters())
    return [each for each in found if not each.requires_grad and has_address(each)]


def optimizers_in(state: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a state whose states are in memory."""
    found = (stepped(each) for each in parts_of(state))
    return [each for each in found if each is not None and not isinstance(each, OnFlash)]


def stepped(value: object) -> torch.optim.Optimizer | None:
    """Return the optimizer that steps, which may be within a wrapper; None if there is none.

    The wrappers of accelerate and Lightning are optimizers by their class, but were never initialised as
    such: hooks and whatever else torch keeps of an optimizer belong to the inner one.
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


def give_state(target: Stateful, state: Any, name: str) -> Stateful:
    """Give an object its state, every bit of it, and return it.

    Args:
        target: The object.
        state: Result of its ``state_dict``.
        name: Its name in errors.

    Raises:
        CheckpointError: The object refuses the state.
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
