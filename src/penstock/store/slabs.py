"""The spill files of one directory: how space in it is claimed, handed out and taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.core.fs import check_space
from penstock.core.units import round_up
from penstock.io.extents import ExtentAllocator
from penstock.io.files import MAX_GRANULE_BYTES, DirectFile, open_unlinked

UNIT_BYTES: Final = MAX_GRANULE_BYTES
"""Every extent is a multiple of this, so that every file's alignment is kept."""

MAX_SLABS: Final = 64
"""Files per directory; slabs are longer than was asked for where it would take more of them."""

Extent: TypeAlias = tuple[int, int]
"""Offset and length in a directory's space, which is its slabs laid end to end."""


@dataclass(frozen=True, slots=True)
class SlabPiece:
    """A contiguous range of one slab file."""

    file: DirectFile
    offset_bytes: int
    nbytes: int

    def cut(self, nbytes: int) -> tuple[SlabPiece, SlabPiece]:
        """Its first ``nbytes``, and the rest of it."""
        rest = SlabPiece(self.file, self.offset_bytes + nbytes, self.nbytes - nbytes)
        return SlabPiece(self.file, self.offset_bytes, nbytes), rest

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at offset {self.offset_bytes} of a file in {self.file.path!r}"


class SlabDirectory:
    """Preallocated unlinked files in one directory, up to a quota, overwritten in place for ever.

    All slabs but the last are equally long. Several files, since file systems serialize what goes
    to one file that grows. Not thread-safe: the tier's lock is around every method but ``claim``,
    around which it holds a lock of its own, because that waits for the file system.

    Attributes:
        path: The directory.
        quota_bytes: The most that it may claim.
        slab_bytes: How much it claims at a time.
        space: Which parts of the claimed space are free.
        granule_bytes: Of its files.
    """

    def __init__(
        self,
        path: str,
        *,
        quota_bytes: int,
        slab_bytes: int,
        open_file: Callable[[str], DirectFile] = open_unlinked,
    ) -> None:
        """Open a first file, which shows what the directory can do; claim no space yet.

        Args:
            path: The directory.
            quota_bytes: The most to claim, a multiple of the unit.
            slab_bytes: How much to claim at a time; made a multiple of the unit.
            open_file: Makes a file there.

        Raises:
            TransferError: No file can be made there.
        """
        self.path = path
        self.quota_bytes = quota_bytes
        enough = max(slab_bytes, -(-quota_bytes // MAX_SLABS))
        self.slab_bytes = min(quota_bytes, round_up(enough, UNIT_BYTES))
        self.space = ExtentAllocator()
        self._files: list[DirectFile] = []
        self._open_file = open_file
        self._next_file: DirectFile | None = open_file(path)
        self.granule_bytes = self._next_file.granule_bytes

    @property
    def claimed_bytes(self) -> int:
        """Length of its slabs."""
        return self.space.capacity_bytes

    @property
    def claimable_bytes(self) -> int:
        """Bytes that it may still claim of the file system."""
        return self.quota_bytes - self.claimed_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes handed out."""
        return self.claimed_bytes - self.space.free_bytes

    def should_grow_for(self, nbytes: int) -> bool:
        """Return whether another slab may let ``nbytes`` be one extent."""
        return self.space.largest_free_bytes < nbytes and self.claimable_bytes > 0

    def claim(self) -> tuple[DirectFile, int]:
        """Make the file of the next slab and reserve its space, for ``add``.

        Raises:
            NoSpaceError: The file system has no room for it; nothing is kept.
            TransferError: The file cannot be made.
        """
        nbytes = min(self.slab_bytes, self.claimable_bytes)
        check_space([(self.path, nbytes)], "free some space or name another directory")
        file = self._next_file or self._open_file(self.path)
        self._next_file = file  # if what follows fails, the next attempt has it
        file.preallocate(nbytes)
        self._next_file = None
        return file, nbytes

    def add(self, file: DirectFile, nbytes: int) -> None:
        """Make a claimed slab part of the space."""
        self._files.append(file)
        self.space.grow(nbytes)

    def take(self, nbytes: int) -> list[Extent]:
        """Hand out ``nbytes``, in one extent if there is one, else in as few as possible.

        ``space.free_bytes`` must suffice; lengths are multiples of the unit.
        """
        extents: list[Extent] = []
        while nbytes:
            length = min(nbytes, self.space.largest_free_bytes)
            offset = self.space.allocate(length)
            assert offset is not None, f"{nbytes} of {self.space.free_bytes} bytes were not found"
            extents.append((offset, length))
            nbytes -= length
        return extents

    def give(self, extent: Extent) -> None:
        """Take an extent back."""
        self.space.free(*extent)

    def pieces(self, extents: Iterable[Extent]) -> Iterator[SlabPiece]:
        """Locate extents in files; they are cut where they pass from one slab to the next."""
        for start, nbytes in extents:
            offset, end = start, start + nbytes
            while offset < end:
                index, inside = divmod(offset, self.slab_bytes)
                length = min(end - offset, self.slab_bytes - inside)
                yield SlabPiece(self._files[index], inside, length)
                offset += length

    def close(self) -> None:
        """Close the files, which frees their space."""
        for file in self._files:
            file.close()
        if self._next_file is not None:
            self._next_file.close()
