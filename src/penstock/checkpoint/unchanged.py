"""What of a state a checkpoint has, byte for byte: told by its checksums, without reading its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.checkpoint.leaves import Leaf
from penstock.checkpoint.manifest import Manifest, TensorEntry, blocks_of
from penstock.checkpoint.packing import FilePlan
from penstock.checkpoint.prepared import Prepared
from penstock.checkpoint.streams import Buffers, digest, fill


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """A tensor whose bytes a checkpoint has.

    Attributes:
        name: Its name there.
        tensor: It.
        path: The data file.
        offset_bytes: Where in the file it begins.
        nbytes: How long it is.
    """

    name: str
    tensor: torch.Tensor
    path: str
    offset_bytes: int
    nbytes: int


def places(where: str, manifest: Manifest, prepared: Prepared) -> list[Place]:
    """The tensors of a state that lie in blocks which are what a checkpoint has.

    Args:
        where: The checkpoint.
        manifest: What it says of itself.
        prepared: The state.
    """
    found: list[Place] = []
    known = {each.name: each for each in manifest.files}
    for number, plan in enumerate(prepared.plans):
        entry = known.get(plan.name)
        if entry is None or entry.nbytes != plan.nbytes:
            continue
        same = _same_blocks(plan, prepared.leaves, entry.sums, manifest.block_bytes)
        for index in plan.leaves:
            each = prepared.entries[index]
            if each.file == number and _within(each, same, manifest.block_bytes):
                leaf = prepared.leaves[index]
                found.append(
                    Place(
                        name=each.name,
                        tensor=leaf.tensor,
                        path=os.path.join(where, plan.name),
                        offset_bytes=each.offset_bytes,
                        nbytes=each.nbytes,
                    )
                )
    return found


def _same_blocks(
    plan: FilePlan, leaves: Sequence[Leaf], sums: Sequence[str], block_bytes: int
) -> list[bool]:
    regions = plan.regions(leaves)
    starts = [start for start, _ in regions]
    same = []
    with Buffers(block_bytes) as buffers:
        block = buffers.take()
        assert block is not None
        for offset, known in zip(blocks_of(plan.nbytes, block_bytes), sums, strict=True):
            end = min(offset + block_bytes, plan.nbytes)
            fill(regions, starts, offset, end, block.address)
            same.append(digest(block.address, end - offset) == known)
        buffers.give(block)
    return same


def _within(entry: TensorEntry, same: Sequence[bool], block_bytes: int) -> bool:
    if not entry.nbytes:
        return False
    end = entry.offset_bytes + entry.nbytes
    return all(same[entry.offset_bytes // block_bytes : -(-end // block_bytes)])
