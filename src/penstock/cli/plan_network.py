"""Subjects of ``penstock plan``: a network of the zoo, a function in a file, or a profile in a file.

Only the first two load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.files import read_text
from penstock.plan.machine import Machine
from penstock.plan.micro_batches import BatchedStep, accumulated, micro_batched
from penstock.plan.profile import Profile
from penstock.plan.weights import ModuleWeights

ALL: Final = "all"
"""Value of ``--policy`` for all policies, not for the one of this name."""
OPTIMIZER_COPIES: Final = {"sgd": 0, "momentum": 1, "adam": 2}
"""Number of tensors of a parameter's size that each optimizer keeps."""
FORMATS: Final = ("exact", "split", "bf16", "int8")
"""Formats of the optimizer's records: those of ``penstock.optim.formats``, which loads torch."""
OF_RANKS: Final = ("nodes", "ssds", "links", "network_rate", "peer_rate", "parallel")
"""Options that go with ``--ranks`` only."""
OF_GRADIENTS: Final = ("update", "gradient_memory", "accumulate", "parts")
"""Options of whole steps that say when gradients are made and used, beside ``--clip``."""
_RETURNS: Final = "it returns (module, inputs), or (module, inputs, loss)"


@dataclass(frozen=True)
class TrainingSetup:
    """Settings of training that its profile depends on."""

    machine: Machine
    device: str
    """Device: with ``"cpu"`` the budget is for saved tensors, with ``"cuda"`` for the whole device."""
    optimizer: str
    autocast: str | None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of ``dry_step``."""
        return {
            "machine": self.machine,
            "device": self.device,
            "optimizer_state_copies": OPTIMIZER_COPIES[self.optimizer],
            "autocast": self.autocast,
            "whole_device": self.device == "cuda",
        }


class StepShapes(Protocol):
    """A profile made from shapes alone, and its weights (``penstock.lab.dry.DryStep``)."""

    @property
    def profile(self) -> Profile:
        """The profile."""

    @property
    def weights(self) -> tuple[ModuleWeights, ...]:
        """The weights of each module that has any."""

    @property
    def tokens(self) -> int:
        """Tokens in the step's inputs; 0 if they are no tokens."""


@dataclass(frozen=True)
class PlannedNetwork:
    """The network or profile to plan for."""

    name: str
    step_of: Callable[[int], StepShapes] | None
    """Function that makes the profile of a batch, with its weights; None if there is only ``profile``."""
    profile: Profile | None = None

    def profile_of(self, batch: int) -> Profile:
        """Return the profile of a batch."""
        assert self.step_of is not None
        return self.step_of(batch).profile


def subject(text: str, training: TrainingSetup, settings: Mapping[str, Any]) -> PlannedNetwork:
    """Find the network that the user names.

    Args:
        text: A name of the zoo, ``file.py:function``, or a path that ends with ``.json``.
        training: Settings of the training; ignored for a profile.
        settings: Overrides for the zoo.

    Raises:
        ConfigError: There is no such network, file or function.
        PlanError: The file has no valid profile.
    """
    path, colon, function = text.rpartition(":")
    if colon and path.endswith(".py"):
        _refuse_settings(settings, text)
        return PlannedNetwork(text, _from_function(path, function, training))
    if text.endswith(".py"):
        raise ConfigError(f"{text!r}: name a function in it, like {text}:build; {_RETURNS}")
    if text.endswith(".json"):
        _refuse_settings(settings, text)
        return PlannedNetwork(text, None, _read(text))
    importlib.import_module("penstock.lab.zoo").config(text, **settings)  # fails before any work
    dry = importlib.import_module("penstock.lab.dry")

    def step_of(batch: int) -> StepShapes:
        with _user_code(f"{text} with a batch of {batch}"):
            step: StepShapes = dry.dry_zoo_step(text, batch, **training.settings, **settings)
        return step

    return PlannedNetwork(text, step_of)


def whole_step_option(options: argparse.Namespace) -> str:
    """Return the option that asks for the plan of a whole step, as it was given."""
    return "--ranks" if options.weights == "keep" else f"--weights {options.weights}"


def several_batches(
    step_of: Callable[[int], StepShapes], *, accumulate: int, parts: int
) -> Callable[[int], StepShapes]:
    """Return the function that makes a step of so many backwards, each with so many micro-batches."""
    count = accumulate * parts

    def made(batch: int) -> StepShapes:
        if batch % count:
            raise ConfigError(
                f"a batch of {batch} cannot be divided into {count} equal parts by --accumulate"
                f" {accumulate} and --parts {parts}"
            )
        one = step_of(batch // count)
        profile, weights = one.profile, one.weights
        if parts > 1:
            profile, weights = micro_batched(profile, weights, parts)
        if accumulate > 1:
            profile, weights = accumulated(profile, weights, accumulate)
        return BatchedStep(profile, weights, count * one.tokens)

    return step_of if count == 1 else functools.cache(made)


def parse_settings(words: list[str]) -> dict[str, Any]:
    """Parse ``["image_size=96", "size=tiny"]`` into keyword arguments for the zoo."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--set: {word!r} is not NAME=VALUE, like image_size=96")
        found[name] = _value(value)
    return found


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _refuse_settings(settings: Mapping[str, Any], text: str) -> None:
    if settings:
        raise ConfigError(f"--set {next(iter(settings))}: {text!r} is not a network of the zoo")


def _read(path: str) -> Profile:
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the profile {path!r}: {error}") from error
    return Profile.from_json(text, source=path)


def _from_function(path: str, name: str, training: TrainingSetup) -> Callable[[int], StepShapes]:
    build = _load(path, name)
    dry = importlib.import_module("penstock.lab.dry")
    torch = importlib.import_module("torch")

    def step_of(batch: int) -> StepShapes:
        where = f"{path}:{name}({batch})"
        with _user_code(where), torch.device("meta"):
            made = build(batch)
        module, inputs, loss = _unpack(made, where, torch)
        with _user_code(where):
            step: StepShapes = dry.dry_step(module, loss, inputs=inputs, **training.settings)
        return step

    return step_of


def _load(path: str, name: str) -> Callable[[int], Any]:
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path!r}: the file does not exist")
    module_name = file.stem
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(module_name, module)
    sys.path.insert(0, str(file.resolve().parent))
    with _user_code(path):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise ConfigError(f"{path!r} has no function {name!r}; it has {', '.join(known) or 'none'}")
    checked: Callable[[int], Any] = function
    return checked


@contextlib.contextmanager
def _user_code(where: str) -> Any:
    """Send prints to standard error, and turn exceptions into one-line errors."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where} failed: {type(error).__name__}: {error}; --debug shows where"
        ) from error


def _unpack(made: Any, where: str, torch: Any) -> tuple[Any, tuple[Any, ...], Any]:
    parts = made if isinstance(made, tuple) else (made,)
    if len(parts) not in (2, 3) or not isinstance(parts[0], torch.nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ConfigError(f"{where} returned ({kinds}); {_RETURNS}")
    module, inputs = parts[:2]
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list) or not all(
        isinstance(one, torch.Tensor) for one in inputs
    ):
        raise ConfigError(f"{where}: its inputs are {type(inputs).__name__}, not tensors")
    return module, tuple(inputs), parts[2] if len(parts) == 3 else _sum_of_output(where, torch)


def _sum_of_output(where: str, torch: Any) -> Callable[..., Any]:
    """Return the default loss: the sum of the module's output."""

    def loss(module: Any, *inputs: Any) -> Any:
        output = module(*inputs)
        if not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"{where}: the module returns {type(output).__name__}, not a tensor; return a loss as the"
                " third value: loss(module, *inputs)"
            )
        return output.sum()

    return loss
