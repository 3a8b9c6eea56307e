"""Tensors that a checkpoint holds byte for byte, found by checksums without reading its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.checkpoint.frames import Encoder
from penstock.checkpoint.manifest import FileEntry, Manifest, TensorEntry, blocks_of
from penstock.checkpoint.streams import BlockWrites, Buffers, fill
from penstock.checkpoint.tensors import FilePlan, Prepared
from penstock.checkpoint.writer import EncodedBody, agrees


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Place:
    """A tensor whose bytes a checkpoint has.

    Attributes:
        name: Its name in the checkpoint.
        tensor: The tensor.
        path: Path of the data file.
        offset_bytes: Its offset in the file.
        nbytes: Its length.
        codec: Its codec there; empty if it is stored as it is.
    """

    name: str
    tensor: torch.Tensor
    path: str
    offset_bytes: int
    nbytes: int
    codec: str = ""


def places(where: str, manifest: Manifest, prepared: Prepared) -> list[Place]:
    """Return the tensors of a state that a checkpoint has: those whose blocks are all the same.

    Of a file with encoded tensors these are all or none: the place of each depends on those before it.

    Args:
        where: Path of the checkpoint.
        manifest: Its manifest.
        prepared: The state.
    """
    found: list[Place] = []
    known = {each.name: number for number, each in enumerate(manifest.files)}
    for number, plan in enumerate(prepared.plans):
        if plan.name not in known:
            continue
        its = known[plan.name]
        codecs = {each.codec for each in manifest.tensors if each.file == its and each.codec}
        if not codecs:
            entries = _plain(plan, number, prepared, manifest, manifest.files[its])
        elif len(codecs) == 1:
            entries = _encoded(plan, prepared, manifest, manifest.files[its], codecs.pop())
        else:
            continue
        found += [
            Place(
                name=each.name,
                tensor=prepared.tensors[index],
                path=os.path.join(where, plan.name),
                offset_bytes=each.offset_bytes,
                nbytes=each.nbytes,
                codec=each.codec,
            )
            for index, each in entries.items()
        ]
    return found


def _plain(
    plan: FilePlan, number: int, prepared: Prepared, manifest: Manifest, entry: FileEntry
) -> dict[int, TensorEntry]:
    if entry.nbytes != plan.nbytes:
        return {}
    size = manifest.block_bytes
    same = _same_blocks(plan, prepared, entry, size)
    members = {index: prepared.entries[index] for index in plan.members}
    return {
        index: each
        for index, each in members.items()
        if each.file == number and _within(each, same, size)
    }


def _encoded(
    plan: FilePlan, prepared: Prepared, manifest: Manifest, entry: FileEntry, codec: str
) -> dict[int, TensorEntry]:
    """Encode the tensors again: the same tensors are the same bytes."""
    regions = plan.regions(prepared.tensors)
    body = EncodedBody(plan, prepared.entries, regions, Encoder(codec))
    with Buffers(manifest.block_bytes) as buffers:
        if not agrees(body, BlockWrites(buffers), entry):
            return {}
    return {index: each for index, each in body.entries.items() if each.nbytes}


def _same_blocks(
    plan: FilePlan, prepared: Prepared, entry: FileEntry, block_bytes: int
) -> list[bool]:
    regions = plan.regions(prepared.tensors)
    starts = [start for start, _ in regions]
    same = []
    with Buffers(block_bytes) as buffers:
        block = buffers.take(BlockWrites(buffers))
        for index, offset in enumerate(blocks_of(plan.nbytes, block_bytes)):
            end = min(offset + block_bytes, plan.nbytes)
            checksum = fill(regions, starts, offset, end, block.address)
            same.append(entry.has(index, checksum))
        buffers.give(block)
    return same


def _within(entry: TensorEntry, same: Sequence[bool], block_bytes: int) -> bool:
    if not entry.nbytes:
        return False
    end = entry.offset_bytes + entry.nbytes
    return all(same[entry.offset_bytes // block_bytes : -(-end // block_bytes)])
