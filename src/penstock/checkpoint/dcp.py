"""Storage for ``torch.distributed.checkpoint`` (DCP), as used with FSDP.

::

    dcp.save(state_dict, storage_writer=DcpWriter(path))
    dcp.load(state_dict, storage_reader=DcpReader(path))

DCP distributes tensors over ranks, and redistributes them for another number of ranks. Each rank writes
data files into the hidden directory; the coordinator writes the manifest and renames the directory.
Objects that DCP would pickle are JSON in the manifest (:mod:`penstock.checkpoint.values`), or refused.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from penstock.checkpoint.allocation import Fresh
from penstock.checkpoint.api import CheckpointStore
from penstock.checkpoint.frames import stored_in
from penstock.checkpoint.manifest import FileEntry, TensorEntry
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.checkpoint.regions import TargetRegion
from penstock.checkpoint.streams import Buffers
from penstock.checkpoint.tensors import Leaves, Prepared, pack
from penstock.checkpoint.values import DTYPES, FormError, Json, Path, decode, encode, shown, whole
from penstock.checkpoint.writer import FilesWriter
from penstock.core.errors import CheckpointError, DamagedError
from penstock.core.files import absolute_path

_KEY: Final = "dcp"


@dataclass(frozen=True, slots=True)
class _Stored:
    """Report of a rank to the coordinator on one item.

    Attributes:
        entry: Entry of a tensor; its file is a number among the rank's.
        document: JSON of an item that is no tensor.
        files: All files of the rank, with its first item only.
    """

    entry: TensorEntry | None
    document: Json
    files: tuple[FileEntry, ...]


class DcpWriter(StorageWriter):
    """Writer for ``torch.distributed.checkpoint.save``."""

    def __init__(
        self, path: str | os.PathLike[str], *, store: CheckpointStore | None = None
    ) -> None:
        """Touch nothing yet.

        Args:
            path: Path of the checkpoint, the same on all ranks, on a file system that they share.
            store: Saves it; for tests.
        """
        self._path = absolute_path(path, "the checkpoint")
        self._store = CheckpointStore() if store is None else store
        self._claimed: ExitStack | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, perhaps to another path."""
        if checkpoint_id is not None:
            self._path = absolute_path(checkpoint_id, "the checkpoint")
        self._let_go(CheckpointError("another rank has failed"))

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Make the hidden directory, as coordinator. Raises as :func:`penstock.checkpoint.save`."""
        if is_coordinator:
            self._claimed = ExitStack()
            try:
                self._claimed.enter_context(self._store.claimed(self._path))
            except BaseException:
                self._claimed = None
                raise

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank a prefix for the names of its files."""
        return [replace(plan, storage_data=f"rank{i:05}") for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; they are on the device when this returns.

        Raises:
            CheckpointError: Something has no form in a checkpoint.
            TransferError: The device refuses.
        """
        try:
            return self._write_data(plan, planner)
        except BaseException as error:
            self._let_go(error)
            raise

    def _write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        leaves = Leaves()
        numbers: list[int] = []
        documents: list[Json] = []
        for item in plan.items:
            path = (_name_of(item.index),)
            if item.type is WriteItemType.BYTE_IO:
                documents.append(encode(_object(planner, item), _refuse, path))
                numbers.append(-1)
            else:
                data = planner.resolve_data(item)
                assert isinstance(data, torch.Tensor)
                documents.append(None)
                numbers.append(leaves.add(path, data.detach()))
        plans, entries = pack(
            leaves.entries(has_views=False),
            leaves.parts(frozenset()),
            prefix=plan.storage_data,
            file_bytes=self._store.file_bytes,
        )
        prepared = Prepared(None, leaves.tensors, entries, plans)
        with (
            self._store.disk.open(self._store.hidden_path(self._path)) as hidden,
            FilesWriter(self._store.disk, hidden, Buffers(self._store.block_bytes)) as writer,
        ):
            writer.write_all(prepared, [each.regions(leaves.tensors) for each in plans])
            writer.finish()
        results: list[WriteResult] = []
        for item, number, document in zip(plan.items, numbers, documents, strict=True):
            entry = entries[number] if number >= 0 else None
            files = () if results else tuple(writer.entries)
            stored = _Stored(entry, document, files)
            size = 0 if entry is None else entry.nbytes
            results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=stored))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the directory, as coordinator."""
        files: list[FileEntry] = []
        tensors: list[TensorEntry] = []
        places: dict[MetadataIndex, int] = {}
        values: dict[str, Json] = {}
        for rank in results:
            first = len(files)
            for result in rank:
                stored: _Stored = result.storage_data
                files += stored.files
                if stored.entry is None:
                    values[result.index.fqn] = stored.document
                else:
                    places[result.index] = len(tensors)
                    tensors.append(replace(stored.entry, file=stored.entry.file + first))
        document = {_KEY: _describe(metadata, places, values)}
        try:
            self._store.publish(self._path, files, _without_twins(tensors), document)
        except BaseException as error:
            self._let_go(error)
            raise
        self._let_go()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _let_go(self, error: BaseException | None = None) -> None:
        """Unlock the hidden directory; remove it if there was an error."""
        claimed, self._claimed = self._claimed, None
        if claimed is not None:
            if error is None:
                claimed.close()
            else:
                claimed.__exit__(type(error), error, error.__traceback__)


class DcpReader(StorageReader):
    """Reader for ``torch.distributed.checkpoint.load``."""

    def __init__(
        self, path: str | os.PathLike[str], *, store: CheckpointStore | None = None
    ) -> None:
        """Touch nothing yet.

        Args:
            path: Path of a checkpoint that ``DcpWriter`` has written.
            store: Loads it; for tests.
        """
        self._path = absolute_path(path, "the checkpoint")
        self._store = CheckpointStore() if store is None else store
        self._places: Mapping[MetadataIndex, int] = {}
        self._values: Mapping[str, Json] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, perhaps from another path."""
        if checkpoint_id is not None:
            self._path = absolute_path(checkpoint_id, "the checkpoint")

    def read_metadata(self) -> Metadata:
        """Read the metadata. Raises DamagedError, or CheckpointError if DCP did not write it."""
        with OpenCheckpoint(self._path, self._store.disk) as opened:
            manifest = opened.manifest
        try:
            return _metadata(manifest.state[_KEY], manifest.tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._path!r} was not written by torch.distributed.checkpoint ({str(error)[:80]}):"
                " load it with penstock.checkpoint.load"
            ) from error

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Take the result of ``read_metadata``, perhaps of another rank."""
        self._places, self._values = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items and check each block. Raises as :func:`penstock.checkpoint.load`."""
        with OpenCheckpoint(self._path, self._store.disk) as opened:
            files: dict[int, list[tuple[ReadItem, TensorEntry]]] = {}
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _bytes(self._values[item.storage_index.fqn]))
                else:
                    entry = _owner(opened.manifest.tensors, self._places[item.storage_index])
                    files.setdefault(entry.file, []).append((item, entry))
            for index, members in sorted(files.items()):
                _read_file(opened, index, members, planner)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return isinstance(checkpoint_id, str | os.PathLike)


def _read_file(
    opened: OpenCheckpoint,
    index: int,
    members: list[tuple[ReadItem, TensorEntry]],
    planner: LoadPlanner,
) -> None:
    """Read one file's items: whole chunks in place, others through memory of their own."""
    asked: dict[int, int] = {}
    for _, entry in members:
        asked[entry.offset_bytes] = asked.get(entry.offset_bytes, 0) + 1
    chunks: dict[int, torch.Tensor] = {}
    regions: list[tuple[int, TargetRegion]] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    targets: list[tuple[ReadItem, torch.Tensor]] = []
    for item, entry in members:
        target = planner.resolve_tensor(item).detach()
        targets.append((item, target))
        is_whole = tuple(item.lengths) == entry.shape and target.dtype == DTYPES[entry.dtype].dtype
        if is_whole and asked[entry.offset_bytes] == 1:
            regions.append((entry.offset_bytes, stored_in(entry, target)))
            continue
        chunk = chunks.get(entry.offset_bytes)
        if chunk is None:
            chunk = chunks[entry.offset_bytes] = Fresh().tensor(entry)
            regions.append((entry.offset_bytes, stored_in(entry, chunk)))
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        copies.append((target, chunk))
    regions.sort(key=lambda each: each[0])
    opened.read({index: [each for each in regions if each[1].nbytes]})
    for target, chunk in copies:
        target.copy_(chunk)
    for item, target in targets:
        planner.commit_tensor(item, target)


def _owner(tensors: Sequence[TensorEntry], number: int) -> TensorEntry:
    """Return the entry with a tensor's bytes: its own, or its alias's. See ``_without_twins``."""
    entry = tensors[number]
    return entry if entry.owner < 0 else tensors[entry.owner]


def _object(planner: SavePlanner, item: WriteItem) -> Any:
    find = getattr(planner, "lookup_object", None)
    if find is None:
        raise CheckpointError(
            f"{item.index.fqn}: {type(planner).__qualname__} only gives what is pickled, which has no"
            " form in a checkpoint: use a planner that is a DefaultSavePlanner"
        )
    return find(item.index)


def _name_of(index: MetadataIndex) -> str:
    if index.offset is None or not any(index.offset):
        return index.fqn
    return f"{index.fqn}[{','.join(map(str, index.offset))}]"


def _without_twins(tensors: list[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Make the second of two items with the same place a view of the first."""
    owners: dict[tuple[int, int], int] = {}
    made: list[TensorEntry] = []
    for index, each in enumerate(tensors):
        owner = owners.setdefault((each.file, each.offset_bytes), index) if each.nbytes else index
        made.append(each)
        if owner != index:
            made[owner] = replace(made[owner], strides=None)  # as the format has owners of views
            made[index] = replace(made[owner], name=each.name, file=-1, offset_bytes=0, owner=owner)
    return tuple(made)


def _describe(
    metadata: Metadata, places: Mapping[MetadataIndex, int], values: Mapping[str, Json]
) -> Json:
    tensors = []
    for name, each in metadata.state_dict_metadata.items():
        if isinstance(each, TensorStorageMetadata):
            chunks = [
                [
                    list(c.offsets),
                    list(c.sizes),
                    {"$tensor": places[MetadataIndex(name, c.offsets)]},
                ]
                for c in each.chunks
            ]
            dtype = encode(each.properties.dtype, _none)
            tensors.append([name, dtype, list(each.size), chunks])
    planner = metadata.planner_data or {}
    paths = [[name, encode(list(path), _none)] for name, path in planner.items()]
    return {
        "tensors": tensors,
        "values": {"$dict": [[k, v] for k, v in values.items()]},
        "paths": paths,
    }


def _refuse(path: Path, _: object) -> int:
    raise CheckpointError(
        f"{shown(path)}: a tensor or an array within a value that torch.distributed.checkpoint hands over"
        " as one has no form in its checkpoint: save it as a tensor, under a key of its own"
    )


def _none(*_: Any) -> int:
    raise CheckpointError("a tensor stands in a path of keys")


def _metadata(document: Json, stored: Sequence[TensorEntry]) -> Metadata:
    """Rebuild the argument of ``_describe``. Raises KeyError, TypeError or ValueError if it cannot."""
    found: dict[str, Any] = {}
    places: dict[MetadataIndex, int] = {}
    for name, dtype, size, chunks in document["tensors"]:
        parts = []
        for offsets, sizes, tensor in chunks:
            number = whole(tensor["$tensor"])
            if number >= len(stored):
                raise FormError(f"there is no tensor {number}")
            if not stored[number].shape == _owner(stored, number).shape == tuple(sizes):
                raise FormError(f"tensor {number} is no chunk of {name!r}")
            parts.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, torch.Size(offsets))] = number
        properties = TensorProperties(dtype=decode(dtype, _no_tensor, _no_tensor))
        found[name] = TensorStorageMetadata(properties, torch.Size(size), parts)
    values = {str(name): each for name, each in document["values"]["$dict"]}
    found.update(dict.fromkeys(values, BytesStorageMetadata()))
    paths = {n: tuple(decode(p, _no_tensor, _no_tensor)) for n, p in document["paths"]}
    return Metadata(found, planner_data=paths, storage_data=(places, values))


def _no_tensor(_: int) -> Any:
    raise FormError("a tensor stands where a value must")


def _bytes(document: Json) -> io.BytesIO:
    """Return a value pickled, as DCP's planners expect it."""
    try:
        value = decode(document, _no_tensor, _no_tensor)
    except FormError as error:
        raise DamagedError(f"a value cannot be read: {error}", path="manifest.json") from error
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
