"""Models whose weights accelerate has offloaded: where they are, and the hooks that bring them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from torch import Tensor
from torch.nn import Module

from penstock.core.errors import ConfigError
from penstock.weights.safetensors import WeightFile, read_offloaded

_HOOK: Final = "_hf_hook"
_FORWARD: Final = "_old_forward"
_KNOWN: Final = ("AlignDevicesHook", "SequentialHook")
_ADDED: Final = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron", "hf_device_map")
"""Attributes that accelerate adds to a model, which are not to be there without its hooks."""


def is_dispatched(model: Module) -> bool:
    """Return whether parameters of a model are on ``meta``, and hooks of accelerate bring them."""
    is_meta = any(parameter.is_meta for parameter in model.parameters())
    return is_meta and any(_HOOK in module.__dict__ for module in model.modules())


def check_hooks(model: Module) -> None:
    """Raise ConfigError if accelerate has hooks in a model that do more than to bring weights."""
    for name, module in model.named_modules():
        for hook in _hooks_of(module):
            if type(hook).__name__ not in _KNOWN:
                raise ConfigError(
                    f"{name or 'the model'} has a {type(hook).__name__} of accelerate, which does more"
                    " than to bring weights: remove it before"
                )


def _hooks_of(module: Module) -> Iterator[Any]:
    found = module.__dict__.get(_HOOK)
    if found is not None:
        yield found
        yield from getattr(found, "hooks", ())


def tie_again(model: Module) -> None:
    """Tie the weights that accelerate has untied, if the model has a ``tie_weights`` for that.

    Call it while the parameters are on ``meta``: of tied weights one is loaded then.
    """
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()


def _maps_of(model: Module) -> Iterator[tuple[str, Any]]:
    """Yield the maps of values that hooks have, each once, and the path of the module that it is of."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for hook in _hooks_of(module):
            values = getattr(hook, "weights_map", None)
            prefix, values = getattr(values, "prefix", ""), getattr(values, "dataset", values)
            if values is not None and id(values) not in seen:
                seen.add(id(values))
                yield (f"{path}." if path else "").removesuffix(prefix), values


def files_of(model: Module) -> list[WeightFile]:
    """Return the files to which accelerate has offloaded a model's weights.

    Raises:
        ConfigError: A type is not known here.
        DamagedError: A file is not intact.
        TransferError: A file cannot be read.
    """
    found: dict[str, WeightFile] = {}
    for path, values in _maps_of(model):
        if getattr(values, "index", None):
            for file in read_offloaded(str(values.save_folder or ""), values.index):
                named = tuple(replace(each, name=path + each.name) for each in file.tensors)
                found[file.path] = replace(file, tensors=named)
    return list(found.values())


def values_of(model: Module) -> dict[str, Tensor]:
    """Return the weights that accelerate keeps in host memory for another device, by name."""
    found: dict[str, Tensor] = {}
    for path, values in _maps_of(model):
        in_memory = getattr(values, "state_dict", values)
        if isinstance(in_memory, dict):
            found.update((f"{path}{name}", each) for name, each in in_memory.items())
    return found


def remove_hooks(model: Module) -> None:
    """Take accelerate's hooks out of a model; its own function would bring all weights to memory."""
    for module in model.modules():
        state = module.__dict__
        state.pop(_HOOK, None)
        forward = state.pop(_FORWARD, None)
        if forward is not None:
            del module.forward
            if getattr(forward, "__func__", None) is not type(module).forward:
                module.forward = forward
        for name in _ADDED:
            state.pop(name, None)
