"""The weights of a model, moved to flash for a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch.nn import Module, Parameter

from penstock.core.errors import ConfigError
from penstock.core.units import format_bytes
from penstock.homed import home_of
from penstock.store.account import Account
from penstock.weights.homes import Home, WeightFiles, is_dense
from penstock.weights.streamer import WeightStreamer


def open_weights(
    model: Module,
    directories: Sequence[str],
    *,
    floor_bytes: int,
    account: Account,
    clock_ns: Callable[[], int],
) -> WeightStreamer:
    """Let the large weights of a model rest in files, and stream them from now on.

    Weights that already have a home, as of a model that was built on flash, keep it. Weights below
    ``floor_bytes`` stay in memory, and so does what shares its storage with other tensors.

    Args:
        model: Its parameters are on the CPU.
        directories: Where the homes are made.
        floor_bytes: Least size of a weight that rests.
        account: Account of the weights in memory, with their limit.
        clock_ns: Returns the time.

    Raises:
        ConfigError: A parameter is on another device, or a part of the model was compiled in place.
        NoSpaceError: The directories have no room; nothing was moved.
        BudgetError: The largest weights do not fit in memory.
    """
    found = list(_large(model, floor_bytes))
    homes = {name: home_of(parameter) for name, parameter in found}
    new = [(name, parameter) for name, parameter in found if homes[name] is None]
    files = WeightFiles(directories)
    moved = {home.name: home for home in files.move_in(new)}
    ordered = [moved.get(name) or cast(Home, homes[name]) for name, _ in found]
    for home in ordered:
        if home.keeper is not None:
            raise ConfigError(f"weight {home.name} is streamed by another open session")
    return WeightStreamer(ordered, account=account, clock_ns=clock_ns)


def _large(model: Module, floor_bytes: int) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters that can rest, each once."""
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            raise ConfigError(
                f"{name or 'the model'} was compiled in place, by module.compile(), which hides its calls"
                " from hooks; with weights='flash' use torch.compile(module) on each block"
            )
    parameters = list(model.named_parameters())
    shared: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for _, parameter in parameters:
            key = parameter.untyped_storage()._cdata
            shared[key] = shared.get(key, 0) + 1
        for name, parameter in parameters:
            if parameter.device.type != "cpu":
                raise ConfigError(
                    f"weights='flash' is for models on the CPU, and parameter {name} is on"
                    f" {parameter.device}"
                )
            storage = parameter.untyped_storage()
            is_own = shared[storage._cdata] == 1 and parameter.storage_offset() == 0
            if parameter.nbytes < floor_bytes or not is_dense(parameter) or not is_own:
                continue
            if home_of(parameter) is not None or storage.nbytes() == parameter.nbytes:
                yield name, parameter


def weights_note(streamer: WeightStreamer) -> str:
    """Return a sentence for the summary on what rests on flash."""
    text = f"weights of {format_bytes(streamer.total_bytes)} rest on flash"
    if streamer.touches:
        name, times = max(streamer.touches.items(), key=lambda each: each[1])
        text += (
            f"; {len(streamer.touches)} of them were used outside of the modules that own them, the most"
            f" {name}, {times} times"
        )
    if streamer.forced:
        text += f"; their limit was exceeded {streamer.forced} times, as all in memory was in use"
    return text
