"""Which weights of a model rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from penstock.core.errors import ConfigError, PenstockWarning
from penstock.core.units import format_bytes
from penstock.homed import home_of, is_sharded, local_of, paused_holders, use_count
from penstock.store.base import Place, Tier
from penstock.weights.fsdp import Gathered, GatheredHome, GatheredWeights, is_whole
from penstock.weights.homes import Home, WeightPlaces, is_dense, own_uses, setting_of
from penstock.weights.importing import load_dispatched

_NAMED: Final = 3
"""Weights that a warning names."""


def rest_weights(
    model: Module,
    check: Callable[[list[tuple[int, str]]], None],
    *,
    places: WeightPlaces,
    floor_bytes: int,
    kind: type[Home] = Home,
    gathered_kind: type[Gathered] | None = GatheredHome,
    is_able: Callable[[Parameter], bool] | None = None,
) -> list[Home]:
    """Let the large weights of a model rest, and return their homes.

    Weights that already have a home, as of a model that was built on flash, keep it. Weights below
    ``floor_bytes`` stay in memory, and so does what shares its storage with other tensors. A model that
    accelerate has offloaded is taken over. Of parameters that are spread over ranks, what this
    process has of each rests.

    Args:
        model: Its parameters are on the CPU, or where ``is_able`` says.
        check: Called with length and name of each, before any is moved.
        places: Where the homes are made.
        floor_bytes: Least size of a weight that rests.
        kind: Class of the homes.
        gathered_kind: Class of the homes of what FSDP2 spreads over ranks; None: DTensors are an error.
        is_able: Returns whether a parameter can rest; None: those on the CPU, and others are an error.

    Raises:
        ConfigError: A parameter is on another device, or is spread over ranks in a way that cannot be.
        NoSpaceError: The places have no room; nothing was moved.
        TransferError: A weight could not be written; it and those after it are still in memory.
    """
    load_dispatched(model, places, floor_bytes=floor_bytes)
    shared: list[tuple[str, Parameter]] = []
    gathered = GatheredWeights(model, gathered_kind, setting=setting_of(places))
    found = list(_large(model, floor_bytes, shared, is_able, gathered))
    check(list(_sizes(found, gathered)))
    homes = {name: home_of(parameter) for name, parameter in found}
    new = [(name, parameter) for name, parameter in found if homes[name] is None]
    with paused_holders():

        def make(name: str, parameter: Parameter, tier: Tier, place: Place) -> Home:
            return gathered.makers.get(id(parameter), kind)(name, parameter, tier, place)

        moved = {home.name: home for home in places.move_in(new, make)}
    ordered = [moved.get(name) or cast(Home, homes[name]) for name, _ in found]
    for (name, _), home in zip(found, ordered, strict=True):
        if home.keeper is None:
            home.rename(name)
        if home.room is None:
            home.room = places.room
    shared = [(name, parameter) for name, parameter in shared if parameter not in places.left]
    if shared:
        places.left.update((parameter, name) for name, parameter in shared)
        _warn_of(shared)
    return ordered


def _sizes(
    found: Sequence[tuple[str, Parameter]], gathered: GatheredWeights
) -> Iterator[tuple[int, str]]:
    """Yield length and name of what is in memory together: a weight, or what ranks exchange at once."""
    groups: dict[int, list[tuple[str, int]]] = {}
    for name, parameter in found:
        nbytes, group = local_of(parameter).nbytes, gathered.groups.get(id(parameter))
        if group is None:
            yield nbytes, name
        else:
            groups.setdefault(group, []).append((name, nbytes))
    for each in groups.values():
        more = f" and {len(each) - 1} more" if len(each) > 1 else ""
        yield sum(nbytes for _, nbytes in each), each[0][0] + more


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
    gathered: GatheredWeights,
) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters that can rest, each once.

    Args:
        model: The model.
        floor_bytes: Least size.
        others: Gets those whose memory tensors share that are no parameters of the model.
        is_able: See ``rest_weights``.
        gathered: Those that FSDP2 spreads over ranks.
    """
    parameters = list(_own_parameters(model))
    shared: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for _, parameter in parameters:
            key = local_of(parameter).untyped_storage()._cdata
            shared[key] = shared.get(key, 0) + 1
        for name, parameter in parameters:
            if is_able is None and parameter.device.type != "cpu":
                raise ConfigError(
                    f"weights='flash' is for models on the CPU, and parameter {name} is on"
                    f" {parameter.device}"
                )
            if gathered.kind is None and is_sharded(parameter):
                raise ConfigError(
                    f"parameter {name} is spread over ranks: shard the model on the device, by"
                    " fully_shard or parallelize_module, and leave out device= of the session"
                )
            local = local_of(parameter)
            storage = local.untyped_storage()
            is_own = shared[storage._cdata] == 1 and local.storage_offset() == 0
            has_home = home_of(parameter) is not None
            if has_home and is_able is not None:
                yield name, parameter
                continue
            if local.nbytes < floor_bytes or not is_dense(local) or not is_own:
                continue
            if is_able is not None and not is_able(parameter):
                continue
            if has_home:
                yield name, parameter
            elif use_count(storage) > own_uses() + gathered.uses(parameter):
                others.append((name, parameter))
            elif storage.nbytes() == parameter.nbytes or is_sharded(parameter):
                yield name, parameter


def _own_parameters(model: Module) -> Iterator[tuple[str, Parameter]]:
    """Yield names and dense parameters, each once, but what ranks have exchanged for the present."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if not isinstance(
                parameter, Parameter
            ):  # functional_call puts tensors there for a while
                continue
            if is_lazy(parameter) or parameter.is_inference():  # no values yet, or no version
                continue
            if id(parameter) in seen or is_whole(module, name):
                continue
            if parameter.layout != torch.strided:  # sparse: its parts are tensors of their own
                continue
            seen.add(id(parameter))
            yield f"{path}.{name}" if path else name, parameter
