"""Tensors of a state to be saved: each memory once, and its place in a safetensors file.

[Note: shared memory]
    Tied weights are one tensor under two keys, and a state may have a flat buffer beside views of it. A
    tensor that lies within a contiguous one of the state is no *owner*: it is described as a view of
    that one and has no bytes of its own. Two that overlap in part are both owners, as neither contains
    the other's bytes.

[Note: packing]
    A part of the state (a key of its top level) has files of its own, so that an unchanged part can be
    kept; frozen parameters lie apart for the same reason; small parts share files. In a file, tensors
    whose length is a multiple of 64 bytes come first, then the others, the longest elements first: so all
    are aligned, though the format allows no gaps. The header is padded with spaces, as the format allows,
    so that tensors begin at a multiple of 4096.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoint.manifest import TensorEntry, extent_bytes, is_dense
from penstock.checkpoint.regions import Fixed, SourceRegion, await_devices, region_of
from penstock.checkpoint.stateful import frozen_in, plain_state
from penstock.checkpoint.values import DTYPES, Json, Path, encode, name_of, shown
from penstock.core.errors import CheckpointError
from penstock.core.units import MIB, round_up
from penstock.homed import HostValues, WithoutMemory

Array: TypeAlias = NDArray[Any]


class Leaves:
    """Tensors of a state, each once, numbered in the order in which they come.

    Attributes:
        tensors: The tensors.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.tensors: list[torch.Tensor] = []
        self._paths: list[Path] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._values = HostValues()
        self._frozen: set[int] = set()
        """Numbers of those that need no gradient."""

    def add(self, path: Path, value: torch.Tensor | Array) -> int:
        """Return its number. Raises CheckpointError, with the path, if it cannot be put into a file."""
        frozen = False
        if isinstance(value, WithoutMemory):
            frozen = not value.parameter.requires_grad
            value = self._values.of(value)
        tensor = _checked(path, value)
        key = identity(tensor)
        if key in self._known:
            return self._known[key]
        if frozen:
            self._frozen.add(len(self.tensors))
        self.tensors.append(tensor)
        self._paths.append(path)
        if tensor.numel():
            self._known[key] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def entries(self, *, has_views: bool = True) -> list[TensorEntry]:
        """Describe all tensors, without their places.

        Args:
            has_views: Describe those that lie within another as its views.
        """
        none = [(-1, 0)] * len(self.tensors)
        owners = _owners(self.tensors) if has_views else none
        every = zip(_unique(self._paths), self.tensors, owners, strict=True)
        return [_entry(name, tensor, *owner) for name, tensor, owner in every]

    def parts(self, frozen: frozenset[int]) -> list[tuple[str, bool]]:
        """Return the part of the state that each tensor is of, and whether training leaves it as it is.

        Args:
            frozen: Addresses of tensors that training leaves as they are.
        """
        every = enumerate(zip(self._paths, self.tensors, strict=True))
        return [
            (path[0] if path else "", i in self._frozen or each.data_ptr() in frozen)
            for i, (path, each) in every
        ]


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
    """Return a key that is equal for tensors with the same memory and form; all empty ones are equal."""
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
    """Return each tensor's owner, or -1, and its offset there; see [Note: shared memory]."""
    found = [(-1, 0)] * len(tensors)
    for members in _by_storage(tensors):
        spans = []
        for index in members:
            tensor = tensors[index]
            start = tensor.data_ptr()
            end = start + extent_bytes(tensor.shape, tensor.stride(), tensor.element_size())
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


FILE_BYTES: Final = 256 * MIB
"""A file is closed once it is as long as this."""
_SMALL_BYTES: Final = 32 * MIB
"""Smaller parts of a state share a file: each file costs some round trips to the device."""
_ALIGNMENT_BYTES: Final = 64
_HEADER_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class FilePlan:
    """A file to be written.

    Attributes:
        name: Its name in the checkpoint's directory.
        header: Its first bytes.
        members: Numbers of the tensors in it, in their order there.
        nbytes: Its exact length.
    """

    name: str
    header: bytes
    members: tuple[int, ...]
    nbytes: int

    def regions(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, SourceRegion]]:
        """Return offsets in the file, and the regions that begin there."""
        found: list[tuple[int, SourceRegion]] = [(0, Fixed(self.header))]
        offset = len(self.header)
        for index in self.members:
            region = region_of(tensors[index])
            if region.nbytes:
                found.append((offset, region))
            offset += region.nbytes
        return found


def pack(
    entries: Sequence[TensorEntry],
    parts: Sequence[tuple[str, bool]],
    *,
    prefix: str = "data",
    file_bytes: int = FILE_BYTES,
) -> tuple[list[FilePlan], list[TensorEntry]]:
    """Return files for some tensors, and their entries with their places. See [Note: packing].

    Args:
        entries: The tensors.
        parts: What each is a part of.
        prefix: Beginning of the files' names.
        file_bytes: A file is closed once it is as long as this.
    """
    plans: list[FilePlan] = []
    placed = list(entries)
    for members in _files(entries, parts, file_bytes):
        members.sort(key=lambda index: _rank(entries[index]))
        header = header_of([entries[index] for index in members])
        offset = len(header)
        for index in members:
            placed[index] = replace(entries[index], file=len(plans), offset_bytes=offset)
            offset += entries[index].nbytes
        name = f"{prefix}-{len(plans):05}.safetensors"
        plans.append(FilePlan(name, header, tuple(members), offset))
    return plans, placed


def _files(
    entries: Sequence[TensorEntry], parts: Sequence[tuple[str, bool]], file_bytes: int
) -> Iterator[list[int]]:
    for members in _parts(entries, parts):
        file: list[int] = []
        length = 0
        for index in members:
            file.append(index)
            length += entries[index].nbytes
            if length >= file_bytes:
                yield file
                file, length = [], 0
        if file:
            yield file


def _parts(
    entries: Sequence[TensorEntry], parts: Sequence[tuple[str, bool]]
) -> Iterator[list[int]]:
    groups: dict[tuple[str, bool], list[int]] = {}
    for index, (entry, part) in enumerate(zip(entries, parts, strict=True)):
        if entry.owner < 0:
            groups.setdefault(part, []).append(index)
    small: dict[bool, list[int]] = {}
    for (_, frozen), members in groups.items():
        if sum(entries[index].nbytes for index in members) < _SMALL_BYTES:
            small.setdefault(frozen, []).extend(members)
        else:
            yield members
    yield from small.values()


def _rank(entry: TensorEntry) -> int:
    if entry.nbytes % _ALIGNMENT_BYTES == 0:
        return -_ALIGNMENT_BYTES
    return -DTYPES[entry.dtype].itemsize


def header_of(entries: Sequence[TensorEntry], least_bytes: int = 0) -> bytes:
    """Return the first bytes of a data file.

    Args:
        entries: Its tensors, in their order there.
        least_bytes: Minimum length.
    """
    found: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for each in entries:
        kind = DTYPES[each.dtype]
        code, shape = kind.code, [*each.shape] + ([kind.parts] if kind.parts > 1 else [])
        if each.codec:
            code, shape = "U8", [each.stored_bytes]
        end = begin + each.file_bytes
        found[each.name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(found, separators=(",", ":")).encode("ascii")
    length = max(round_up(8 + len(text), _HEADER_BYTES), least_bytes) - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def _entry(name: str, tensor: torch.Tensor, owner: int, skip_bytes: int) -> TensorEntry:
    shape, strides = tuple(tensor.shape), tensor.stride()
    keep = not tensor.is_contiguous() and (owner >= 0 or is_dense(shape, strides))
    return TensorEntry(
        name=name,
        dtype=name_of(tensor.dtype),
        shape=shape,
        strides=strides if keep else None,
        owner=owner,
        skip_bytes=skip_bytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A state to be saved: its values, and the place of each tensor.

    Attributes:
        document: Its values other than tensors, as JSON.
        tensors: Its tensors, by number.
        entries: Entries of the tensors for the manifest.
        plans: Files.
    """

    document: Json
    tensors: Sequence[torch.Tensor]
    entries: Sequence[TensorEntry]
    plans: Sequence[FilePlan]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(each.nbytes for each in self.plans)


def prepare(
    state: object, *, private: list[Any] | None = None, file_bytes: int = FILE_BYTES
) -> Prepared:
    """Find the values and tensors of a state, and a place for each tensor.

    Args:
        state: The state.
        private: List to which parts are added that were made for this save.
        file_bytes: A file is closed once it is as long as this.

    Raises:
        CheckpointError: Something has no form in a checkpoint.
    """
    leaves = Leaves()
    document = encode(plain_state(state, [] if private is None else private), leaves.add)
    await_devices(each.device for each in leaves.tensors)
    parts = leaves.parts(frozenset(each.data_ptr() for each in frozen_in(state)))
    plans, entries = pack(leaves.entries(), parts, file_bytes=file_bytes)
    return Prepared(document, leaves.tensors, entries, plans)
