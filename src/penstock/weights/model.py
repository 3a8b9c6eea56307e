"""Which weights of a model rest on flash."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import torch
from torch.nn import Module, Parameter

from penstock.core.errors import ConfigError, PenstockWarning
from penstock.core.units import format_bytes
from penstock.homed import home_of, paused_holders
from penstock.weights.homes import Home, WeightFiles, is_dense, use_count
from penstock.weights.importing import load_dispatched

_NAMED: Final = 3
"""Weights that a warning names."""


def rest_weights(
    model: Module,
    check: Callable[[list[tuple[int, str]]], None],
    *,
    files: WeightFiles,
    floor_bytes: int,
    kind: type[Home] = Home,
    is_able: Callable[[Parameter], bool] | None = None,
) -> list[Home]:
    """Let the large weights of a model rest in files, and return their homes.

    Weights that already have a home, as of a model that was built on flash, keep it. Weights below
    ``floor_bytes`` stay in memory, and so does what shares its storage with other tensors. A model that
    accelerate has offloaded to disk is taken over.

    Args:
        model: Its parameters are on the CPU, or where ``is_able`` says.
        check: Called with length and name of each, before any is moved.
        files: Where the homes are made.
        floor_bytes: Least size of a weight that rests.
        kind: Class of the homes.
        is_able: Returns whether a parameter can rest; None: those on the CPU, and others are an error.

    Raises:
        ConfigError: A parameter is on another device.
        NoSpaceError: The directories have no room; nothing was moved.
        TransferError: A weight could not be written; it and those after it are still in memory.
    """
    load_dispatched(model, files, floor_bytes=floor_bytes)
    shared: list[tuple[str, Parameter]] = []
    found = list(_large(model, floor_bytes, shared, is_able))
    check([(parameter.nbytes, name) for name, parameter in found])
    homes = {name: home_of(parameter) for name, parameter in found}
    new = [(name, parameter) for name, parameter in found if homes[name] is None]
    with paused_holders():
        moved = {home.name: home for home in files.move_in(new, kind)}
    ordered = [moved.get(name) or cast(Home, homes[name]) for name, _ in found]
    for (name, _), home in zip(found, ordered, strict=True):
        if home.keeper is None:
            home.rename(name)
        if home.room is None:
            home.room = files.tier
    shared = [(name, parameter) for name, parameter in shared if parameter not in files.left]
    if shared:
        files.left.update((parameter, name) for name, parameter in shared)
        _warn_of(shared)
    return ordered


def _warn_of(shared: Sequence[tuple[str, Parameter]]) -> None:
    names = ", ".join(name for name, _ in shared[:_NAMED]) + (
        ", ..." if len(shared) > _NAMED else ""
    )
    nbytes = sum(each.nbytes for _, each in shared)
    warnings.warn(
        f"{format_bytes(nbytes)} of weights stay in memory, because other tensors share it, or a graph"
        f" that awaits its backward does: {names}",
        PenstockWarning,
        stacklevel=2,
    )


def _large(
    model: Module,
    floor_bytes: int,
    others: list[tuple[str, Parameter]],
    is_able: Callable[[Parameter], bool] | None,
) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters that can rest, each once.

    Args:
        model: The model.
        floor_bytes: Least size.
        others: Gets those whose memory tensors share that are no parameters of the model.
        is_able: See ``rest_weights``.
    """
    parameters = list(model.named_parameters())
    shared: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for _, parameter in parameters:
            key = parameter.untyped_storage()._cdata
            shared[key] = shared.get(key, 0) + 1
        for name, parameter in parameters:
            if is_able is None and parameter.device.type != "cpu":
                raise ConfigError(
                    f"weights='flash' is for models on the CPU, and parameter {name} is on"
                    f" {parameter.device}"
                )
            storage = parameter.untyped_storage()
            is_own = shared[storage._cdata] == 1 and parameter.storage_offset() == 0
            has_home = home_of(parameter) is not None
            if has_home and is_able is not None:
                yield name, parameter
                continue
            if parameter.nbytes < floor_bytes or not is_dense(parameter) or not is_own:
                continue
            if is_able is not None and not is_able(parameter):
                continue
            if has_home:
                yield name, parameter
            elif use_count(storage) > _own_uses():
                others.append((name, parameter))
            elif storage.nbytes() == parameter.nbytes:
                yield name, parameter


def _own_uses() -> int:
    """Return the use count of memory to which one tensor refers, and one variable."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return use_count(storage)
