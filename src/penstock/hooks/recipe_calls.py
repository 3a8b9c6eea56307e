"""Follows the calls of the modules that a plan's recipes name, so that they can be made once more."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from penstock.hooks.handles import Packed
from penstock.hooks.modules import ModuleTracker
from penstock.hooks.pure import PureCall, is_pure
from penstock.hooks.pure_calls import Made, PureCalls
from penstock.hooks.recompute import left_alone
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.plan.recipes import recipe_members
from penstock.runtime.remakes import Remake, Remakes


class _Calls(PureCalls[PureCall, Packed]):
    """Those of one thread."""

    def __init__(self, hooks: SavedTensorHooks, remakes: Remakes) -> None:
        super().__init__(hooks.storage_of)
        self._hooks = hooks
        self._remakes = remakes

    def source_of(self, given: torch.Tensor, storage: torch.UntypedStorage) -> Packed | None:
        """One handle more to what a module was given, if that is saved."""
        return self._hooks.pack(given) if self._hooks.holds(given, storage) else None

    def on_made(self, storage: torch.UntypedStorage, made: Made[PureCall, Packed]) -> None:
        """It may have been saved meanwhile, to be made again."""
        self._remakes.made(storage, made.version, self.remake(made))

    def remake(self, made: Made[PureCall, Packed]) -> Remake:
        """The calls, to be made once more."""
        name = " and ".join(one.path for one in made.members)
        return Remake(name, partial(_make, self._hooks, made.source, made.members))


def _make(hooks: SavedTensorHooks, source: Packed, members: tuple[PureCall, ...]) -> torch.Tensor:
    tensor = hooks.unpack(source).detach()
    for member in members:
        tensor = member.again(tensor)
    return tensor


class RecipeCalls:
    """Has the slots of a plan's recipes made again, while attached to a session. A ``Maker``."""

    def __init__(
        self,
        *,
        hooks: SavedTensorHooks,
        modules: ModuleTracker,
        remakes: Remakes,
        device: torch.device,
    ) -> None:
        """Follow nothing yet."""
        self._hooks = hooks
        self._modules = modules
        self._remakes = remakes
        self._device_type = device.type
        self._paths: dict[torch.nn.Module, str] = {}
        self._of_thread = threading.local()

    def follow(self, recomputed: Collection[str]) -> None:
        """From now on, follow the modules that the recipes among ``recomputed`` name, and no others."""
        paths = {path for name in recomputed for path in recipe_members(name)}
        self._paths = {}
        if paths:
            known = self._modules.known()
            found = paths.intersection(known) - left_alone(known)
            self._paths = {known[path][0]: path for path in found}
        self._of_thread = threading.local()
        self._modules.recipes = self if self._paths else None
        self._remakes.maker = self if self._paths else None

    @property
    def _calls(self) -> _Calls:
        calls: _Calls | None = getattr(self._of_thread, "calls", None)
        if calls is None:
            calls = self._of_thread.calls = _Calls(self._hooks, self._remakes)
        return calls

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """A module's call begins."""
        if module in self._paths:
            pure = self._hooks.active and torch.is_grad_enabled() and is_pure(module)
            self._calls.enter(args, pure=pure)

    def leave(self, module: torch.nn.Module, kwargs: bool, output: Any) -> None:
        """A module's call has ended."""
        path = self._paths.get(module)
        if path is not None and self._calls.under_way:
            member = partial(PureCall, module, path, self._device_type)
            self._calls.leave(output, member, refused=kwargs)

    def remake_of(self, storage: torch.UntypedStorage, version: int) -> Remake | None:
        """How to make this storage again as it is now; ``None``: not known."""
        calls = self._calls
        made = calls.made(storage, version)
        return None if made is None else calls.remake(made)

    def is_making(self, storage: torch.UntypedStorage) -> bool:
        """Whether it will be known when the call ends that is under way in this thread."""
        return self._calls.being_changed(storage)
