"""Folders of safetensors files in the layout of Hugging Face, written piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ChecksumError, ConfigError, TransferError, transfer_error
from penstock.core.fs import check_directory, check_space, sync_directory, write_durably
from penstock.core.units import MIB, round_up
from penstock.io.files import DirectFile, open_at
from penstock.observe.clients import WEIGHTS
from penstock.store.checksums import Kind, RunningSum, Sum
from penstock.weights.failures import named_failure
from penstock.weights.pieces import Fill, PieceReader, PieceWriter
from penstock.weights.safetensors import (
    ALIGNMENT_BYTES,
    INDEX_NAME,
    PART_SUFFIX,
    SINGLE_NAME,
    header_of,
)

_SUFFIX: Final = ".safetensors"
_PERMISSIONS: Final = 0o666
Parts: TypeAlias = Generator[tuple[int, Fill], None, None]
"""Length of each part of some bytes, and what brings them."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is to be written.

    Attributes:
        name: Its name.
        code: Code of its type in safetensors.
        shape: Its shape.
        nbytes: Length of its values.
        source: Where its values come from, for the caller.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    nbytes: int
    source: Any = field(compare=False)


def write_folder(
    directory: str | os.PathLike[str],
    tensors: Iterable[NewTensor],
    parts_of: Callable[[Sequence[NewTensor]], Parts],
    *,
    shard_bytes: int,
    is_verified: bool = False,
) -> list[str]:
    """Write tensors to a folder, which has names for its files when all of them are on the device.

    Args:
        directory: Made if it is missing; must have no safetensors yet.
        tensors: In the order of the folder.
        parts_of: Returns the values of tensors of one file, in that order.
        shard_bytes: Most bytes of values in a file, unless one tensor has more.
        is_verified: Read each file again, and compare it with what was written.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: The directory has safetensors already, or is not writable.
        NoSpaceError: There is no room; nothing was written.
        TransferError: A file cannot be written.
        ChecksumError: A file is not what was written.
    """
    path = os.fspath(directory)
    os.makedirs(path, exist_ok=True)
    check_directory(path, "directory of saved weights", allow_memory_filesystem=True)
    there = [name for name in os.listdir(path) if name.endswith((_SUFFIX, PART_SUFFIX, INDEX_NAME))]
    if there:
        raise ConfigError(
            f"{path!r} has {there[0]!r} already: name another directory, or remove it"
        )
    shards = list(_shards(tensors, shard_bytes))
    total = sum(each.nbytes for those in shards for each in those)
    check_space([(path, total)], "free some space, or name another directory")
    names = [f"model-{i:05}-of-{len(shards):05}{_SUFFIX}" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_NAME]
    written: list[str] = []
    try:
        with PieceWriter(owner=WEIGHTS) as writer:
            for name, those in zip(names, shards, strict=True):
                written.append(f"{name}.part")
                file = _new_file(path, written[-1])
                try:
                    nbytes, checksum = _write(
                        file, those, parts_of(those), writer, "full" if is_verified else "off"
                    )
                    if is_verified:
                        _verify(file, nbytes, checksum)
                finally:
                    file.close()
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
    return [os.path.join(path, name) for name in names]


def _shards(tensors: Iterable[NewTensor], limit_bytes: int) -> Iterator[list[NewTensor]]:
    """Yield the tensors of each file; those of whole pages first, so that they begin at pages."""
    those: list[NewTensor] = []
    nbytes = 0
    for each in tensors:
        if those and nbytes + each.nbytes > limit_bytes:
            yield sorted(those, key=_is_odd)
            those, nbytes = [], 0
        those.append(each)
        nbytes += each.nbytes
    yield sorted(those, key=_is_odd)


def _is_odd(each: NewTensor) -> bool:
    return each.nbytes % ALIGNMENT_BYTES != 0


def _new_file(folder: str, name: str) -> DirectFile:
    path = os.path.join(folder, name)
    directory_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return open_at(directory_fd, name, "x+", path=path, permissions=_PERMISSIONS)
    finally:
        os.close(directory_fd)


def _write(
    file: DirectFile, tensors: Sequence[NewTensor], parts: Parts, writer: PieceWriter, kind: Kind
) -> tuple[int, Sum | None]:
    """Write tensors to a file, wait until it is on the device, and return its length and checksum."""
    header = header_of((each.name, each.code, each.shape) for each in tensors)
    nbytes = len(header) + sum(each.nbytes for each in tensors)
    running = RunningSum(kind, nbytes)
    file.preallocate(round_up(nbytes, ALIGNMENT_BYTES))
    stream = _Stream(header, parts)
    try:
        writer.write([(file, 0, nbytes)], stream.fill, running)
        stream.finish()
        writer.finish()
    except TransferError as error:
        raise _named(error, tensors, len(header)) from error.__cause__
    finally:
        stream.close()
    _end(file, nbytes)
    return nbytes, running.result()


def _named(error: TransferError, tensors: Sequence[NewTensor], begin: int) -> BaseException:
    """Return the error of a write with the names of the tensors of which that piece is."""
    end, names = begin, []
    for each in tensors:
        begin, end = end, end + each.nbytes
        if begin < error.offset_bytes + error.nbytes and end > error.offset_bytes:
            names.append(each.name)
    if not names:
        return error
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    advice = "Nothing is left there: free some space, or save to another directory"
    return named_failure(error, names[0] + more, advice, "write")


def _verify(file: DirectFile, nbytes: int, written: Sum | None) -> None:
    """Read a file again. Raises ChecksumError if it is not what was written."""
    found = RunningSum("full", nbytes)
    memory = np.empty(min(nbytes, MIB), np.uint8)
    with PieceReader(file, 0, nbytes, owner=WEIGHTS, running=found) as reader:
        for at in range(0, nbytes, MIB):
            reader.fill(memory[: min(MIB, nbytes - at)])
    if found.result() != written:
        raise ChecksumError(
            f"{file.path!r} does not read as it was written, {nbytes} bytes: the device, or something on"
            " the way to it, is faulty"
        )


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

    def __init__(self, header: bytes, parts: Parts) -> None:
        self._parts = _chain(header, parts)
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


def _chain(header: bytes, parts: Parts) -> Parts:
    try:
        yield len(header), from_memory(np.frombuffer(header, np.uint8))
        yield from parts
    finally:
        parts.close()


def from_memory(flat: NDArray[np.uint8]) -> Fill:
    """Return what brings the bytes of an array, from its start to its end."""
    done = 0

    def fill(target: NDArray[np.uint8]) -> None:
        nonlocal done
        target[:] = flat[done : done + target.nbytes]
        done += target.nbytes

    return fill
