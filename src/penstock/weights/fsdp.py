"""Weights that FSDP2 (``fully_shard``) spreads over ranks: each rank reads its own part, to send it.

[Note: gathered weights]
    FSDP2 has two parameters for each weight: one that holds this rank's part, which optimizers update,
    and one for modules, which is whole and in memory while a group of modules runs. The first has a home.
    Its local tensor has the class :class:`GatheredValues`, of which FSDP2 asks for what it sends before
    each exchange (its "all-gather extension"): the part is brought then, in the order of uses, and may
    leave when it was copied. Modules find the other parameter, so nothing is brought for their calls.

    On a device it is the same, with one NaN at rest, as of any weight.

    FSDP2 has one more tensor, the part with zeros up to an equal length on all ranks. It shares the
    memory of the part, so it is taken away, and FSDP2 kept from making it anew.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from penstock.core.errors import ConfigError, PenstockWarning
from penstock.homed import home_of, local_of, settle
from penstock.store.base import Place, Tier
from penstock.weights.homes import Home, HomeMaker, view_like
from penstock.weights.references import WeightBringer
from penstock.weights.resting import RestingPart

_managed: Final[WeakKeyDictionary[Module, dict[str, weakref.ref[Any]]]] = WeakKeyDictionary()
"""Parameters that FSDP2 exchanges: of each module and name, what FSDP2 knows of it."""


class GatheredValues(RestingPart):
    """Local tensor of a parameter of FSDP2 that has a home. See [Note: gathered weights]."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return what this rank sends, and nothing for ``fsdp_post_all_gather``."""
        home = home_of(self)
        assert isinstance(home, Gathered)
        return (home.sent(),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: Any,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight as it was received; None if it is in ``out``, which has its memory."""
        return None if out is not None else (all_gather_outputs[0], ())


class Gathered(Home):
    """Home of this rank's part of a weight of FSDP2; each kind has a slot ``_shard``."""

    is_gathered: ClassVar[bool] = True
    __slots__ = ()
    _shard: Any

    def __init__(
        self, shard: Any, name: str, parameter: Parameter, tier: Tier, place: Place
    ) -> None:
        """Take a place, as :class:`Home` does.

        Args:
            shard: What FSDP2 knows of the parameter, an ``FSDPParam``.
            name: Name of the parameter.
            parameter: The one that holds this rank's part.
            tier: Reads and writes the place.
            place: The place.
        """
        super().__init__(name, parameter, tier, place)
        self._shard = shard
        local = local_of(parameter)
        if local._is_view():  # which refers to the part with zeros
            local = view_like(local.untyped_storage(), local)
            cast(Any, parameter)._local_tensor = local
        settle(local, self)
        local.__class__ = GatheredValues
        shard._sharded_param_data = torch.empty(0, dtype=local.dtype, device=local.device)
        shard.reset_sharded_param = self._keep
        shard._init_extensions()

    def sent(self) -> Tensor:
        """Return this rank's part as FSDP2 sends it: with its type, and zeros if it is short."""
        parameter, shard = self.parameter, self._shard
        assert parameter is not None
        if self.keeper is None:
            values = view_like(self.resting.untyped_storage(), self.layout)
        else:
            values = cast(WeightBringer, self.keeper).bring(self, parameter)
        if values.size() != shard.padded_sharded_param_size:
            padded = values.new_zeros(shard.padded_sharded_param_size)
            padded.narrow(shard.fsdp_placement.dim, 0, len(values)).copy_(values)
            values = padded
        return values if shard.param_dtype is None else values.to(shard.param_dtype)

    def leave(self) -> None:
        """See :class:`Home`."""
        parameter = self.parameter
        super().leave()
        if parameter is not None:
            self._give_back()

    def _keep(self) -> None:
        """Called by FSDP2 when its parameter may be another one, in place of its own method."""
        info = self._shard._module_info
        if getattr(info.module, info.param_name) is self.parameter:
            return
        warnings.warn(
            f"weight {self.name} was replaced by another parameter, which stays in memory",
            PenstockWarning,
            stacklevel=2,
        )
        self._give_back()

    def _give_back(self) -> None:
        shard, info = self._shard, self._shard._module_info
        del shard.reset_sharded_param
        present = getattr(info.module, info.param_name)
        if present is not getattr(shard, "_unsharded_param", None):
            shard.reset_sharded_param()
            return
        shard._setattr_on_modules(shard.sharded_param)  # which FSDP2 looks for in the module
        shard.reset_sharded_param()
        shard._setattr_on_modules(present)


class GatheredHome(Gathered):
    """Home of a part in host memory."""

    __slots__ = ("_shard",)


def _groups_in(model: Module) -> Iterator[Any]:
    """Yield the groups of parameters that FSDP2 exchanges together."""
    states = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if states is None:
        return
    seen = set()
    for module in model.modules():
        state = states._get_module_fsdp_state(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            if hasattr(state, "_fsdp_param_groups"):
                yield from state._fsdp_param_groups
            elif state._fsdp_param_group is not None:  # in older versions of torch
                yield state._fsdp_param_group


class GatheredWeights:
    """Weights of a model that FSDP2 spreads over ranks.

    Attributes:
        kind: Class of their homes.
        makers: What makes the home of each parameter that holds this rank's part, by its ``id``.
        groups: By the same: number of the group that is sent together.
        padded: By the same: FSDP2's other tensor, of those without a home, until ``uses`` is asked.
    """

    def __init__(
        self, model: Module, kind: type[Gathered] | None = GatheredHome, *, setting: str
    ) -> None:
        """Find them, and let FSDP2 free what is whole in memory.

        Args:
            model: The model.
            kind: Class of their homes; None: no home is made.
            setting: What the user has set, for errors, as :func:`.homes.setting_of` has it.

        Raises:
            ConfigError: FSDP2 does what homes cannot; nothing was changed.
        """
        self.kind = kind
        self.makers: dict[int, HomeMaker] = {}
        self.groups: dict[int, int] = {}
        self.padded: dict[int, Tensor] = {}
        groups = list(_groups_in(model))
        for group in groups:
            for shard in group.fsdp_params:
                _check(shard, setting)
        for number, group in enumerate(groups):
            if group.is_unsharded and group._training_state.name == "IDLE":
                group.reshard()
            for shard in group.fsdp_params:
                info = shard._module_info
                modules = (info.module, *info.shared_modules)
                names = (info.param_name, *info.shared_param_names)
                for module, name in zip(modules, names, strict=True):
                    _managed.setdefault(module, {})[name] = weakref.ref(shard)
                if kind is not None:
                    self.makers[id(shard.sharded_param)] = partial(kind, shard)
                self.groups[id(shard.sharded_param)] = number
                if home_of(shard.sharded_param) is None:
                    self.padded[id(shard.sharded_param)] = shard._sharded_param_data

    def uses(self, parameter: Parameter) -> int:
        """Return how often FSDP2 itself refers to the memory of what the parameter has; ask once."""
        flat = self.padded.pop(id(parameter), None)
        if flat is None:
            return 0
        local = local_of(parameter)
        bases = {id(each._base) for each in (flat, local)} - {id(None), id(local)}
        return 1 + len(bases)


def is_exchanged(module: Module, name: str) -> bool:
    """Return whether FSDP2 exchanges a parameter of a module with another one."""
    return name in _managed.get(module, {})


def is_whole(module: Module, name: str) -> bool:
    """Return whether a parameter of a module is one that FSDP2 has gathered, for the present."""
    known = _managed.get(module, {}).get(name)
    shard = None if known is None else known()
    return shard is not None and module._parameters[name] is not shard.sharded_param


def _check(shard: Any, setting: str) -> None:
    """Raise ConfigError if FSDP2 does with a parameter what homes cannot."""
    info = shard._module_info
    name = shard._param_fqn or f"{type(info.module).__name__}.{info.param_name}"
    local = shard._sharded_local_tensor
    if shard.offload_to_cpu:
        raise ConfigError(
            f"FSDP2 keeps parameter {name} in host memory (CPUOffloadPolicy): with {setting}"
            " shard the model without an offload_policy"
        )
    if shard.post_forward_mesh_info not in (None, shard.mesh_info):
        raise ConfigError(
            f"FSDP2 spreads parameter {name} over fewer ranks after forward: with {setting} let"
            " reshard_after_forward be True or False, not a number"
        )
    if hasattr(local, "fsdp_pre_all_gather") and not isinstance(local, GatheredValues):
        raise ConfigError(
            f"parameter {name} is a {type(local).__name__}, which converts what FSDP2 sends:"
            f" {setting} is for plain tensors"
        )
