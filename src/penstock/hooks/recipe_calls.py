"""Tracker of the calls of modules named in a plan's recipes, so that they can be repeated."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from penstock.hooks.handles import Packed
from penstock.hooks.modules import ModuleTracker, SavingPlace
from penstock.hooks.pure import PureCall, is_pure
from penstock.hooks.pure_calls import PureCalls, PureOutput
from penstock.hooks.recompute import not_recomputable
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.plan.recipes import recipe_members
from penstock.runtime.recompute import Recomputer
from penstock.runtime.storage import Recipe


class _Calls(PureCalls[PureCall, Packed]):
    """The calls of one thread."""

    def __init__(self, hooks: SavedTensorHooks, recomputer: Recomputer) -> None:
        super().__init__(hooks.storage_of)
        self._hooks = hooks
        self._recomputer = recomputer

    def source_of(self, given: torch.Tensor, storage: torch.UntypedStorage) -> Packed | None:
        """Return another handle to the input of a module, if the input is saved."""
        return self._hooks.pack(given) if self._hooks.holds(given, storage) else None

    def on_made(self, storage: torch.UntypedStorage, made: PureOutput[PureCall, Packed]) -> None:
        """Provide the recipe of a storage that may have been saved during the call."""
        self._recomputer.drop_made(storage, made.version, self.recipe(made))

    def recipe(self, made: PureOutput[PureCall, Packed]) -> Recipe:
        """Return the recomputation of what the calls made."""
        name = " and ".join(one.path for one in made.members)
        return Recipe(name, partial(_compute, self._hooks, made.source, made.members))


def _compute(
    hooks: SavedTensorHooks, source: Packed, members: tuple[PureCall, ...]
) -> torch.Tensor:
    tensor = hooks.unpack(source).detach()
    for member in members:
        tensor = member.recompute(tensor)
    return tensor


class RecipeCalls:
    """Recomputes the slots of a plan's recipes while attached to a session. A ``RecipeSource``."""

    def __init__(
        self,
        *,
        hooks: SavedTensorHooks,
        modules: ModuleTracker,
        recomputer: Recomputer,
        device: torch.device,
    ) -> None:
        """Track nothing yet."""
        self._hooks = hooks
        self._modules = modules
        self._recomputer = recomputer
        self._device_type = device.type
        self._paths: dict[torch.nn.Module, str] = {}
        self._of_thread = threading.local()

    def follow(self, recomputed: Collection[str]) -> None:
        """Track exactly the modules that the recipes among ``recomputed`` name."""
        paths = {path for name in recomputed for path in recipe_members(name)}
        self._paths = {}
        if paths:
            known = self._modules.known()
            found = paths.intersection(known) - not_recomputable(known)
            self._paths = {known[path][0]: path for path in found}
        self._of_thread = threading.local()
        self._modules.observer = self if self._paths else None
        self._recomputer.recipes = self if self._paths else None

    @property
    def _calls(self) -> _Calls:
        calls: _Calls | None = getattr(self._of_thread, "calls", None)
        if calls is None:
            calls = self._of_thread.calls = _Calls(self._hooks, self._recomputer)
        return calls

    def enter(self, module: torch.nn.Module, place: SavingPlace, args: Any) -> None:
        """Handle the beginning of a call."""
        if module in self._paths:
            pure = self._hooks.active and torch.is_grad_enabled() and is_pure(module)
            self._calls.enter(args, pure=pure)

    def leave(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        """Handle the end of a call."""
        path = self._paths.get(module)
        if path is not None and self._calls.under_way:
            member = partial(PureCall, module, path, self._device_type)
            self._calls.leave(output, member, refused=any(arguments[1]))

    def recipe_of(self, storage: torch.UntypedStorage, version: int) -> Recipe | None:
        """Return how to recompute this storage at this version, or ``None`` if that is not known."""
        calls = self._calls
        made = calls.made(storage, version)
        return None if made is None else calls.recipe(made)

    def is_making(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the running call of this thread is making the storage."""
        return self._calls.being_changed(storage)
