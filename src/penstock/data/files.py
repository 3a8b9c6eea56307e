"""The files of a data set, as arrays: a set may have a million of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from penstock.core.errors import DatasetError, TransferError, transfer_error
from penstock.core.files import not_regular, open_regular

HEAD_BYTES: Final = 4096
MOST_HEADS: Final = 1024
"""In a set of more files only sizes and times are compared: first bytes cost a read each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileTable:
    """Names, and what the files were when they were indexed."""

    names: NDArray[np.uint8]
    """All names, relative to the root, UTF-8, end to end."""
    ends: NDArray[np.int64]
    """End of each name in ``names``."""
    sizes: NDArray[np.int64]
    times_ns: NDArray[np.int64]
    """Of the last modification."""
    heads: NDArray[np.uint64]
    """XXH3 of the first bytes; of no file, if there are many."""

    def __len__(self) -> int:
        """How many files."""
        return len(self.ends)

    def name(self, number: int) -> str:
        """The name of a file, relative to the root."""
        start = int(self.ends[number - 1]) if number else 0
        return bytes(self.names[start : int(self.ends[number])]).decode("utf-8", "surrogateescape")

    @classmethod
    def of(cls, root: str, names: Sequence[str]) -> FileTable:
        """Describe files as they are now. Raises TransferError: one cannot be read."""
        facts = [_stat(os.path.join(root, name)) for name in names]
        encoded = [os.fsencode(name) for name in names]
        with_heads = len(names) <= MOST_HEADS
        return cls(
            names=np.frombuffer(b"".join(encoded), np.uint8),
            ends=np.cumsum([len(name) for name in encoded], dtype=np.int64),
            sizes=np.array([each.st_size for each in facts], np.int64),
            times_ns=np.array([each.st_mtime_ns for each in facts], np.int64),
            heads=np.array(
                [_head(os.path.join(root, name)) for name in names] if with_heads else [], np.uint64
            ),
        )

    def check(self, root: str, found: Sequence[str] | None) -> None:
        """Raise DatasetError, saying what changed, unless the files are as they were.

        Args:
            root: Where they are.
            found: The names that are there now; None: they were named one by one.
        """
        if found is not None:
            self._check_names(root, found)
        for number in range(len(self)):
            path = os.path.join(root, self.name(number))
            try:
                now = os.stat(path)
            except FileNotFoundError as error:
                raise changed(path, "is missing now") from error
            except OSError as error:
                raise failed("stat", path, error) from error
            if now.st_size != self.sizes[number]:
                was = int(self.sizes[number])
                raise changed(path, f"has {now.st_size} bytes now, had {was}")
            if now.st_mtime_ns != self.times_ns[number]:
                was = int(self.times_ns[number])
                raise changed(path, f"was modified at {now.st_mtime_ns} ns, had been at {was}")
            if len(self.heads) and _head(path) != self.heads[number]:
                raise changed(path, f"begins with other bytes (the first {HEAD_BYTES} at most)")

    def _check_names(self, root: str, found: Sequence[str]) -> None:
        names = {self.name(number) for number in range(len(self))}
        for more in found:
            if more not in names:
                raise changed(os.path.join(root, more), "was not there before")
        for less in sorted(names - set(found)):
            raise changed(os.path.join(root, less), "is missing now")


def changed(path: str, how: str) -> DatasetError:
    """The error that a data set is not what was indexed."""
    return DatasetError(
        f"the data set changed since its index was built: {path!r} {how}; if that is meant, build the"
        " index anew (rebuild=True, or `penstock data info --rebuild`)"
    )


def list_files(path: str, accept: Callable[[str], bool]) -> list[str]:
    """Names below a directory, sorted, hidden ones left out; links to other directories are followed.

    Raises:
        TransferError: A directory cannot be listed.
    """
    return sorted(name for name in _below(path, frozenset()) if accept(os.path.basename(name)))


def _below(folder: str, above: frozenset[str]) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:
        return  # a link to where it is itself
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    inside = _below(entry.path, above | {real})
                    yield from (os.path.join(entry.name, name) for name in inside)
                else:
                    yield entry.name
    except OSError as error:
        raise failed("list", folder, error) from error


def read_range(path: str, offset: int, nbytes: int) -> bytes:
    """Some bytes of a file, not left in the page cache. Raises TransferError."""
    try:
        descriptor = open_regular(path)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            parts = []
            while nbytes and (part := os.pread(descriptor, nbytes, offset)):
                parts.append(part)
                offset, nbytes = offset + len(part), nbytes - len(part)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return b"".join(parts)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise failed("read", path, error) from error


def _stat(path: str) -> os.stat_result:
    try:
        facts = os.stat(path)
    except OSError as error:
        raise failed("stat", path, error) from error
    if not stat.S_ISREG(facts.st_mode):
        raise not_regular(path, facts.st_mode)
    return facts


def _head(path: str) -> int:
    return xxhash.xxh3_64_intdigest(read_range(path, 0, HEAD_BYTES))


def failed(op: str, path: str, error: OSError) -> OSError:
    """The error of our tree."""
    if isinstance(error, TransferError):
        return error
    code = error.errno or 5
    return transfer_error(errno=code, op=op, path=path, offset_bytes=0, nbytes=0)
