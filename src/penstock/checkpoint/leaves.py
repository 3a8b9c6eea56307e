"""The tensors of a state: each memory once, and what else is a view of it.

[Note: shared memory]
    Tied weights are one tensor under two keys, and a flat buffer may be there beside views of it. A
    tensor that lies within another of the state, which is contiguous, is no *owner*: it is described
    as a view of that one and has no bytes of its own. Two that overlap in part are both owners, for
    then neither's bytes do for the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoint.dtypes import DTYPES, name_of
from penstock.checkpoint.values import Json, Path, encode, shown
from penstock.core.errors import CheckpointError

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor of a state.

    Attributes:
        name: Its path of keys, told apart from others' of the same words.
        tensor: It.
        top: The first of those keys: tensors of one part of the state lie together.
        frozen: Whether training leaves it as it is, as far as is known.
        owner: Of which leaf it is a view; -1 if it has bytes of its own.
        skip_bytes: Where in the owner's bytes it begins.
    """

    name: str
    tensor: torch.Tensor
    top: str
    frozen: bool = False
    owner: int = -1
    skip_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return self.tensor.nbytes


class Leaves:
    """Collects tensors, each once; numbers them in the order in which they come."""

    def __init__(self) -> None:
        """None yet."""
        self._tensors: list[torch.Tensor] = []
        self._paths: list[Path] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def add(self, path: Path, value: torch.Tensor | Array) -> int:
        """Its number. Raises CheckpointError, with the path, if it cannot be put into a file."""
        tensor = _checked(path, value)
        key = identity(tensor)
        if key in self._known:
            return self._known[key]
        self._tensors.append(tensor)
        self._paths.append(path)
        if tensor.numel():
            self._known[key] = len(self._tensors) - 1
        return len(self._tensors) - 1

    def all(self, frozen: frozenset[int] = frozenset()) -> list[Leaf]:
        """Return all leaves, with their owners.

        Args:
            frozen: Addresses of tensors that training leaves as they are.
        """
        names = _unique(self._paths)
        tops = [path[0] if path else "" for path in self._paths]
        owners = _owners(self._tensors)
        return [
            Leaf(name, tensor, top, tensor.data_ptr() in frozen, *owner)
            for name, tensor, top, owner in zip(names, self._tensors, tops, owners, strict=True)
        ]


def collect(state: object, frozen: frozenset[int] = frozenset()) -> tuple[Json, list[Leaf]]:
    """A state's JSON, and the tensors that it names by number. Raises CheckpointError."""
    leaves = Leaves()
    document = encode(state, leaves.add)
    return document, leaves.all(frozen)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie one after another in host memory, as they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _checked(path: Path, value: torch.Tensor | Array) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and torch.nn.parameter.is_lazy(value):
        raise _unfit(path, "a lazy module's parameter before its first run", "run it")
    tensor = value.detach() if isinstance(value, torch.Tensor) else _of_array(path, value)
    kind = type(tensor)
    if kind is not torch.Tensor:
        sharded = hasattr(tensor, "_local_tensor")
        advice = "save shards by penstock.checkpoint.dcp" if sharded else "save what it is made of"
        raise _unfit(path, f"a {kind.__qualname__}", advice)
    if tensor.is_quantized:
        raise _unfit(
            path, f"a quantized tensor of {tensor.dtype}", "save its int_repr() and scales"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise _unfit(path, f"a tensor of layout {layout}", "make it dense")
    if tensor.is_meta:
        raise _unfit(path, "a tensor on the meta device, without data,", "materialise it")
    if name_of(tensor.dtype) not in DTYPES:
        raise _unfit(path, f"a tensor of {tensor.dtype}", "convert it")
    return tensor


def _of_array(path: Path, value: Array) -> torch.Tensor:
    if type(value) is not np.ndarray:
        raise _unfit(path, f"a {type(value).__qualname__}", "give np.array(it)")
    if not value.dtype.isnative:
        raise _unfit(path, f"an array of {value.dtype} of the other byte order", "convert it")
    copied = not value.flags.writeable or min(value.strides, default=0) < 0
    try:
        return torch.from_numpy(value.copy() if copied else value)
    except (TypeError, ValueError) as error:
        raise _unfit(path, f"an array of {value.dtype}", "convert it") from error


def _unfit(path: Path, what: str, advice: str) -> CheckpointError:
    return CheckpointError(f"{shown(path)}: {what} has no form in a checkpoint; {advice}")


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Alike for tensors that are the same memory in the same way; all empty ones are alike."""
    if not tensor.numel():
        return (None,)
    bits = tensor.is_conj(), tensor.is_neg()
    place = tensor.device, tensor.data_ptr(), tensor.dtype
    return (*place, tuple(tensor.shape), tensor.stride(), *bits)


def _unique(paths: Sequence[Path]) -> list[str]:
    names: list[str] = []
    taken = {"__metadata__"}
    for path in paths:
        name = plain = shown(path).encode("utf-8", "backslashreplace").decode()
        count = 1
        while name in taken:
            count += 1
            name = f"{plain}#{count}"
        taken.add(name)
        names.append(name)
    return names


def _owners(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """See [Note: shared memory]."""
    found = [(-1, 0)] * len(tensors)
    for members in _by_storage(tensors):
        spans = []
        for index in members:
            tensor = tensors[index]
            start = tensor.data_ptr()
            end = start + extent_bytes(tensor)
            spans.append((start, -end, not tensor.is_contiguous(), index))
        owner, end = -1, 0
        for start, minus_end, _, index in sorted(spans):
            if owner >= 0 and -minus_end <= end:
                found[index] = owner, start - tensors[owner].data_ptr()
            elif -minus_end > end and tensors[index].is_contiguous():
                owner, end = index, -minus_end
    return found


def _by_storage(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_conj() and not tensor.is_neg():
            key = tensor.device, tensor.untyped_storage().data_ptr()
            groups.setdefault(key, []).append(index)
    return (members for members in groups.values() if len(members) > 1)


def extent_bytes(tensor: torch.Tensor) -> int:
    """From its first to past its last element, in memory; strides are never negative."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
