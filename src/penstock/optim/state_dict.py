"""State dicts, streamed: a tile at a time, out into a mapped file and in from whatever there is.

What ``save`` makes interchanges with torch's: states by name in the parameter's shape, compact ones
unpacked. A float32 master that the parameter does not hold itself is one more state, ``"master"``.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.units import MIB, round_up
from penstock.homed import local_of
from penstock.io.files import open_unlinked_buffered
from penstock.io.traffic_report import written
from penstock.observe.clients import OPTIMIZER
from penstock.optim import packing
from penstock.optim.formats import MASTER, UNIT, Array
from penstock.optim.holds import WeightHolds
from penstock.optim.params import Param, ParameterPiece, Tile, fresh_scalars
from penstock.optim.shards import local_state
from penstock.optim.states import FlashStates
from penstock.staging import copy_across, ready_event

_IN_MEMORY_BYTES: Final = 64 * MIB
"""State dicts up to this are plain memory."""
_OF_GROUP: Final = {"params", "param_names", "format"}
"""Keys of a parameter group that a state dict does not change."""


def save(states: FlashStates) -> dict[int, dict[str, Any]]:
    """States by the parameter's number, of those that were updated before."""
    made = _Room(states)
    saved: dict[int, dict[str, Any]] = {}
    for param in states.params:
        mine = {**fresh_scalars(param.scalars), **made.tensors(param)}
        if mine:
            saved[param.index] = mine
    tiles = [t for t in states.tiles if t.arrays and made.wants(t)]
    states.begin_visits(tiles)
    with WeightHolds(states.params, states.tiles, changed=False) as holds:
        for tile in tiles:
            parts = made.wanted if _has_part_of_master(tile) else ()
            with holds.of_tile(tile, parts), states.visiting(tile, change=False) as buffer:
                for piece in tile.pieces:
                    param = states.params[piece.param]
                    if param.has_state:
                        _save_piece(tile, buffer.memory, piece, param, made)
    return saved


def _has_part_of_master(tile: Tile) -> bool:
    """Return whether the weights of a tile have the other part of their masters."""
    return any(array.name == MASTER and array.packing != "plain" for array in tile.arrays)


class _Room:
    """Memory for a state dict: one mapped file without a name, if it is large.

    Attributes:
        wanted: Numbers of the parameters whose states it is for.
    """

    def __init__(self, states: FlashStates) -> None:
        self._flat: dict[tuple[int, str], Tensor] = {}
        self.wanted = {p.index for p in states.params if p.has_state}
        places: list[tuple[tuple[int, str], Array, int, int]] = []
        end = 0
        seen: set[tuple[int, str]] = set()
        for tile in states.tiles:
            for piece in tile.pieces:
                param = states.params[piece.param]
                for array in tile.arrays:
                    key = (param.index, array.name)
                    if key in seen or not param.has_state or packing.is_copy(array, param.local):
                        continue
                    seen.add(key)
                    places.append((key, array, end, param.count))
                    end = round_up(end + param.count * array.dtype.itemsize, 64)
        for param in states.params:
            if param.has_state and not param.count:
                for array in states.groups.form(param).arrays(UNIT):
                    if not packing.is_copy(array, param.local):
                        empty = torch.empty(0, dtype=array.dtype)
                        self._flat[param.index, array.name] = empty
        memory = _memory(end, states.config.directories[0])
        for key, array, start, count in places:
            raw = torch.from_numpy(memory[start : start + count * array.dtype.itemsize])
            self._flat[key] = raw.view(array.dtype)

    def wants(self, tile: Tile) -> bool:
        return any(piece.param in self.wanted for piece in tile.pieces)

    def flat(self, param: Param, name: str) -> Tensor | None:
        return self._flat.get((param.index, name))

    def tensors(self, param: Param) -> dict[str, Tensor]:
        mine = {name: flat for (index, name), flat in self._flat.items() if index == param.index}
        return {name: param.in_global_shape(flat) for name, flat in mine.items()}


def _memory(nbytes: int, directory: str) -> Any:
    if nbytes <= _IN_MEMORY_BYTES:
        return np.zeros(nbytes, np.uint8)
    file = open_unlinked_buffered(directory)
    try:
        file.preallocate(nbytes)
        with written(OPTIMIZER, nbytes, file.path):  # by the kernel, page by page
            return np.frombuffer(mmap.mmap(file.fd, nbytes), np.uint8)
    finally:
        file.close()


def _save_piece(tile: Tile, memory: Any, piece: ParameterPiece, param: Param, room: _Room) -> None:
    for array in tile.arrays:
        flat = room.flat(param, array.name)
        if flat is None:
            continue
        target = flat[piece.start : piece.stop]
        if array.packing == "plain":
            target.copy_(packing.plain(array, memory, piece.at, target.numel()))
        elif array.name == MASTER:
            weights = packing.bits_of(param.flat()[piece.start : piece.stop])
            packing.join(array, memory, piece.at, weights, packing.bits_of(target))
        else:
            packing.unpack(array, memory, piece.at, packing.bits_of(target))


def check(
    states: FlashStates, groups: Sequence[Mapping[str, Any]], document: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The groups as they will be, or ConfigError if the document is not for these parameters."""
    if not {"state", "param_groups"} <= document.keys():
        raise ConfigError(
            f"a state dict of an optimizer has 'state' and 'param_groups', and this has"
            f" {sorted(map(str, document))[:8]}: is it a part of a checkpoint?"
        )
    saved = deepcopy(document["param_groups"])
    ours, theirs = [[len(g["params"]) for g in each] for each in (groups, saved)]
    if ours != theirs:
        raise ConfigError(
            f"this state dict is of groups of {theirs} parameters, and the optimizer has groups of"
            f" {ours}: it is of another model"
        )
    numbers = [number for group in saved for number in group["params"]]
    for param, number in zip(states.params, numbers, strict=True):
        _check_param(states, param, document["state"].get(number, {}))
    made = []
    for group, other in zip(groups, saved, strict=True):
        other.pop("format", None)
        made.append(other | {key: group[key] for key in _OF_GROUP & group.keys()})
    states.groups.check_options(made)
    return made


def _check_param(states: FlashStates, param: Param, state: Mapping[str, Any]) -> None:
    if not state:
        return
    kept = states.groups.kept(param)
    arrays = {each.name for each in kept.states}
    known = arrays | set(kept.scalars)
    if known - state.keys():
        raise ConfigError(
            f"the state dict has {sorted(state)} for parameter {param.name}, which needs"
            f" {sorted(known)}: it is of another optimizer"
        )
    for key in arrays | ({MASTER} & state.keys()):
        value = local_state(state[key], param.tensor, param.name, key)
        if not isinstance(value, Tensor) or value.shape != param.local.shape:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
            raise ConfigError(
                f"the state dict's {key!r} for parameter {param.name} has {what}: it is of another model"
            )
    for key in kept.tensors:
        value = state[key]
        if not isinstance(value, int | float) and not (
            isinstance(value, Tensor) and value.numel() == 1
        ):
            raise ConfigError(
                f"the state dict's {key!r} for parameter {param.name} is not one number: it is of"
                " another optimizer"
            )


def _scalar(value: Any, *, is_tensor: bool) -> Any:
    """A copy; old state dicts have numbers where there are tensors now."""
    if is_tensor and not isinstance(value, Tensor):
        return torch.tensor(float(value))
    return deepcopy(value)


def load(states: FlashStates, document: Mapping[str, Any]) -> None:
    """Fill all tiles from a document that ``check`` has seen."""
    groups = document.get("param_groups")
    numbers = (
        [number for group in groups for number in group["params"]]
        if groups is not None
        else list(range(len(states.params)))
    )
    found: dict[int, Mapping[str, Any]] = {}
    for param, number in zip(states.params, numbers, strict=True):
        found[param.index] = document["state"].get(number, {})
    try:
        _fill(states, found)
    except BaseException as error:
        states.mark_inconsistent(error)
        raise
    more = document.get("penstock", {})
    states.steps = int(more.get("steps", _highest_step(states)))
    states.last_norm = more.get("norm")
    states.mark_consistent()


def _fill(states: FlashStates, found: Mapping[int, Mapping[str, Any]]) -> None:
    states.pipeline.forget_all()
    for param in states.params:
        state, kept = found[param.index], states.groups.kept(param)
        param.has_state = bool(state) and {each.name for each in kept.states} <= state.keys()
        param.scalars = {
            key: _scalar(state[key], is_tensor=key in kept.tensors)
            for key in kept.scalars
            if key in state
        } or states.groups.initial_scalars(param)
    tiles = [tile for tile in states.tiles if tile.arrays]
    states.begin_visits(tiles)
    wanted = {param.index for param in states.params if param.has_state}
    with WeightHolds(states.params, states.tiles) as holds:
        for tile in tiles:
            has_masters = any(array.name == MASTER for array in tile.arrays)
            weights = holds.of_tile(tile, wanted if has_masters else ())
            with weights, states.visiting(tile, change=True) as buffer:
                buffer.memory[: tile.record_bytes] = 0
                for piece in tile.pieces:
                    param = states.params[piece.param]
                    if param.has_state:
                        _load_piece(tile, buffer.memory, piece, param, found[piece.param])


def _load_piece(
    tile: Tile, memory: Any, piece: ParameterPiece, param: Param, state: Mapping[str, Any]
) -> None:
    for array in tile.arrays:
        if array.name == MASTER:
            _load_master(array, memory, piece, param, state.get(MASTER))
            continue
        values = _part(state[array.name], param, piece, array.dtype)
        if array.packing == "plain":
            packing.plain(array, memory, piece.at, values.numel()).copy_(values)
        else:
            packing.pack(array, memory, piece.at, packing.bits_of(values), key=0, first=piece.start)


def _load_master(
    array: Array, memory: Any, piece: ParameterPiece, param: Param, saved: Tensor | None
) -> None:
    mine = param.flat()[piece.start : piece.stop]
    if saved is None or packing.is_copy(array, param.local):
        values = _on_host(mine, array.dtype)
    else:
        values = _part(saved, param, piece, array.dtype)
    if array.packing == "plain":
        packing.plain(array, memory, piece.at, values.numel()).copy_(values)
        copy_across(values, mine, ready_event(mine.device))
        return
    words = packing.bits_of(values.contiguous())
    packing.cut(array, memory, piece.at, words, packing.bits_of(mine))


def _part(value: Tensor, param: Param, piece: ParameterPiece, dtype: torch.dtype) -> Tensor:
    """A piece of a saved state, which may lie in another order than the parameter."""
    value, model = local_of(value), param.local
    if value.stride() == model.stride():
        flat = value.detach().as_strided((param.count,), (1,))
        return _on_host(flat[piece.start : piece.stop], dtype)
    flat = torch.empty(param.count, dtype=value.dtype, device=value.device)
    param.in_shape(flat).copy_(value)
    return _on_host(flat[piece.start : piece.stop], dtype)


def _on_host(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous elements as those of another type, on the host."""
    if values.device.type == "cpu":
        return values.to(dtype)
    there = torch.empty(values.numel(), dtype=dtype)
    return copy_across(values, there, ready_event(values.device))


def _highest_step(states: FlashStates) -> int:
    """The most that a parameter was updated, as torch counts it."""
    return max((int(p.scalars["step"]) for p in states.params if "step" in p.scalars), default=0)
