"""Targets of a load: objects, dictionaries and tensors that exist already, filled in place.

[Note: two passes]
    The first pass walks the targets and the checkpoint's state side by side and notes where each tensor
    goes. It changes nothing, and any difference is an error. Then tensors are read into their memory, and
    finally the other values are set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

import numpy as np
import torch

from penstock.checkpoint.allocation import Fresh
from penstock.checkpoint.frames import stored_in
from penstock.checkpoint.manifest import Manifest, TensorEntry
from penstock.checkpoint.regions import TargetRegion, is_plain, set_to
from penstock.checkpoint.stateful import (
    LIKE_LISTS,
    Stateful,
    give_state,
    is_plain_value,
    is_stateful,
    refilled,
    stepped,
    taker_of,
)
from penstock.checkpoint.tensors import identity
from penstock.checkpoint.values import (
    DTYPES,
    FormError,
    Json,
    Path,
    decode,
    has_tensors,
    list_of,
    members_of,
    name_of,
    shown,
    tensor_of,
)
from penstock.core.errors import CheckpointError, MismatchError
from penstock.core.units import MIB
from penstock.homed import WithoutMemory
from penstock.io.pages import PageRange
from penstock.optim import OnFlash

_MOST_SHOWN: Final = 5
_WRAPPERS: Final = (
    (
        "_orig_mod.",
        "torch.compile",
        "give the module that is in it, `model._orig_mod`, to save and load, or use model.compile()",
    ),
    ("module.", "DistributedDataParallel", "give the module that is in it, `model.module`"),
)
"""Prefixes that wrappers put into the keys of a module, the wrapper, and how to avoid them."""


class Differences:
    """Differences between a checkpoint and the targets of a load."""

    def __init__(self) -> None:
        """Begin without any."""
        self._found: list[str] = []

    def add(self, path: Path, how: str) -> None:
        """Add one."""
        self._found.append(f"{shown(path)} {how}")

    def compare_keys(
        self, ours: Mapping[Any, Any], theirs: Mapping[Any, Any], path: Path, *, partial: bool
    ) -> None:
        """Compare the keys of a dictionary; if ``partial``, the checkpoint may have more."""
        if self._has_wrapper(ours, theirs, path):
            return
        for key in ours:
            if key not in theirs:
                self.add((*path, str(key)), "is here, and not in the checkpoint")
        if not partial:
            for key in theirs:
                if key not in ours:
                    self.add((*path, str(key)), "is in the checkpoint, and not here")

    def _has_wrapper(self, ours: Mapping[Any, Any], theirs: Mapping[Any, Any], path: Path) -> bool:
        missing = [str(key) for key in ours if key not in theirs]
        for infix, maker, advice in _WRAPPERS:
            plain = {str(key).replace(infix, "") for key in theirs}
            if missing and all(key.replace(infix, "") in plain for key in missing):
                here, there = "here", "in the checkpoint"
                if not any(infix in key for key in missing):
                    here, there = there, here
                self.add(
                    path,
                    f"has keys with {infix!r} {here}, where {maker} puts it, and not {there}: {advice}",
                )
                return True
        return False

    def check(self, where: str) -> None:
        """Raise MismatchError with the first differences, if there are any."""
        if not self._found:
            return
        first, more = self._found[:_MOST_SHOWN], len(self._found) - _MOST_SHOWN
        tail = f"; and {more} more" if more > 0 else ""
        raise MismatchError(
            f"the checkpoint {where!r} is of another state: {'; '.join(first)}{tail}. Nothing was changed"
        )


_IN_MEMORY_BYTES: Final = 64 * MIB
"""Largest state for an optimizer on flash that is loaded to memory, and not to a file."""


class Targets:
    """Destinations of a checkpoint's tensors. See [Note: two passes].

    Attributes:
        differences: Differences found so far.
    """

    def __init__(self, manifest: Manifest, *, partial: bool = False) -> None:
        """Bind nothing yet.

        Args:
            manifest: Manifest of the checkpoint.
            partial: Allow keys in the checkpoint that no target has.
        """
        self.differences = Differences()
        self._manifest = manifest
        self._partial = partial
        self._fresh = Fresh()
        self._into: dict[int, list[torch.Tensor]] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._bound: dict[tuple[Any, ...], int] = {}
        self._twice: list[tuple[int, int]] = []

    def bind(self, target: object, document: Json, path: Path = ()) -> Callable[[], Any]:
        """Bind a target to JSON; return a function for its value when everything has been read."""
        if isinstance(target, torch.nn.Module):
            return self._bind_module(target, document, path)
        if is_stateful(target):
            return self._bind_stateful(target, document, path)
        if isinstance(target, torch.Tensor | np.ndarray):
            return self._bind_tensor(target, document, path)
        return self._bind_container(target, document, path)

    def _bind_container(self, target: Any, document: Json, path: Path) -> Callable[[], Any]:
        if path and is_plain_value(target) and not has_tensors(document):
            value = self.value(document, path)
            return lambda: refilled(target, value())
        if isinstance(target, MutableMapping):
            return self._bind_dict(target, document, path)
        if type(target) in LIKE_LISTS and list_of(document, type(target)) is not None:
            return self._bind_list(target, document, path)
        return self.value(document, path)

    def value(self, document: Json, path: Path, fresh: Fresh | None = None) -> Callable[[], Any]:
        """Return a function for the value at ``path``, with new tensors."""
        try:
            made = decode(
                document, lambda i: self._new(i, fresh), lambda i: _as_array(self._new(i, fresh))
            )
        except FormError as error:
            self.differences.add(path, f"cannot be read: {error}")
            return lambda: None
        return lambda: made

    def regions(self) -> dict[int, list[tuple[int, TargetRegion]]]:
        """Return the regions to fill, in order, by file. Call it when everything is bound."""
        found: dict[int, list[tuple[int, TargetRegion]]] = {}
        for index in self._owners():
            entry = self._manifest.tensors[index]
            targets = self._into.get(index, [])
            first = targets[0] if targets else self._new(index, None)
            if entry.nbytes:
                found.setdefault(entry.file, []).append(
                    (entry.offset_bytes, stored_in(entry, first))
                )
        for regions in found.values():
            regions.sort(key=lambda each: each[0])
        return found

    @property
    def new_memory(self) -> list[PageRange]:
        """Return the memory of new tensors. It lives as long as they do."""
        return self._fresh.pages

    @torch.no_grad()
    def settle(self) -> None:
        """Fill views, and further copies of a tensor, when everything has been read.

        Raises:
            CheckpointError: Tensors overlap here in another way than in the checkpoint.
        """
        for index, targets in self._into.items():
            source = self._source(index)
            for target in targets:
                if target is not source and not _is_same(target, source):
                    self._fill(target, source, self._manifest.tensors[index].name)
        for index, made in self._made.items():
            source = self._source(index)
            if made is not source and not _is_same(made, source):
                made.copy_(source)
        self._check_twice()
        for target in (each for targets in self._into.values() for each in targets):
            if not target.is_inference():  # for autograd, and for a save in the background
                torch.autograd.graph.increment_version(target)

    def _check_twice(self) -> None:
        for first, second in self._twice:
            if not _same_bits(self._source(first), self._source(second)):
                one, other = (self._manifest.tensors[each].name for each in (first, second))
                raise CheckpointError(
                    f"{one} and {other} are one tensor here, and differ in the checkpoint: it is of a"
                    " model in which they are not tied. They have been overwritten: load another"
                    " checkpoint over all of them before training on"
                )

    @staticmethod
    def _fill(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        try:
            set_to(target, source)
        except RuntimeError as error:  # torch sees that they overlap
            raise CheckpointError(
                f"{name} shares memory with other tensors here in another way than in the checkpoint, so"
                " that they cannot have their values at once. They have been overwritten: load another"
                " checkpoint over all of them before training on"
            ) from error

    def _owners(self) -> list[int]:
        wanted = {*self._into, *self._made}
        owners = {index: self._manifest.tensors[index].owner for index in wanted}
        return sorted({index if owner < 0 else owner for index, owner in owners.items()})

    def _source(self, index: int) -> torch.Tensor:
        """Return a tensor's bytes as read, in its own shape."""
        entry = self._manifest.tensors[index]
        if entry.owner < 0:
            targets = self._into.get(index)
            return targets[0] if targets else self._made[index]
        return _view(self._source(entry.owner), entry)

    def _new(self, index: int, fresh: Fresh | None) -> torch.Tensor:
        if index >= len(self._manifest.tensors):
            raise FormError(f"there is no tensor {index}")
        made = self._made.get(index)
        if made is None:
            entry = self._manifest.tensors[index]
            if entry.owner < 0:
                made = (fresh or self._fresh).tensor(entry)
            else:
                made = _view(self._new(entry.owner, fresh), entry)
            self._made[index] = made
        return made

    def _bind_tensor(
        self, target: torch.Tensor | Any, document: Json, path: Path
    ) -> Callable[[], Any]:
        index = tensor_of(document)
        entry = self._entry(index)
        if index is None or entry is None:
            self.differences.add(path, "is a tensor here, and none in the checkpoint")
            return lambda: target
        tensor = target.detach() if isinstance(target, torch.Tensor) else _of_array(target)
        if tensor is None:
            self.differences.add(path, f"is an array of {target.dtype} that cannot be loaded into")
            return lambda: target
        theirs = f"{entry.dtype} {entry.shape}"
        ours = f"{name_of(tensor.dtype)} {tuple(tensor.shape)}"
        if ours != theirs:
            self.differences.add(path, f"is {ours} here, and {theirs} in the checkpoint")
        elif tensor.is_meta or tensor.layout is not torch.strided:
            where = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            self.differences.add(path, f"is {where}, and has no memory to be loaded into")
        elif _overlaps_itself(tensor):
            self.differences.add(path, "has elements that share memory, and cannot be loaded into")
        else:
            self._load_to(tensor, index)
        return lambda: target

    def _load_to(self, tensor: torch.Tensor, index: int) -> None:
        """Load into a tensor; if the checkpoint has it twice, both must be the same."""
        place = identity(tensor) if tensor.numel() else (index,)
        first = self._bound.setdefault(place, index)
        if first == index:
            self._into.setdefault(index, []).append(tensor)
        else:
            self._new(index, None)
            self._twice.append((first, index))

    def _bind_dict(
        self, target: MutableMapping[Any, Any], document: Json, path: Path
    ) -> Callable[[], Any]:
        theirs = members_of(document)
        if theirs is None:
            self.differences.add(path, "is a dictionary here, and none in the checkpoint")
            return lambda: target
        self.differences.compare_keys(target, theirs, path, partial=self._partial)
        made = {
            key: self.bind(each, theirs[key], (*path, str(key)))
            for key, each in target.items()
            if key in theirs
        }

        def set_all() -> Any:
            for key, value in made.items():
                target[key] = value()
            return target

        return set_all

    def _bind_list(self, target: Any, document: Json, path: Path) -> Callable[[], Any]:
        theirs = list_of(document, type(target)) or []
        if len(theirs) != len(target):
            self.differences.add(
                path, f"has {len(target)} items here, and {len(theirs)} in the checkpoint"
            )
        made = [
            self.bind(each, other, (*path, str(i)))
            for i, (each, other) in enumerate(zip(target, theirs, strict=False))
        ]

        def set_all() -> Any:
            values = [value() for value in made]
            if isinstance(target, list):
                target[:] = values
                return target
            return tuple(values)

        return set_all

    def _bind_module(
        self, module: torch.nn.Module, document: Json, path: Path
    ) -> Callable[[], Any]:
        state = dict(module.state_dict())
        resting = [each for each in state.values() if isinstance(each, WithoutMemory)]
        if resting:
            self._compare_forms(state, document, path)
            made = self.value(document, path, self._fresh_in(_directory_of(resting)))
            return lambda: give_state(module, made(), shown(path))
        known = {each.untyped_storage().data_ptr() for each in _memory_of(module)}
        in_place = all(
            each.untyped_storage().data_ptr() in known
            for each in state.values()
            if isinstance(each, torch.Tensor) and each.numel()
        )
        if in_place and all(isinstance(each, torch.Tensor) for each in state.values()):
            self._bind_dict(state, document, path)
            return lambda: module
        self._compare_forms(state, document, path)
        return self._bind_stateful(module, document, path)

    def _compare_forms(self, state: Mapping[str, Any], document: Json, path: Path) -> None:
        """Compare shapes for a module whose own ``load_state_dict`` would check them too late."""
        theirs = members_of(document) or {}
        self.differences.compare_keys(state, theirs, path, partial=self._partial)
        for key, each in state.items():
            if isinstance(each, torch.Tensor) and key in theirs:
                entry = self._entry(tensor_of(theirs[key]))
                if entry is None or tuple(each.shape) != entry.shape:
                    shape = None if entry is None else entry.shape
                    how = f"is of {tuple(each.shape)} here, and of {shape} in the checkpoint"
                    self.differences.add((*path, key), how)

    def _bind_stateful(self, target: Stateful, document: Json, path: Path) -> Callable[[], Any]:
        taker = taker_of(target)
        if isinstance(taker, torch.optim.Optimizer):
            self._check_optimizer(taker, document, path)
        optimizer = stepped(taker)
        if isinstance(optimizer, OnFlash):
            directory = optimizer._penstock.config.directories[0]
            made = self.value(document, path, self._fresh_in(directory))
        else:
            made = self._reuse(taker.state_dict(), document, path)

        def give() -> Stateful:
            give_state(taker, made(), shown(path))
            return target

        return give

    def _reuse(self, state: Any, document: Json, path: Path) -> Callable[[], Any]:
        """Bind the checkpoint's state to existing tensors of the same key, dtype and shape."""
        theirs = members_of(document)
        if isinstance(state, Mapping) and theirs is not None:
            made = {
                key: self._reuse(state.get(key), each, (*path, str(key)))
                for key, each in theirs.items()
            }
            kind = Counter if isinstance(state, Counter) else dict  # MultiStepLR relies on it
            return lambda: kind({key: value() for key, value in made.items()})
        index = tensor_of(document)
        entry = self._entry(index)
        if isinstance(state, torch.Tensor) and index is not None and entry is not None:
            form = name_of(state.dtype), tuple(state.shape)
            if form == (entry.dtype, entry.shape) and not _overlaps_itself(state):
                self._into.setdefault(index, []).append(state.detach())
                return lambda: state
        return self.value(document, path)

    def _check_optimizer(
        self, optimizer: torch.optim.Optimizer, document: Json, path: Path
    ) -> None:
        groups = (members_of(document) or {}).get("param_groups")
        ours = [len(group["params"]) for group in optimizer.param_groups]
        theirs = []
        for group in groups if isinstance(groups, list) else []:
            params = (members_of(group) or {}).get("params")
            theirs.append(len(params) if isinstance(params, list) else -1)
        if ours != theirs:
            self.differences.add(
                path, f"has groups of {ours} parameters here, and {theirs} in the checkpoint"
            )

    def _fresh_in(self, directory: str) -> Fresh:
        """Return where to put what is on its way home: in a file there, if that is much and on flash."""
        is_little = sum(each.nbytes for each in self._manifest.tensors) <= _IN_MEMORY_BYTES
        if is_little or not directory:
            return self._fresh
        return Fresh(directory)

    def _entry(self, index: int | None) -> TensorEntry | None:
        tensors = self._manifest.tensors
        return tensors[index] if index is not None and index < len(tensors) else None


def _directory_of(resting: Iterable[WithoutMemory]) -> str:
    """Return the directory of a home that is on flash; ``""`` if none is."""
    return next((found for each in resting if (found := each.home.directory)), "")


def _of_array(array: Any) -> torch.Tensor | None:
    """Return a tensor that shares an array's memory; None if the array is read-only or not numeric."""
    if not array.flags.writeable:
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


def _as_array(tensor: torch.Tensor) -> Any:
    try:
        return tensor.numpy()
    except TypeError:
        raise FormError(f"an array is of {name_of(tensor.dtype)}, which NumPy has not") from None


def _memory_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _view(owner: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """Return a view of an owner's bytes as described by the manifest."""
    dtype = DTYPES[entry.dtype].dtype
    if not owner.is_contiguous():
        owner = owner.contiguous()
    flat = owner.view(-1).view(torch.uint8)[entry.skip_bytes :][: entry.extent_bytes].view(dtype)
    if entry.strides is None:
        return flat.view(entry.shape)
    return flat.as_strided(entry.shape, entry.strides)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.device == other.device and one.data_ptr() == other.data_ptr() and is_plain(one)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    plain = (each.detach().cpu().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*plain)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(step == 0 and size > 1 for size, step in pairs)
