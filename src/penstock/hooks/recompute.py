"""Recomputation of modules in backward, in place of holding what they saved.

The modules in a plan's ``recomputed`` run under ``torch.utils.checkpoint.checkpoint``, which drops what
autograd saves and recomputes the module when backward first unpacks any of it, with the random numbers
and the autocast of the first run. This module adds:

1. Only the slots that the plan recomputes are dropped. Other slots saved inside (inputs, tensors needed
   outside) are packed as usual.
2. The inputs are packed, not held: they may be offloaded as well.
3. Buffers, attributes and other random generators are restored (:mod:`.module_state`).
4. Memory for the recomputed tensors is taken from the budget first (:mod:`penstock.runtime.recompute`).
5. The first recomputation is compared with what was dropped, bit for bit.

[Note: hooks of a recomputed module]
    Only the module's ``forward`` is recomputed: hooks on the module itself run once, in forward. Hooks on
    its submodules run again, because they may change what is computed. Other side effects of their
    forwards happen again too, as under ``torch.utils.checkpoint``.

A module is not recomputed where its saves do not reach our hooks (no gradients, another thread, other
hooks, a checkpoint of the script's own), in eval mode, while it is compiled, and where
``not_recomputable`` excludes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from penstock.core.errors import HookError, InPlaceError
from penstock.hooks.handles import MovedHandle, Packed
from penstock.hooks.holder import StorageHolder
from penstock.hooks.module_state import ModuleState
from penstock.hooks.modules import ModuleTracker, SavingPlace
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.runtime.digests import Comparison, Digest, digest
from penstock.runtime.recompute import RecomputedMemory, Recomputer
from penstock.runtime.storage import INPUT, Pass, SavedStorage, TensorRef

_autograd: Final[Any] = torch._C._autograd
_EARLY_STOP: Final[dict[str, Any]] = (
    {"early_stop": False} if "early_stop" in signature(checkpoint).parameters else {}
)
"""Arguments that keep ``checkpoint`` from stopping in the hook that packs the last tensor, before a
kernel fills it; see [Note: complete storages]. Older versions have no such argument."""
_ADVICE: Final = "pass recompute=False, or a plan that does not recompute it"


def stop_early() -> None:
    """End a recomputation early, when all its needed tensors exist. Tests replace this."""
    raise _StopRecomputationError


def not_recomputable(modules: dict[str, list[torch.nn.Module]]) -> set[str]:
    """Return the paths of those among the known ``modules`` that must not be recomputed.

    Such a module is compiled, scripted or distributed, contains such a module or is inside one, or
    shares its path with another module.
    """
    excluded = [
        path for path, same in modules.items() if any(_is_excluded(module) for module in same)
    ]
    unclear = {path for path, same in modules.items() if len(same) > 1 or path.endswith(">")}
    return unclear | {
        path
        for path in modules
        if any(_inside(path, other) or _inside(other, path) for other in excluded)
    }


def _is_excluded(module: torch.nn.Module) -> bool:
    call = module.__dict__.get("_compiled_call_impl")
    if call is not None and not isinstance(call, _RecomputedModule):
        return True
    if isinstance(module, torch.jit.ScriptModule | DataParallel):
        return True
    return any(
        kind.__module__.startswith(("torch.distributed", "torch.nn.parallel", "torch._dynamo"))
        for kind in type(module).__mro__
    )


def _inside(path: str, other: str) -> bool:
    return path == other or path.startswith(other + ".")


class Recompute:
    """Recomputes the modules that a plan names, while attached to a session."""

    def __init__(
        self,
        *,
        hooks: SavedTensorHooks,
        modules: ModuleTracker,
        recomputer: Recomputer,
        holder: StorageHolder,
        device: torch.device,
        floor_bytes: int,
    ) -> None:
        """Recompute nothing yet."""
        self.hooks = hooks
        self.modules = modules
        self.recomputer = recomputer
        self.holder = holder
        self.floor_bytes = floor_bytes
        self.suspended = False
        # ``checkpoint`` saves the random generators of the devices of its arguments
        self.markers = (torch.empty(0, device=device),) if device.type != "cpu" else ()
        self._wrapped: dict[str, _RecomputedModule] = {}

    def follow(self, paths: Collection[str]) -> None:
        """Recompute exactly the modules at ``paths`` from now on."""
        if not paths and not self._wrapped:
            return
        for path in [each for each in self._wrapped if each not in paths]:
            self._wrapped.pop(path).undo()
        missing = [path for path in paths if path not in self._wrapped]
        if not missing:
            return
        known = self.modules.known()
        alone = not_recomputable(known)
        for path in missing:
            if path in known and path not in alone:
                self._wrapped[path] = _RecomputedModule(self, known[path][0], path)

    def applies(self, module: torch.nn.Module) -> bool:
        """Return whether saves of ``module`` would now reach our hooks and may be dropped."""
        if self.suspended or not module.training or not torch.is_grad_enabled():
            return False
        if torch.compiler.is_compiling() or self.modules.recomputing:
            return False
        top = _autograd._top_saved_tensors_default_hooks(True)
        return self.hooks.active and top is not None and bool(top[0] == self.hooks.pack)


class _RecomputedModule:
    """Wrapper of a module's calls, until ``undo``.

    ``Module.__call__`` finds it where ``Module.compile`` puts the compiled call, so copies and pickles of
    the module do not include it.
    """

    def __init__(self, owner: Recompute, module: torch.nn.Module, path: str) -> None:
        self.owner = owner
        self.module = module
        self.path = path
        self.proven = False
        module.__dict__["_compiled_call_impl"] = self

    def undo(self) -> None:
        """Remove the wrapper, unless other code has replaced it since."""
        if self.module.__dict__.get("_compiled_call_impl") is self:
            del self.module.__dict__["_compiled_call_impl"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module so that its forward, without its hooks, can be recomputed."""
        module: Any = self.module
        if not self.owner.applies(module):
            return module._call_impl(*args, **kwargs)
        own = module.__dict__
        before = own.get("forward")
        forward = module.forward

        def put_back() -> None:
            own.pop("forward", None)
            if before is not None:
                own["forward"] = before

        def run(*args: Any, **kwargs: Any) -> Any:
            put_back()
            return _Call(self, forward).run(args, kwargs)

        own["forward"] = run
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            if own.get("forward") is run:  # a hook raised before the forward
                put_back()


@dataclass(slots=True)
class _Input:
    """An input tensor of the module, packed."""

    packed: Packed
    requires_grad: bool
    tensor: weakref.ref[torch.Tensor]
    version: int


@dataclass(slots=True)
class _Dropped:
    """A dropped saved tensor, which is to be recomputed."""

    digest: Digest | None = None

    def note(self, tensor: torch.Tensor) -> None:
        """Remember the digest of its values."""
        self.digest = digest(tensor)


class _Call:
    """One forward of a module and all that its recomputation needs; lives as long as its graph."""

    def __init__(self, wrapper: _RecomputedModule, forward: Callable[..., Any]) -> None:
        self._wrapper = wrapper
        self._path = wrapper.path
        self._owner = wrapper.owner
        self._hooks = self._owner.hooks
        self._recomputer = self._owner.recomputer
        self._forward = forward
        self._inputs: list[_Input] = []
        self._unnamed: dict[int, SavedStorage] = {}
        self._saves: list[_Dropped | None] = []
        """Saved tensors in order; ``None`` for one that was packed, and so is not recomputed."""
        self._seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._dropped_bytes = 0

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward so that its saved tensors can be dropped."""
        leaves, self._layout = tree_flatten((args, kwargs))
        if any(isinstance(each, torch.Tensor) and not _is_plain(each) for each in leaves):
            return self._forward(*args, **kwargs)
        self._of_pass: Pass = self._recomputer.current_pass
        self._state = ModuleState(self._wrapper.module)
        self._take_inputs(leaves)
        self._now: list[Any] | None = leaves
        result = checkpoint(
            self._compute,
            *self._owner.markers,
            use_reentrant=False,
            context_fn=self._contexts,
            preserve_rng_state=True,
            **_EARLY_STOP,
        )
        self._state.settle()
        self._check_inputs()
        for saved in self._unnamed.values():
            self._recomputer.settle(saved)
        self._unnamed.clear()
        self._seen.clear()
        return result

    def _contexts(self) -> tuple[Any, Any]:
        return _Reentrant(self._original_run), _Reentrant(self._recomputation)

    def _compute(self, *markers: torch.Tensor) -> Any:
        leaves, self._now = self._now, None
        assert leaves is not None
        args, kwargs = tree_unflatten(leaves, self._layout)
        del leaves
        return self._forward(*args, **kwargs)

    # -- inputs -----------------------------------------------------------------------------------

    def _take_inputs(self, leaves: list[Any]) -> None:
        """Pack the inputs under their own names; see [Note: names of slots ...]."""
        place = SavingPlace(f"{self._path}.{INPUT}", "")
        self._others = [None if isinstance(each, torch.Tensor) else each for each in leaves]
        self._places = [i for i, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        with self._owner.modules.at(place):
            for i in self._places:
                tensor = leaves[i]
                packed = self._hooks.pack(tensor)
                ref = TensorRef(tensor)
                self._inputs.append(_Input(packed, tensor.requires_grad, ref, tensor._version))
                saved = None
                if isinstance(packed, MovedHandle) and packed.holder is self._owner.holder:
                    saved = packed.saved
                if saved and saved.recorded and saved.record.key.module == place.path:
                    self._unnamed[saved.cdata] = saved
            self._hooks.operators_returned()  # no operator saves these

    def _check_inputs(self) -> None:
        for each in self._inputs:
            tensor = each.tensor()
            if tensor is not None and tensor._version != each.version:
                raise HookError(
                    f"the plan recomputes {self._path}, but that has changed its input of shape"
                    f" {tuple(tensor.shape)} in place, unlike in the profiled step; {_ADVICE}"
                )

    def _restored_inputs(self) -> list[Any]:
        leaves = list(self._others)
        for i, each in zip(self._places, self._inputs, strict=True):
            try:
                tensor = self._hooks.unpack(each.packed)
            except InPlaceError as error:
                raise InPlaceError(
                    f"cannot recompute {self._path} for its backward: its input has been modified by an"
                    f" inplace operation since its forward; {_ADVICE}: {error}"
                ) from error
            leaves[i] = tensor.detach().requires_grad_(each.requires_grad)
        return leaves

    # -- original run -----------------------------------------------------------------------------

    @contextmanager
    def _original_run(self) -> Iterator[None]:
        drop, make = _autograd._top_saved_tensors_default_hooks(True)
        prove = not self._wrapper.proven
        pack = partial(self._pack, drop, prove=prove)
        with torch.autograd.graph.saved_tensors_hooks(pack, partial(self._unpack, make)):
            yield

    def _pack(self, drop: Callable[..., Any], tensor: torch.Tensor, *, prove: bool) -> Any:
        """Drop a saved tensor if the plan recomputes it, otherwise pack it as usual."""
        nbytes = self._hooks.slot_bytes(tensor)
        if not nbytes or not self._drops(tensor, nbytes):
            self._saves.append(None)
            return self._hooks.pack(tensor)
        dropped = _Dropped()
        self._saves.append(dropped)
        self._recomputer.free_early(tensor.untyped_storage())
        if prove:
            self._hooks.when_complete(tensor, partial(dropped.note, tensor))
        return drop(tensor)

    def _drops(self, tensor: torch.Tensor, nbytes: int) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        saved = self._unnamed.get(key)
        if saved is not None and saved.source() is storage and saved.version == tensor._version:
            del self._unnamed[key]
            self._recomputer.name(saved, self._owner.modules.here.path)
            return False
        seen = self._seen.get(key)
        if seen is not None and seen[0]() is storage and seen[1] == tensor._version:
            return True
        if self._hooks.holds(tensor, storage):
            return False
        small = nbytes < self._owner.floor_bytes
        if not small and not self._recomputer.drops(self._owner.modules.here.path, nbytes):
            return False
        self._seen[key] = TensorRef(storage), tensor._version
        if seen is None or seen[0]() is not storage:
            self._dropped_bytes += storage.nbytes()
        return True

    def _unpack(self, make: Callable[..., Any], packed: Any) -> Any:
        if isinstance(packed, Packed) or self._hooks.inquiring:
            return self._hooks.unpack(packed)
        made = make(packed)
        self._recomputer.use(made.untyped_storage())  # backward may be on another stream
        return made

    # -- recomputation ----------------------------------------------------------------------------

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Set up all that is different while the module is recomputed."""
        start_ns = self._recomputer.now_ns()
        with ExitStack() as stack:  # ``checkpoint`` may end the run by raising
            stack.callback(self._recomputer.note_run, self._path, start_ns, self._dropped_bytes)
            stack.enter_context(self._owner.modules.recompute())
            self._recomputer.reach(self._of_pass, self._path)
            self._now = self._restored_inputs()
            made = _Recomputation(
                path=self._path,
                hooks=self._hooks,
                expected=self._saves,
                missing=sum(each is not None for each in self._saves),
                recomputer=self._recomputer,
                memory=self._recomputer.begin(self._of_pass, self._path, self._dropped_bytes),
            )
            stack.callback(made.memory.close)
            stack.enter_context(self._state.restored(self._path))
            keep, _ = _autograd._top_saved_tensors_default_hooks(True)
            stack.callback(self._prove, made)
            pack = partial(made.pack, keep)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _as_it_is))
            yield

    def _prove(self, made: _Recomputation) -> None:
        self._hooks.operators_returned()
        self._wrapper.proven |= made.check()


@dataclass(slots=True)
class _Recomputation:
    """One recomputation of a forward."""

    path: str
    hooks: SavedTensorHooks
    expected: list[_Dropped | None]
    missing: int
    """Number of dropped tensors that have not been recomputed, or are not complete."""
    recomputer: Recomputer
    memory: RecomputedMemory
    count: int = 0
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    compared: list[tuple[Comparison, str]] = field(default_factory=list)
    """Pending comparisons on a device, each with the description of its tensor."""

    def pack(self, keep: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """Hand recomputed tensors to ``checkpoint``; end the run when all are complete."""
        if not self.missing:  # a later operator saves something
            stop_early()
            return tensor.detach()
        place = self.count
        self.count += 1
        if place >= len(self.expected):
            raise HookError(
                f"{self.path} saves more tensors when it is recomputed than in its forward; {_ADVICE}"
            )
        dropped = self.expected[place]
        if dropped is None:
            return tensor.detach()
        storage = tensor.untyped_storage()
        note = self.recomputer.made if self.memory.made(storage) else self.recomputer.use
        self.hooks.when_complete(tensor, partial(self._made, note, storage, place, tensor))
        self.versions.append((tensor.detach(), tensor._version))
        kept = keep(tensor)
        if not self.missing:
            stop_early()
        return kept

    def _made(
        self,
        note: Callable[[torch.UntypedStorage], None],
        storage: torch.UntypedStorage,
        place: int,
        tensor: torch.Tensor,
    ) -> None:
        note(storage)
        self.missing -= 1
        dropped = self.expected[place]
        if dropped is None or dropped.digest is None:
            return
        what = f"tensor {place}, {tensor.dtype} of shape {tuple(tensor.shape)},"
        self.compared.append((Comparison(dropped.digest, digest(tensor)), what))
        if self.compared[-1][0].at_hand:
            self._raise_if_different()

    def _raise_if_different(self) -> None:
        compared, self.compared = self.compared, []
        for comparison, what in compared:
            if comparison.differ():
                raise HookError(
                    f"recomputing {self.path} gave a different result: saved {what} differs in its"
                    f" bits; {_ADVICE}"
                )

    def check(self) -> bool:
        """Check the recomputed tensors after the run; wait for a device that compares.

        Returns:
            True if everything that was dropped has been recomputed.

        Raises:
            HookError: A recomputed tensor differs from the dropped one.
            InPlaceError: The module has modified a tensor after saving it, which autograd refuses too.
        """
        self._raise_if_different()
        versions, self.versions = self.versions, []
        for tensor, version in versions:
            if tensor._version != version:
                raise InPlaceError(
                    "one of the variables needed for gradient computation has been modified by an"
                    f" inplace operation: a {tensor.dtype} tensor of {tuple(tensor.shape)}, within"
                    f" {self.path}. Without Penstock autograd raises here too."
                )
        return len(versions) == sum(each is not None for each in self.expected)


class _Reentrant:
    """A context that may be entered repeatedly: ``checkpoint`` receives it once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: list[Any] = []

    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._open.append(context)

    def __exit__(self, *error: Any) -> Any:
        return self._open.pop().__exit__(*error)


def _as_it_is(packed: Any) -> Any:
    return packed


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
