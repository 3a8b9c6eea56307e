"""A model's weights to a folder of safetensors files, without more than some pieces in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module

from penstock.core.errors import ConfigError, transfer_error
from penstock.core.fs import check_directory, check_space, sync_directory, write_durably
from penstock.core.units import parse_bytes, round_up
from penstock.homed import home_of
from penstock.io.files import DirectFile, open_at
from penstock.observe.clients import WEIGHTS
from penstock.store.arena import Arena
from penstock.store.checksums import RunningSum
from penstock.weights.homes import Home, flat_bytes
from penstock.weights.importing import CODES, state_of
from penstock.weights.pieces import Fill, PieceReader, PieceWriter, reader_arena
from penstock.weights.safetensors import (
    ALIGNMENT_BYTES,
    INDEX_NAME,
    PART_SUFFIX,
    SINGLE_NAME,
    header_of,
)

_SUFFIX: Final = ".safetensors"
_PERMISSIONS: Final = 0o666


class _Named(NamedTuple):
    name: str
    tensor: Tensor


def save(model: Module, directory: str | os.PathLike[str], *, shard: int | str = "5GB") -> None:
    """Save a model's parameters and buffers as safetensors, in the layout of Hugging Face.

    Any reader of that format can read them, and so can ``penstock.weights.load``. About 200 MiB are in
    memory at a time beside what the model keeps there, and its largest weight if a session is open. Of
    tied weights only the first name is saved. A file gets its name when all of it is on the device.

    Args:
        model: The model; a session may be open, and no step be running.
        directory: Made if it is missing; must have no safetensors yet.
        shard: Most bytes of values in a file, unless one tensor has more.

    Raises:
        ConfigError: The directory has safetensors already, or is not writable; the model's state has
            something that safetensors have no form for.
        NoSpaceError: There is no room; nothing was written.
        TransferError: A file cannot be written, or a weight not be read.
        ChecksumError: A weight that was read from its home is not what was written there.
    """
    path = os.fspath(directory)
    os.makedirs(path, exist_ok=True)
    check_directory(path, "directory of saved weights", allow_memory_filesystem=True)
    there = [name for name in os.listdir(path) if name.endswith((_SUFFIX, PART_SUFFIX, INDEX_NAME))]
    if there:
        raise ConfigError(
            f"{path!r} has {there[0]!r} already: name another directory, or remove it"
        )
    shards = list(_shards(_once(state_of(model)), parse_bytes(shard, what="shard")))
    total = sum(each.tensor.nbytes for those in shards for each in those)
    check_space([(path, total)], "free some space, or name another directory")
    names = [f"model-{i:05}-of-{len(shards):05}{_SUFFIX}" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_NAME]
    written: list[str] = []
    try:
        with PieceWriter(owner=WEIGHTS) as writer:
            for name, those in zip(names, shards, strict=True):
                written.append(f"{name}.part")
                _write(path, written[-1], those, writer)
        for name in names:
            os.rename(os.path.join(path, f"{name}.part"), os.path.join(path, name))
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": total},
                "weight_map": {
                    each.name: name
                    for name, those in zip(names, shards, strict=True)
                    for each in those
                },
            }
            write_durably(os.path.join(path, INDEX_NAME), json.dumps(index, indent=2).encode())
        sync_directory(path)
    except BaseException:
        for name in written:
            with suppress(OSError):
                os.unlink(os.path.join(path, name))
        raise


def _once(state: dict[str, Tensor]) -> Iterator[_Named]:
    seen: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.is_meta or tensor.dtype not in CODES or tensor.layout != torch.strided:
            raise ConfigError(
                f"{name} is a {tensor.dtype} on {tensor.device}, {tensor.layout}: safetensors have no"
                " form for it"
            )
        yield _Named(name, tensor)


def _shards(tensors: Iterator[_Named], limit_bytes: int) -> Iterator[list[_Named]]:
    """Yield the tensors of each file; those of whole pages first, so that they begin at pages."""
    those: list[_Named] = []
    nbytes = 0
    for each in tensors:
        if those and nbytes + each.tensor.nbytes > limit_bytes:
            yield sorted(those, key=_is_odd)
            those, nbytes = [], 0
        those.append(each)
        nbytes += each.tensor.nbytes
    yield sorted(those, key=_is_odd)


def _is_odd(each: _Named) -> bool:
    return each.tensor.nbytes % ALIGNMENT_BYTES != 0


def _write(folder: str, name: str, tensors: Sequence[_Named], writer: PieceWriter) -> None:
    path = os.path.join(folder, name)
    header = header_of((each.name, CODES[each.tensor.dtype], each.tensor.shape) for each in tensors)
    nbytes = len(header) + sum(each.tensor.nbytes for each in tensors)
    directory_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file = open_at(directory_fd, name, "x+", path=path, permissions=_PERMISSIONS)
    finally:
        os.close(directory_fd)
    try:
        file.preallocate(round_up(nbytes, ALIGNMENT_BYTES))
        pieces = _Stream(header, tensors)
        try:
            writer.write([(file, 0, nbytes)], pieces.fill)
            pieces.finish()
            writer.finish()
        finally:
            pieces.close()
        _end(file, nbytes)
    finally:
        file.close()


def _end(file: DirectFile, nbytes: int) -> None:
    """Cut a file to its length, and wait until it is on the device."""
    try:
        os.ftruncate(file.fd, nbytes)
        os.fsync(file.fd)
    except OSError as error:
        raise transfer_error(
            errno=error.errno or 0, op="sync", path=file.path, offset_bytes=0, nbytes=nbytes
        ) from error


class _Stream:
    """Bytes of a header and of tensors, one behind the other."""

    def __init__(self, header: bytes, tensors: Sequence[_Named]) -> None:
        self._parts = _parts(header, tensors)
        self._left = 0
        self._part: Fill | None = None

    def fill(self, target: NDArray[np.uint8]) -> None:
        """Fill memory with the bytes that come next."""
        done = 0
        while done < target.nbytes:
            while not self._left:
                self._left, self._part = next(self._parts)
            assert self._part is not None
            length = min(self._left, target.nbytes - done)
            self._part(target[done : done + length])
            done += length
            self._left -= length

    def finish(self) -> None:
        """Check what was read last."""
        for nbytes, _ in self._parts:
            assert not nbytes, "bytes are left"

    def close(self) -> None:
        """Let go of what is read now."""
        self._parts.close()


_Parts: TypeAlias = Generator[tuple[int, Fill], None, None]
"""Length of each part, and what brings its bytes."""


def _parts(header: bytes, tensors: Sequence[_Named]) -> _Parts:
    yield len(header), _from_memory(np.frombuffer(header, np.uint8))
    arena = reader_arena(WEIGHTS)
    try:
        yield from _parts_of(tensors, arena)
    finally:
        arena.close()


def _parts_of(tensors: Sequence[_Named], arena: Arena) -> _Parts:
    for _, tensor in tensors:
        home = home_of(tensor)
        if not tensor.numel():
            continue
        if isinstance(home, Home) and home.is_direct:
            yield from _parts_of_home(home, arena)
        elif home is not None:
            home.hold()
            try:
                yield tensor.nbytes, _from_memory(_values_of(tensor))
            finally:
                home.let_go(changed=False)
        else:
            yield tensor.nbytes, _from_memory(_values_of(tensor))


def _parts_of_home(home: Home, arena: Arena) -> _Parts:
    """Read a resting weight from its file, not through the page cache."""
    checksum = home.ticket.checksum
    running = RunningSum("off" if checksum is None else checksum[0], home.nbytes)
    for file, offset, nbytes in home.place.ranges(home.nbytes):
        with PieceReader(
            file, offset, offset + nbytes, owner=WEIGHTS, running=running, arena=arena
        ) as reader:
            yield nbytes, reader.fill
    if checksum is not None and running.result() != checksum:
        raise home.tier.damage(home.ticket, "have another checksum")


def _values_of(tensor: Tensor) -> NDArray[np.uint8]:
    return flat_bytes(tensor.detach().cpu().contiguous())


def _from_memory(flat: NDArray[np.uint8]) -> Fill:
    done = 0

    def fill(target: NDArray[np.uint8]) -> None:
        nonlocal done
        target[:] = flat[done : done + target.nbytes]
        done += target.nbytes

    return fill
