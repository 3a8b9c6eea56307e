"""The groups of an optimizer: what is kept for their parameters, and in which tiles.

``lay`` finds by trial what is kept (:mod:`probe`) and lays a group's parameters into tiles
(:mod:`layout`) in a form (:mod:`formats`); ``add`` takes that over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.optim.formats import Form, State, form_of, stepped_dtype
from penstock.optim.layout import Tile, make_tiles
from penstock.optim.params import Param, check_is_plain
from penstock.optim.probe import KeptStates, ProbedOptimizer, probe


@dataclass(frozen=True, slots=True)
class Laid:
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
        forms: The forms of each group's records.
    """

    def __init__(self, source: ProbedOptimizer) -> None:
        """Begin without any group."""
        self.params: list[Param] = []
        self.tiles: list[Tile] = []
        self.forms: list[list[Form]] = []
        self._source = source
        self._seen: list[Any] = []  # of each group, what may decide what is kept
        self._laid: list[Laid] = []

    def lay(self, group: dict[str, Any]) -> Laid:
        """Lay a group of the optimizer into tiles; that is not one of these yet.

        Raises:
            ConfigError: The optimizer is not element-wise, or the format is not for these parameters.
        """
        number = len(self.forms)
        config = self._source.config
        group.setdefault("format", config.format)
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
            on_host = param.tensor.device.type == "cpu"
            kinds.setdefault((param.tensor.dtype, on_host), []).append((param.index, param.count))
        for (dtype, on_host), mine in kinds.items():
            has_master = self._source.with_master or group["format"] != "exact" or not on_host
            stepped = stepped_dtype(dtype, with_master=has_master)
            kept[dtype] = probe(self._source, options, stepped, initial, where=where)
            form = form_of(
                group["format"],
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
        return Laid(new, tiles, forms, kept, initial, group["format"])

    def add(self, laid: Laid) -> None:
        """Add a group whose records have been laid out."""
        self.params += laid.params
        self.tiles += laid.tiles
        self.forms.append(laid.forms)
        self._laid.append(laid)
        self._seen.append(_decisive(self._source.optimizer.param_groups[len(self._seen)]))

    def kept(self, param: Param) -> KeptStates:
        """Return the states that the optimizer keeps for a parameter."""
        return self._laid[param.group].kept[param.tensor.dtype]

    def kept_in(self, tile: Tile) -> KeptStates:
        """Return the states that the optimizer keeps for the parameters in a tile."""
        return self._laid[tile.group].kept[tile.form.param_dtype]

    def initial_in(self, tile: Tile) -> Mapping[str, Any]:
        """Their states before a first step, those that exist then."""
        return self._laid[tile.group].initial

    def initial_scalars(self, param: Param) -> dict[str, Any]:
        """A parameter's scalars before its first step."""
        return scalars_of(self._laid[param.group].initial)

    def check(self) -> None:
        """Raise ConfigError if parameters are not what they were, or more is to be kept of them."""
        groups = self._source.optimizer.param_groups
        now = [param for group in groups for param in group["params"]]
        if len(now) != len(self.params) or any(
            tensor is not param.tensor for tensor, param in zip(now, self.params, strict=True)
        ):
            for number, group in enumerate(groups):
                for place, tensor in enumerate(group["params"]):
                    check_is_plain(tensor, _name(tensor, group, number, place))
            raise ConfigError(
                "the parameters of a group were exchanged, taken away or added to by hand, and their"
                " states cannot know: use add_param_group(), or make a new optimizer"
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
        laid = self._laid[number]
        if group.get("format") != laid.format:
            raise ConfigError(
                f"{where}: its format is {group.get('format')!r} now, and its states are {laid.format!r};"
                " that is chosen when a group is made"
            )
        for dtype, kept in laid.kept.items():
            form = next(form for form in self.forms[number] if form.param_dtype == dtype)
            options = options_of(group)
            now = probe(self._source, options, form.master_dtype, laid.initial, where=where)
            yield kept.states, now.states

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
    """A group without its parameters."""
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
    """Copies of those states that a parameter has, not each of its elements."""
    return {k: v.clone() for k, v in initial.items() if isinstance(v, Tensor)}
