"""Tensors of a state that is saved: each memory once, and its place in a file of safetensors.

[Note: shared memory]
    Tied weights are one tensor under two keys, and a flat buffer may be there beside views of it. A
    tensor that lies within another of the state, which is contiguous, is no *owner*: it is described
    as a view of that one and has no bytes of its own. Two that overlap in part are both owners, for
    then neither's bytes do for the other.

[Note: packing]
    A part of the state (a key of its top level) has files of its own, so that a part that did not change
    can be kept as it is; what training leaves as it is lies apart for the same reason; small parts
    share. In a file, tensors whose length is a multiple of 64 bytes come first, then the
    others, the longest elements first: so all are aligned, though the format allows no gap between two
    tensors. The header is filled up with spaces, as the format allows, so that tensors begin at a
    multiple of 4096.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoint.manifest import TensorEntry, is_dense
from penstock.checkpoint.regions import Fixed, Region, await_devices, region_of
from penstock.checkpoint.stateful import frozen_in, plain_state
from penstock.checkpoint.values import DTYPES, Json, Path, encode, name_of, shown
from penstock.core.errors import CheckpointError
from penstock.core.units import MIB, round_up

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


FILE_BYTES: Final = 256 * MIB
"""A file is closed once it is as long as this."""
_SMALL_BYTES: Final = 32 * MIB
"""Smaller parts of a state share a file: each file costs some round trips to the device."""
_ALIGNMENT_BYTES: Final = 64
_HEADER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """A file that is to be written.

    Attributes:
        name: In the checkpoint's directory.
        header: Its first bytes.
        leaves: Numbers of the tensors in it, in their order there.
        nbytes: Its exact length.
    """

    name: str
    header: bytes
    leaves: tuple[int, ...]
    nbytes: int

    def regions(self, tensors: Sequence[Leaf]) -> list[tuple[int, Region]]:
        """Return offsets in the file, and the regions that begin there."""
        found: list[tuple[int, Region]] = [(0, Fixed(self.header))]
        offset = len(self.header)
        for index in self.leaves:
            region = region_of(tensors[index].tensor)
            if region.nbytes:
                found.append((offset, region))
            offset += region.nbytes
        return found


def pack(
    leaves: Sequence[Leaf], *, prefix: str = "data", file_bytes: int = FILE_BYTES
) -> tuple[list[FilePlan], tuple[TensorEntry, ...]]:
    """Files for the tensors, and what a manifest says of each tensor. See [Note: packing]."""
    plans: list[FilePlan] = []
    places: dict[int, tuple[int, int]] = {}
    for members in _files(leaves, file_bytes):
        members.sort(key=lambda index: _rank(leaves[index]))
        header = header_of([leaves[index] for index in members], {})
        offset = len(header)
        for index in members:
            places[index] = len(plans), offset
            offset += leaves[index].nbytes
        name = f"{prefix}-{len(plans):05}.safetensors"
        plans.append(FilePlan(name, header, tuple(members), offset))
    return plans, tuple(_entry(leaf, places.get(i)) for i, leaf in enumerate(leaves))


def _files(leaves: Sequence[Leaf], file_bytes: int) -> Iterator[list[int]]:
    for members in _parts(leaves):
        file: list[int] = []
        length = 0
        for index in members:
            file.append(index)
            length += leaves[index].nbytes
            if length >= file_bytes:
                yield file
                file, length = [], 0
        if file:
            yield file


def _parts(leaves: Sequence[Leaf]) -> Iterator[list[int]]:
    parts: dict[tuple[str, bool], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if leaf.owner < 0:
            parts.setdefault((leaf.top, leaf.frozen), []).append(index)
    small: dict[bool, list[int]] = {}
    for (_, frozen), members in parts.items():
        if sum(leaves[index].nbytes for index in members) < _SMALL_BYTES:
            small.setdefault(frozen, []).extend(members)
        else:
            yield members
    yield from small.values()


def _rank(leaf: Leaf) -> int:
    if leaf.nbytes % _ALIGNMENT_BYTES == 0:
        return -_ALIGNMENT_BYTES
    return -leaf.tensor.element_size()


def header_of(leaves: Sequence[Leaf], encoded: Mapping[str, int], least_bytes: int = 0) -> bytes:
    """The first bytes of a data file.

    Args:
        leaves: What is in it, in this order.
        encoded: How long those are, by name, that are there as frames of a codec.
        least_bytes: How long it is to be at least.
    """
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for leaf in leaves:
        kind = DTYPES[name_of(leaf.tensor.dtype)]
        shape = [*leaf.tensor.shape] + ([kind.parts] if kind.parts > 1 else [])
        code, nbytes = kind.code, leaf.nbytes
        if leaf.name in encoded:
            code, nbytes = "U8", encoded[leaf.name]
            shape = [nbytes]
        end = begin + nbytes
        entries[leaf.name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    length = max(round_up(8 + len(text), _HEADER_BYTES), least_bytes) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _entry(leaf: Leaf, place: tuple[int, int] | None) -> TensorEntry:
    tensor = leaf.tensor
    shape, strides = tuple(tensor.shape), tensor.stride()
    is_view = place is None
    keep = not tensor.is_contiguous() and (is_view or is_dense(shape, strides))
    file, offset = (-1, 0) if place is None else place
    return TensorEntry(
        name=leaf.name,
        dtype=name_of(tensor.dtype),
        shape=shape,
        strides=strides if keep else None,
        file=file,
        offset_bytes=offset,
        owner=leaf.owner,
        skip_bytes=leaf.skip_bytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A state that is about to be saved: what goes where.

    Attributes:
        document: What is no tensor.
        leaves: The tensors.
        plans: Files.
        entries: What the manifest says of the tensors.
    """

    document: Json
    leaves: Sequence[Leaf]
    plans: Sequence[FilePlan]
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(each.nbytes for each in self.plans)


def prepare(
    state: object, *, private: list[Any] | None = None, file_bytes: int = FILE_BYTES
) -> Prepared:
    """Say what of a state goes where.

    Args:
        state: It.
        private: Where parts are added that were made for the occasion.
        file_bytes: A file is closed once it is as long as this.

    Raises:
        CheckpointError: Something has no form in a checkpoint.
    """
    plain = plain_state(state, [] if private is None else private)
    document, leaves = collect(plain, frozenset(each.data_ptr() for each in frozen_in(state)))
    await_devices(each.tensor.device for each in leaves)
    plans, entries = pack(leaves, file_bytes=file_bytes)
    return Prepared(document, leaves, plans, entries)
