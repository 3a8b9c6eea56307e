"""A tier in files without a name, in one or several directories.

[Note: where bytes go]
    Each directory has an equal share of the capacity and fills it with *slabs*, preallocated files. A
    write is cut into stripes that go to the directories in turn, passing over those that are full; the
    stripes of one directory are one extent there if its free space allows, else several. What is
    contiguous both in memory and in a file is one engine request, so a tier on one directory sees one
    request per write. Nothing is refused while enough bytes are free.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from penstock.core import knobs
from penstock.core.errors import ConfigError, NoSpaceError, TransferError, free_space_bytes
from penstock.core.fs import check_directories, check_space
from penstock.core.locks import Lock
from penstock.core.process import release_in_child
from penstock.core.units import format_bytes, round_up
from penstock.io.engine import Engine
from penstock.io.extents import ExtentAllocator
from penstock.io.files import DirectFile, open_unlinked, open_unlinked_buffered
from penstock.observe.recorder import Recorder
from penstock.store.base import Tier, TierSpec
from penstock.store.blob import UNIT_BYTES, StrPath
from penstock.store.checksums import Kind

MAX_SLABS: Final = 64
"""Files per directory; slabs are longer than was asked for where it would take more of them."""

Extent: TypeAlias = tuple[int, int]
"""Offset and length in a directory's space, which is its slabs laid end to end."""


class SlabPiece(NamedTuple):
    """A contiguous range of one slab."""

    file: DirectFile
    offset_bytes: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at offset {self.offset_bytes} of a file in {self.file.path!r}"


@dataclass(frozen=True, slots=True)
class FlashPlace:
    """Place of one ticket's bytes."""

    pieces: tuple[SlabPiece, ...]
    """In the order of memory; the last may be longer than the data."""
    extents: tuple[tuple[SlabDirectory, Extent], ...]
    """Extents to return."""

    def ranges(self, nbytes: int) -> Iterator[tuple[DirectFile, int, int]]:
        """Yield file, offset and length of each part of ``nbytes``, in the order of memory."""
        for file, offset_bytes, length in self.pieces:
            yield file, offset_bytes, min(length, nbytes)
            nbytes -= length

    def __str__(self) -> str:
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return f"{self.pieces[0]}{more}"


class SlabDirectory:
    """Preallocated unlinked files in one directory, up to a quota, overwritten in place for ever.

    All slabs but the last are equally long. Several files, since file systems serialize what goes
    to one file that grows. Not thread-safe: the tier has one lock around every method but ``claim``,
    and another around ``claim``, because that waits for the file system.

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


class FlashTier(Tier):
    """Spills to files in one or several directories.

    The files have no name and mode 0600: nothing remains, whatever ends the process. Space is
    claimed slab by slab, as it is first needed, and overwritten in place from then on. If the file
    system fills up meanwhile, a write raises NoSpaceError; what the tier has claimed stays usable.
    A failed transfer leaves the tier usable.
    """

    def __init__(
        self,
        directories: StrPath | Sequence[StrPath],
        *,
        capacity_bytes: int,
        engine: Engine,
        recorder: Recorder,
        name: str = "flash",
        allow_memory_filesystem: bool = False,
        verify: Kind | None = None,
    ) -> None:
        """Check the directories and open a file in each; claim no space yet.

        Args:
            directories: Where to spill: one directory, or several to spread every write over.
            capacity_bytes: The most to hold; each directory gets an equal part of it. What is
                written takes multiples of 4 KiB.
            engine: Moves the bytes. It is not closed with the tier. If it is GPU-direct, so is the
                tier: addresses are those of device memory, and there is no granule.
            recorder: Gets counters and spans.
            name: As in plans, logs and traces.
            allow_memory_filesystem: Accept directories on tmpfs, where spilling saves no memory.
            verify: How much checksums cover; as ``knobs.verify()`` says if None.

        Raises:
            ConfigError: A directory is missing, named twice, not writable or in memory, or the
                capacity is too small.
            NoSpaceError: A file system has less free space than the tier could come to need of it.
        """
        paths = check_directories(
            directories, "flash directory", allow_memory_filesystem=allow_memory_filesystem
        )
        quotas = _quotas(capacity_bytes, paths)
        check_space(
            zip(paths, quotas, strict=True),
            f"lower its capacity of {format_bytes(sum(quotas))}, free some space, or name another"
            " directory",
        )
        slabs = _open_all(paths, quotas, gpu_direct=engine.spec.gpu_direct)
        spec = TierSpec(
            name=name,
            kind="flash",
            capacity_bytes=sum(quotas),
            granule_bytes=math.lcm(*(each.granule_bytes for each in slabs)),
            where=", ".join(paths),
            gpu_direct=engine.spec.gpu_direct,
        )
        super().__init__(spec, engine=engine, recorder=recorder, verify=verify)
        self._directories = slabs
        self._stripe_bytes = round_up(knobs.stripe_bytes(), UNIT_BYTES)
        self._turn = 0  # the directory that the next write begins with
        self._space_lock = Lock()
        self._growing = Lock()  # taken before the other one, never after it
        # a child's descriptors would keep the space taken after this process
        release_in_child(self, FlashTier._close)

    @property
    def claimed_bytes(self) -> int:
        """Bytes of the file systems that the tier's files take now."""
        with self._space_lock:
            return sum(each.claimed_bytes for each in self._directories)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the capacity in use: held bytes, each ticket's rounded up to 4 KiB."""
        with self._space_lock:
            return sum(each.claimed_bytes - each.space.free_bytes for each in self._directories)

    def _allocate(self, nbytes: int) -> FlashPlace:
        """Find a place, claiming slabs as long as that spares cutting it up."""
        stuck: dict[SlabDirectory, TransferError] = {}
        while True:
            with self._space_lock:
                found = self._find(round_up(nbytes, UNIT_BYTES), stuck)
            if isinstance(found, FlashPlace):
                return found
            if found is None:
                raise self._no_space(nbytes, stuck)
            try:
                self._grow(*found)
            except TransferError as error:
                stuck[found[0]] = error

    def _discard(self, place: FlashPlace) -> None:
        with self._space_lock:
            for directory, extent in place.extents:
                directory.space.free(*extent)

    def _close(self) -> None:
        for directory in self._directories:
            directory.close()

    def _find(
        self, nbytes: int, stuck: dict[SlabDirectory, TransferError]
    ) -> FlashPlace | tuple[SlabDirectory, int] | None:
        """A place; or the directory that should grow first, and its size now; or None: no room."""
        rooms = [
            each.space.free_bytes + (0 if each in stuck else each.claimable_bytes)
            for each in self._directories
        ]
        stripe_bytes = nbytes if len(rooms) == 1 else self._stripe_bytes
        shares = spread(nbytes, stripe_bytes=stripe_bytes, rooms=rooms, start=self._turn)
        if shares is None:
            return None
        totals = [0] * len(rooms)
        for index, share in shares:
            totals[index] += share
        for directory, total in zip(self._directories, totals, strict=True):
            if total and directory not in stuck and directory.should_grow_for(total):
                return directory, directory.claimed_bytes
        self._turn = (shares[-1][0] + 1) % len(rooms)
        return self._take(shares, totals)

    def _take(self, shares: list[tuple[int, int]], totals: list[int]) -> FlashPlace:
        extents: list[tuple[SlabDirectory, Extent]] = []
        pieces: list[Iterator[SlabPiece]] = []
        for directory, total in zip(self._directories, totals, strict=True):
            mine = directory.take(total)
            extents += [(directory, extent) for extent in mine]
            pieces.append(directory.pieces(mine))
        return FlashPlace(tuple(_in_memory_order(shares, pieces)), tuple(extents))

    def _grow(self, directory: SlabDirectory, claimed_bytes: int) -> None:
        with self._growing:
            if directory.claimed_bytes != claimed_bytes:
                return  # another thread was quicker
            slab = directory.claim()
            with self._space_lock:
                directory.add(*slab)

    def _no_space(self, nbytes: int, stuck: dict[SlabDirectory, TransferError]) -> TransferError:
        for error in stuck.values():
            return error
        return NoSpaceError(
            errno=errno.ENOSPC,
            op="allocate",
            path=self.spec.where,
            offset_bytes=0,
            nbytes=nbytes,
            free_bytes=min(free_space_bytes(each.path) for each in self._directories),
            advice=f"the tier holds {format_bytes(self.taken_bytes)} of the"
            f" {format_bytes(self.spec.capacity_bytes)} that are its capacity; raise that",
        )


def _quotas(capacity_bytes: int, paths: Sequence[str]) -> list[int]:
    """Equal parts of the capacity, in whole units; the first ones get what is left over."""
    units, count = capacity_bytes // UNIT_BYTES, len(paths)
    if units < count:
        raise ConfigError(
            f"a flash tier of {capacity_bytes} bytes has less than {UNIT_BYTES} bytes for each"
            f" of its {count} directories ({', '.join(paths)}); raise its capacity"
        )
    return [(units // count + (index < units % count)) * UNIT_BYTES for index in range(count)]


def _open_all(
    paths: Sequence[str], quotas: Sequence[int], *, gpu_direct: bool
) -> list[SlabDirectory]:
    open_file = open_unlinked_buffered if gpu_direct else open_unlinked
    slab_bytes = knobs.slab_bytes()
    slabs: list[SlabDirectory] = []
    try:
        for path, quota in zip(paths, quotas, strict=True):
            slabs.append(
                SlabDirectory(path, quota_bytes=quota, slab_bytes=slab_bytes, open_file=open_file)
            )
    except TransferError as error:
        for each in slabs:
            each.close()
        raise ConfigError(f"flash directory {path!r} cannot be used: {error}") from error
    return slabs


def spread(
    nbytes: int, *, stripe_bytes: int, rooms: Sequence[int], start: int
) -> list[tuple[int, int]] | None:
    """Divide ``nbytes`` among directories with so much room each, in stripes, in turn.

    A directory without room for the next stripe is passed over; if none has room for all of it, the
    one with the most room takes what it can. All arguments are multiples of one unit.

    Returns:
        (directory, bytes) in the order of memory; neighbours differ in their directory. None if
        there is not enough room.
    """
    if nbytes > sum(rooms):
        return None
    left = list(rooms)
    shares: list[tuple[int, int]] = []
    turn = start
    while nbytes:
        want = min(stripe_bytes, nbytes)
        turns = [(turn + step) % len(left) for step in range(len(left))]
        fitting = (each for each in turns if left[each] >= want)
        index = next(fitting, max(turns, key=left.__getitem__))
        share = min(want, left[index])
        left[index] -= share
        nbytes -= share
        if shares and shares[-1][0] == index:
            share += shares.pop()[1]
        shares.append((index, share))
        turn = index + 1
    return shares


def _in_memory_order(
    shares: list[tuple[int, int]], pieces: Sequence[Iterator[SlabPiece]]
) -> Iterator[SlabPiece]:
    """Deal out each directory's pieces to its shares, cutting those that serve several."""
    rests: dict[int, SlabPiece] = {}
    for index, share in shares:
        left = share
        while left:
            piece = rests.pop(index, None) or next(pieces[index])
            if piece.nbytes > left:
                file, offset, nbytes = piece
                piece = SlabPiece(file, offset, left)
                rests[index] = SlabPiece(file, offset + left, nbytes - left)
            left -= piece.nbytes
            yield piece
