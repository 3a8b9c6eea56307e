"""Parameters of an optimizer on flash, their groups, and the tiles that they are laid into.

[Note: layout]
    Each parameter is laid flat, in the order in which its elements lie in memory, and the parameters of
    one kind (group, dtype, form) are laid end to end, each beginning at a multiple of ``UNIT``. That line
    is cut into tiles of equal length, wherever the borders of the parameters are. A tile's states are one
    record on flash: one sequential transfer.

``Groups.lay`` finds by trial which states are kept (:mod:`probe`), and lays a group's parameters into
tiles in a form (:mod:`formats`); ``Groups.add`` adds that group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.units import round_up
from penstock.homed import home_of, is_sharded, local_of
from penstock.optim.formats import UNIT, Array, Form, State, form_of, stepped_dtype
from penstock.optim.offloaded_gradient import OffloadedGradient
from penstock.optim.probe import KeptStates, ProbedOptimizer, probe
from penstock.optim.shards import (
    check_can_be_laid,
    global_like,
    local_gradient,
    placed,
)


class Param:
    """One parameter.

    Attributes:
        tensor: The user's.
        group: Number of its group.
        index: Its number in the optimizer.
        name: For messages.
        count: Elements that this process has of it: all, or its shard's.
        scalars: What the optimizer keeps for it besides a value for each element.
        has_state: True if it was updated before.
    """

    __slots__ = (
        "_flat",
        "_is_sharded",
        "_key",
        "_seen",
        "count",
        "group",
        "has_state",
        "index",
        "name",
        "scalars",
        "tensor",
    )

    def __init__(self, tensor: Tensor, *, group: int, index: int, name: str) -> None:
        """Describe a parameter.

        Raises:
            ConfigError: Its elements do not lie densely in memory, are not real floats, or are kept in
                tensors of another kind than a DTensor's.
        """
        check_can_be_laid(tensor, name)
        local = local_of(tensor)
        if not local.is_floating_point() or local.layout != torch.strided:
            raise ConfigError(
                f"parameter {name} is {local.dtype}, {local.layout}; states on flash are for"
                " strided real floats: keep this one's states in memory, with an optimizer of its own"
            )
        if local.device.type == "meta":
            raise ConfigError(
                f"parameter {name} is on the meta device and has no values; materialize the model"
                " first: to_empty(device=...), and load or initialize its weights"
            )
        self.tensor = tensor
        self.group = group
        self.index = index
        self.name = name
        self.count = local.numel()
        self.scalars: dict[str, Any] = {}
        self.has_state = False
        self._is_sharded = is_sharded(tensor)
        self._key = self._now()
        self._flat: Tensor | None = None
        self._seen: tuple[int, int, object] | None = None
        if not _is_dense(local):
            raise ConfigError(
                f"parameter {name} of shape {tuple(local.shape)} and strides {local.stride()} has"
                " gaps or overlaps in memory; make it contiguous"
            )

    @property
    def local(self) -> Tensor:
        """Return the values that this process has: the parameter, or its shard if it is a DTensor."""
        return local_of(self.tensor) if self._is_sharded else self.tensor

    def check(self) -> None:
        """Raise ConfigError if it is not what it was."""
        now = self._now()
        if now != self._key:
            old, new = self._key, now
            raise ConfigError(
                f"parameter {self.name} was shape {tuple(old[0])}, {old[2]} on {old[3]}{old[4]}, and is"
                f" now {tuple(new[0])}, {new[2]} on {new[3]}{new[4]} (strides {old[1]}, {new[1]}): its"
                " states do not fit any more; make a new optimizer, or load a state dict into one"
            )

    def note(self) -> None:
        """Remember that its value is that of its master."""
        self._seen = self._state()

    @property
    def was_set(self) -> bool:
        """Return whether anything else may have changed it since the last ``note``."""
        return self._seen not in (None, self._state())

    def note_change(self) -> None:
        """Tell autograd that its values were changed in place."""
        torch.autograd.graph.increment_version(self.tensor)

    def _state(self) -> tuple[int, int, object]:
        """Return the versions of its values, and where they are: at home, wherever they are now."""
        place, local = home_of(self.tensor), self.local
        where = local.data_ptr() if place is None else weakref.ref(place)
        return self.tensor._version, local._version, where

    def flat(self) -> Tensor:
        """Elements of the parameter in memory order, which share its memory and version."""
        local = self.local
        return flat_like(Tensor.detach(local), local)

    def flat_grad(self) -> Tensor | None:
        """Return its gradient in the same order, copied only if it lies otherwise; None: it has none.

        One on flash is returned as it is; it is read from there in that order. Of a DTensor it is the
        shard's; if the gradient is placed otherwise, all ranks exchange it.

        Raises:
            ConfigError: The gradient is sparse.
        """
        tensor = self.tensor
        grad = local_gradient(tensor, self.name) if self._is_sharded else tensor.grad
        if grad is None or isinstance(grad, OffloadedGradient):
            return grad
        if grad.layout != torch.strided:
            raise ConfigError(
                f"parameter {self.name} has a sparse gradient; states on flash need dense ones:"
                " Embedding(..., sparse=False)"
            )
        return self.flat_like_me(grad.detach())

    def flat_like_me(self, values: Tensor) -> Tensor:
        """Return values of its local shape as one line in its order, copied if they lie otherwise."""
        local = self.local
        if values.stride() != local.stride():
            flat = torch.empty(self.count, dtype=values.dtype, device=local.device)
            values = self.in_shape(flat).copy_(values)
        return flat_like(values, local)

    def in_shape(self, flat: Tensor) -> Tensor:
        """Return values in the order of ``flat`` in the parameter's local shape; they share memory."""
        local = self.local
        return flat.as_strided(local.shape, local.stride())

    def in_global_shape(self, flat: Tensor) -> Tensor:
        """Return values in the order of ``flat`` as what the parameter is: a DTensor if it is one."""
        return global_like(self.in_shape(flat), self.tensor)

    def _now(self) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, str]:
        local = self.local
        where = placed(self.tensor) if self._is_sharded else ""
        return local.shape, local.stride(), local.dtype, local.device, where


def flat_like(tensor: Tensor, model: Tensor) -> Tensor:
    """Return ``tensor``, which has the strides of the dense ``model``, as one line."""
    return tensor.as_strided((model.numel(),), (1,))


def fresh_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that a step may change."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars.items()}


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory, in whichever order."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


# -- tiles -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """A range of one parameter's elements, in a tile."""

    param: int
    """Number of the parameter in the optimizer."""
    start: int
    stop: int
    """Elements of the parameter, laid flat."""
    at: int
    """Offset in the tile; this and ``start`` are multiples of ``UNIT``."""

    def cut(self, elements: int) -> Iterator[ParameterPiece]:
        """Yield parts of at most ``elements`` elements, a multiple of ``UNIT``."""
        for start in range(self.start, self.stop, elements):
            stop = min(start + elements, self.stop)
            yield ParameterPiece(self.param, start, stop, self.at + start - self.start)


@dataclass(frozen=True, slots=True)
class Tile:
    """Elements that are read, updated and written together."""

    index: int
    group: int
    form: Form
    elements: int
    pieces: tuple[ParameterPiece, ...]
    arrays: tuple[Array, ...]
    record_bytes: int


def make_tiles(
    params: Sequence[tuple[int, int]], form: Form, *, group: int, first: int, elements: int
) -> list[Tile]:
    """Lay parameters of one kind into tiles.

    Args:
        params: Number and element count of each.
        form: Of their records.
        group: Number of their group.
        first: Number of the first tile.
        elements: Of a tile, a multiple of ``UNIT``; the last one is as long as it needs to be.
    """
    pieces: list[list[ParameterPiece]] = []
    length = 0
    for param, count in params:
        start = 0
        while start < count:
            index, at = divmod(length, elements)
            if index == len(pieces):
                pieces.append([])
            stop = min(count, start + elements - at)
            pieces[index].append(ParameterPiece(param, start, stop, at))
            length += round_up(stop - start, UNIT)
            start = stop
    tiles = []
    for index, mine in enumerate(pieces):
        size = min(elements, length - index * elements)
        arrays = form.arrays(size)
        record = form.record_bytes(size)
        tiles.append(Tile(first + index, group, form, size, tuple(mine), arrays, record))
    return tiles


# -- groups ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A group that was laid into tiles."""

    params: list[Param]
    tiles: list[Tile]
    forms: list[Form]
    kept: dict[torch.dtype, KeptStates]
    initial: Mapping[str, Any]
    """States that exist before a first step."""
    format: str


class Groups:
    """States kept for the groups of one optimizer.

    Attributes:
        params: All parameters, by number.
        tiles: All tiles, by number.
        laid: The groups, by number.
    """

    def __init__(self, source: ProbedOptimizer) -> None:
        """Begin without any group."""
        self.params: list[Param] = []
        self.tiles: list[Tile] = []
        self.laid: list[GroupLayout] = []
        self._source = source
        self._seen: list[Any] = []  # of each group, what may decide what is kept

    def where_of(self, tile: Tile) -> str:
        """Return the parameters in a tile, for messages."""
        names = [self.params[piece.param].name for piece in tile.pieces]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return "parameters " + ", ".join(names[:3]) + more

    def lay(self, group: dict[str, Any]) -> GroupLayout:
        """Lay a group of the optimizer into tiles, without adding it.

        Raises:
            ConfigError: The optimizer is not element-wise, or the format is not for these parameters.
        """
        number = len(self.laid)
        config = self._source.config
        chosen = self._format_of(group)
        where = f"{self._source.name}, group {number}"
        if len(set(map(id, group["params"]))) < len(group["params"]):
            raise ConfigError(f"{where}: a parameter is named twice; name each once")
        new = [self._param(p, group, number, i) for i, p in enumerate(group["params"])]
        options = options_of(group)
        initial = self._source.initial(options)
        kept: dict[torch.dtype, KeptStates] = {}
        forms: list[Form] = []
        tiles: list[Tile] = []
        kinds: dict[tuple[torch.dtype, bool], list[tuple[int, int]]] = {}
        for param in new:
            local = param.local
            on_host = local.device.type == "cpu"
            kinds.setdefault((local.dtype, on_host), []).append((param.index, param.count))
        for (dtype, on_host), mine in kinds.items():
            has_master = self._source.with_master or chosen != "exact" or not on_host
            stepped = stepped_dtype(dtype, with_master=has_master)
            kept[dtype] = probe(self._source, options, stepped, initial, where=where)
            form = form_of(
                chosen,
                dtype,
                kept[dtype].states,
                with_master=has_master,
                whole_master=config.durable or not on_host,
                where=where,
            )
            forms.append(form)
            first = len(self.tiles) + len(tiles)
            tiles += make_tiles(mine, form, group=number, first=first, elements=config.tile)
        for param in new:
            param.scalars = scalars_of(initial)
        return GroupLayout(new, tiles, forms, kept, initial, chosen)

    def add(self, laid: GroupLayout) -> None:
        """Add a group whose records have been laid out."""
        self.params += laid.params
        self.tiles += laid.tiles
        self.laid.append(laid)
        self._seen.append(_decisive(self._source.optimizer.param_groups[len(self._seen)]))

    def kept(self, param: Param) -> KeptStates:
        """Return the states that the optimizer keeps for a parameter."""
        return self.laid[param.group].kept[param.tensor.dtype]

    def kept_in(self, tile: Tile) -> KeptStates:
        """Return the states that the optimizer keeps for the parameters in a tile."""
        return self.laid[tile.group].kept[tile.form.param_dtype]

    def form(self, param: Param) -> Form:
        """Return the form of the records of a parameter."""
        return next(f for f in self.laid[param.group].forms if f.param_dtype == param.tensor.dtype)

    def initial_in(self, tile: Tile) -> Mapping[str, Any]:
        """Return the states of a tile's parameters that exist before a first step."""
        return self.laid[tile.group].initial

    def initial_scalars(self, param: Param) -> dict[str, Any]:
        """Return a parameter's scalars before its first step."""
        return scalars_of(self.laid[param.group].initial)

    def check(self) -> None:
        """Raise ConfigError if parameters were exchanged or changed, or need more states."""
        groups = self._source.optimizer.param_groups
        now = [param for group in groups for param in group["params"]]
        if len(now) != len(self.params) or any(
            tensor is not param.tensor for tensor, param in zip(now, self.params, strict=True)
        ):
            raise ConfigError(
                "the parameters of a group were exchanged, taken away or added to by hand (sharded after"
                " the optimizer was made?), and their states cannot know: shard the model first and make"
                " the optimizer then; for more parameters use add_param_group()"
            )
        for param in self.params:
            param.check()
        for number, group in enumerate(groups):
            seen = _decisive(group)
            if seen != self._seen[number]:
                where = f"{self._source.name}, group {number}"
                for kept, wanted in self._options(number, group, where):
                    if not set(wanted) <= set(kept):  # what is not needed any more is left as it is
                        raise _other_states(where, kept, wanted)
                self._seen[number] = seen

    def check_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError if groups with these options would keep other states than there are."""
        for number, group in enumerate(groups):
            where = f"{self._source.name}, group {number} of the state dict"
            for kept, wanted in self._options(number, group, where):
                if wanted != kept:
                    raise _other_states(where, kept, wanted)

    def _options(
        self, number: int, group: Mapping[str, Any], where: str
    ) -> Iterator[tuple[tuple[State, ...], tuple[State, ...]]]:
        """Yield the states kept for each kind of parameter in a group, and those with other options."""
        laid = self.laid[number]
        chosen = self._format_of(group)
        if chosen != laid.format:
            raise ConfigError(
                f"{where}: its format is {chosen!r} now, and its states are {laid.format!r};"
                " that is chosen when a group is made"
            )
        for dtype, kept in laid.kept.items():
            form = next(form for form in laid.forms if form.param_dtype == dtype)
            options = options_of(group)
            now = probe(self._source, options, form.master_dtype, laid.initial, where=where)
            yield kept.states, now.states

    def _format_of(self, group: Mapping[str, Any]) -> Any:
        """Return the format of a group: its own, or else that of the optimizer.

        A group that has none is given none: its keys stay those of torch's, which checkpoints ask for.
        """
        return group.get("format", self._source.config.format)

    def _param(self, tensor: Tensor, group: Mapping[str, Any], number: int, place: int) -> Param:
        index = len(self.params) + place
        name = _name(tensor, group, number, place)
        return Param(tensor, group=number, index=index, name=name)


def _name(tensor: Tensor, group: Mapping[str, Any], number: int, place: int) -> str:
    """Return a parameter's name for messages."""
    names = group.get("param_names")
    name = repr(names[place]) if names else f"{place} of group {number}"
    return f"{name} {tuple(tensor.shape)}"


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _other_states(where: str, kept: Sequence[State], now: Sequence[State]) -> ConfigError:
    return ConfigError(
        f"{where}: with its options {[s.name for s in now]} would be kept, and the optimizer was made to"
        f" keep {[s.name for s in kept]}; make it with the same options"
    )


def _decisive(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, and the format, that may decide which states are kept."""
    switches = {
        key: bool(value)
        for key, value in options_of(group).items()
        if value is None or isinstance(value, int | float)
    }
    return {**switches, "format": group.get("format")}


def scalars_of(initial: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the states that a parameter has once, not for each of its elements."""
    return {k: v.clone() for k, v in initial.items() if isinstance(v, Tensor)}
