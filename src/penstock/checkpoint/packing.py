"""Which tensors go into which file, and where: files as safetensors has them.

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
from typing import Final

from penstock.checkpoint.dtypes import DTYPES, name_of
from penstock.checkpoint.leaves import Leaf
from penstock.checkpoint.manifest import TensorEntry, is_dense
from penstock.checkpoint.moves import Fixed, Region, region_of
from penstock.core.units import MIB, round_up

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
