"""Find by trial the states of an optimizer, and whether it treats each element alone.

A few steps are made on two small tensors, once whole and once in pieces. If the results differ by a
bit, an element's update depends on more than its own gradient and state (a norm, a row, a
line search), and the optimizer cannot be run on tiles.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.optim.config import StatesConfig
from penstock.optim.formats import State

_COUNT: Final = 1024
_CUTS: Final = (0, 256, 768, _COUNT)
_STEPS: Final = 3
_REFUSED: Final = ("differentiable", "capturable")

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ProbedOptimizer:
    """The optimizer whose states go to flash, and what is known of them beforehand."""

    reference: weakref.ref[torch.optim.Optimizer]
    """The optimizer, which holds its states; in a circle, dropped ones would live until a collection."""
    cls: type[torch.optim.Optimizer]
    """The class whose step is run on tiles."""
    config: StatesConfig
    initial: Callable[[Group], Mapping[str, Any]]
    """States that exist before a first step, given a group's options: a number where each element has
    it, a tensor where the parameter has one."""
    prefers_master: bool
    """True if 16-bit parameters have a float32 master, unless the config says."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer, which uses its states and so is there."""
        found = self.reference()
        assert found is not None, "states outlive their optimizer"
        return found

    @property
    def with_master(self) -> bool:
        """Return whether they have one."""
        master = self.config.master
        return self.prefers_master if master is None else master

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.cls.__name__


@dataclass(frozen=True, slots=True)
class KeptStates:
    """States that an optimizer keeps for each parameter of a group."""

    states: tuple[State, ...]
    """A value for each element."""
    scalars: tuple[str, ...]
    """One value for the parameter; these stay in memory."""
    tensors: tuple[str, ...] = ()
    """Those scalars that are tensors."""


def raw_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """A class's own step, without the hooks that torch puts around it and with gradients off.

    The hooks are for the step that the user calls, not for each piece of it.
    """
    step = cls.step
    while getattr(step, "hooked", False) or getattr(step, "__name__", "") == "_use_grad":
        inner = getattr(step, "__wrapped__", None)
        if inner is None:
            break
        step = inner
    raw = inspect.unwrap(step) if step.__module__.startswith("torch.optim") else step
    return torch.no_grad()(raw)


def workhorse(source: ProbedOptimizer) -> torch.optim.Optimizer:
    """An optimizer of the class, set up like the one there is, with no parameters and no states."""
    made: torch.optim.Optimizer = object.__new__(source.cls)
    mine = source.optimizer.__dict__
    made.__dict__.update(
        {k: v for k, v in mine.items() if k not in ("state", "param_groups", "_penstock")}
    )
    made.state = defaultdict(dict)
    made.param_groups = []
    return made


def probe(
    source: ProbedOptimizer,
    group: Group,
    dtype: torch.dtype,
    initial: Mapping[str, Any],
    *,
    where: str,
) -> KeptStates:
    """See what steps with a group's options keep.

    Args:
        source: The optimizer.
        group: Options, without parameters.
        dtype: Of what is updated: the parameters, or their float32 masters.
        initial: What ``source.initial`` gives.
        where: Which group, for errors.

    Raises:
        ConfigError: It cannot be run on tiles; with the reason.
    """
    for option in _REFUSED:
        if group.get(option):
            raise ConfigError(f"{where}: {option}=True is not for states on flash; leave it out")
    name = source.name
    if issubclass(source.cls, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ConfigError(f"{where}: {name} is not element-wise; states on flash need that")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_COUNT, generator=generator).to(dtype)
    grads = [torch.randn(_COUNT, generator=generator).to(dtype) for _ in range(_STEPS)]
    try:
        trial = _Trial(source, group, initial, grads)
        whole, states = trial.run(start.view(32, -1), (0, _COUNT))
        parts, _ = trial.run(start, _CUTS)
    except ConfigError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {name} does not work on a tensor of its own, which states on flash need:"
            f" {type(error).__name__}: {error}"
        ) from error
    if not torch.equal(whole, parts):
        raise ConfigError(
            f"{where}: {name} is not element-wise: a tensor's update differs from that of its parts,"
            " so it cannot be run on tiles; keep its states in memory, or use an element-wise one"
            " (Adam, AdamW, SGD, Adagrad, RMSprop, Lion, ...)"
        )
    return _classify(states, where, name)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A few steps of an optimizer like that of ``source``, on a small tensor."""

    source: ProbedOptimizer
    group: Group
    initial: Mapping[str, Any]
    grads: Sequence[Tensor]

    def run(self, start: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Mapping[str, Any]]:
        """Update a tensor cut at ``cuts``; return the result, and the states of the first piece."""
        horse = workhorse(self.source)
        values = start.clone()
        flat = values.view(-1)
        ranges = list(itertools.pairwise(cuts))
        parts = [values] if len(ranges) == 1 else [flat[a:b] for a, b in ranges]
        horse.param_groups = [{**self.group, "params": parts}]
        for part in parts:
            horse.state[part] = {
                k: v.clone() if isinstance(v, Tensor) else torch.full_like(part, v)
                for k, v in self.initial.items()
            }
        step = raw_step(self.source.cls)
        counts = _numbers(horse)
        for grad in self.grads:
            for part, (a, b) in zip(parts, ranges, strict=True):
                part.grad = grad[a:b].clone().view(part.shape)
            step(horse)
        changed = sorted(name for name, _ in _numbers(horse) ^ counts)
        if changed:
            raise ConfigError(
                f"{self.source.name} changes {', '.join(dict.fromkeys(changed))} of a group or of itself"
                " in each step, and a step on flash is made of many; it should keep that by parameter,"
                " in its state"
            )
        return flat, horse.state[parts[0]]


def _numbers(horse: torch.optim.Optimizer) -> set[tuple[str, float]]:
    """Return numbers outside its states in which an optimizer may count."""
    owners = (horse.param_groups[0], horse.__dict__)
    return {
        (repr(name), float(value))
        for owner in owners
        for name, value in owner.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _classify(states: Mapping[str, Any], where: str, name: str) -> KeptStates:
    kept, scalars = [], []
    for key, value in states.items():
        if isinstance(value, Tensor) and value.numel() == _COUNT:
            kept.append(State(key, value.dtype))
        elif not isinstance(value, Tensor) or value.numel() == 1:
            scalars.append(key)
        else:
            raise ConfigError(
                f"{where}: {name} keeps {key!r} of shape {tuple(value.shape)} for a parameter of"
                " shape (32, 32), so it is not element-wise and cannot be run on tiles"
            )
    tensors = [key for key in scalars if isinstance(states[key], Tensor)]
    return KeptStates(tuple(kept), tuple(scalars), tuple(tensors))
