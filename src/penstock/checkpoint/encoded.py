"""A data file with encoded tensors: what is in it, one stretch of memory after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.checkpoint.dtypes import name_of
from penstock.checkpoint.frames import ALIGNMENT_BYTES, Encoder
from penstock.checkpoint.leaves import Leaf
from penstock.checkpoint.manifest import FRAME_BYTES, TensorEntry
from penstock.checkpoint.moves import Region
from penstock.checkpoint.packing import FilePlan, header_of
from penstock.codec.base import HEADER_BYTES, Bytes
from penstock.core.units import round_up


class FileSpan(NamedTuple):
    """A stretch of a file, valid until the next one is asked for.

    Attributes:
        address: Where it is in memory.
        nbytes: How long it is.
        read_end: Bytes of the plain file before this are not read any more.
    """

    address: int
    nbytes: int
    read_end: int


class EncodedBody:
    """Body of a file, then its header: lengths are known only afterwards.

    Attributes:
        header_bytes: What the header takes, whatever comes.
        most_bytes: The longest that the file can be.
    """

    def __init__(
        self,
        plan: FilePlan,
        leaves: Sequence[Leaf],
        regions: Sequence[tuple[int, Region]],
        encoder: Encoder,
    ) -> None:
        """Make nothing yet.

        Args:
            plan: The file as it would be without a codec.
            leaves: All of the state's.
            regions: What is in that file, the header first.
            encoder: Makes frames.
        """
        self._places: dict[int, tuple[int, int]] = {}
        self._numbers = plan.leaves
        self._leaves = [leaves[index] for index in plan.leaves]
        by_place = dict(regions[1:])
        self._regions: list[tuple[int, Region | None]] = []
        offset = len(plan.header)
        for leaf in self._leaves:
            self._regions.append((offset, by_place[offset] if leaf.nbytes else None))
            offset += leaf.nbytes
        self._encoder = encoder
        self._pays = [
            region is not None and encoder.pays(region, name_of(leaf.tensor.dtype))
            for leaf, (_, region) in zip(self._leaves, self._regions, strict=True)
        ]
        longest = {
            leaf.name: _most_bytes(leaf.nbytes)
            for leaf, pays in zip(self._leaves, self._pays, strict=True)
            if pays
        }
        self.header_bytes = len(header_of(self._leaves, longest))
        self.most_bytes = self.header_bytes + sum(
            longest.get(leaf.name, leaf.nbytes) for leaf in self._leaves
        )

    def spans(self) -> Iterator[FileSpan]:
        """All of it but the header, in order. Raises CheckpointError if a tensor was changed."""
        offset = self.header_bytes
        for index, number in enumerate(self._numbers):
            begin = offset
            start, region = self._regions[index]
            if region is not None:
                for memory, end in self._made(index, region):
                    offset += memory.size
                    yield FileSpan(memory.ctypes.data, memory.size, start + end)
            self._places[number] = begin, offset - begin if self._pays[index] else 0

    def enter(self, entries: list[TensorEntry]) -> None:
        """Say where its tensors are, in what a manifest says of all; when all spans were made."""
        for number, (offset, stored) in self._places.items():
            entry = replace(entries[number], offset_bytes=offset)
            if stored:
                entry = replace(entry, codec=self._encoder.name, stored_bytes=stored)
            entries[number] = entry

    def header(self) -> bytes:
        """The header; call it when all spans were made."""
        encoded = {
            leaf.name: self._places[number][1]
            for number, leaf in zip(self._numbers, self._leaves, strict=True)
            if self._places[number][1]
        }
        return header_of(self._leaves, encoded, self.header_bytes)

    def _made(self, index: int, region: Region) -> Iterator[tuple[Bytes, int]]:
        if self._pays[index]:
            return self._encoder.frames(region, name_of(self._leaves[index].tensor.dtype))
        return _pieces(region)


def _most_bytes(nbytes: int) -> int:
    return round_up(nbytes + HEADER_BYTES * -(-nbytes // FRAME_BYTES), ALIGNMENT_BYTES)


def _pieces(region: Region) -> Iterator[tuple[Bytes, int]]:
    """A tensor's bytes as they are, piece by piece, and where each ends."""
    memory = np.empty(min(FRAME_BYTES, region.nbytes), np.uint8)
    for start in range(0, region.nbytes, FRAME_BYTES):
        stop = min(start + FRAME_BYTES, region.nbytes)
        region.copy_out(start, stop, memory.ctypes.data)
        yield memory[: stop - start], stop
