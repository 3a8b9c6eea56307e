"""Room in several directories, handed out in stripes.

[Note: where bytes go]
    Each directory has an equal share of the capacity and fills it with slabs, preallocated files
    without a name. A write is cut into stripes that go to the directories in turn, passing over
    those that are full; the stripes of one directory are one extent there if its free space allows,
    else several. What is contiguous both in memory and in a file is one engine request, so a tier
    on one directory sees one request per write. Nothing is refused while enough bytes are free.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.core.errors import ClosedError, NoSpaceError, TransferError, free_space_bytes
from penstock.core.locks import Lock
from penstock.core.units import format_bytes, round_up
from penstock.io.files import DirectFile
from penstock.store.slabs import UNIT_BYTES, Extent, SlabDirectory, SlabPiece


@dataclass(frozen=True, slots=True)
class FlashPlace:
    """Place of one ticket's bytes."""

    pieces: tuple[SlabPiece, ...]
    """In the order of memory; the last may be longer than the data."""
    extents: tuple[tuple[SlabDirectory, Extent], ...]
    """Extents to return."""

    def ranges(self, nbytes: int) -> Iterator[tuple[DirectFile, int, int]]:
        """Yield file, offset and length of each part of ``nbytes``, in the order of memory."""
        for piece in self.pieces:
            yield piece.file, piece.offset_bytes, min(piece.nbytes, nbytes)
            nbytes -= piece.nbytes

    def __str__(self) -> str:
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return f"{self.pieces[0]}{more}"


class StripedSpace:
    """The free space of a flash tier. Thread-safe.

    Attributes:
        capacity_bytes: What can be handed out altogether.
    """

    def __init__(self, directories: Sequence[SlabDirectory], *, stripe_bytes: int) -> None:
        """Take over directories of which nothing is handed out yet.

        Args:
            directories: Where the space is. They are closed with this.
            stripe_bytes: What goes to one directory before it is the next one's turn.
        """
        self.capacity_bytes = sum(each.quota_bytes for each in directories)
        self._directories = directories
        self._stripe_bytes = round_up(stripe_bytes, UNIT_BYTES)
        self._turn = 0  # the directory that the next write begins with
        self._lock = Lock()
        self._growing = Lock()  # taken before the other one, never after it
        self._closed = False

    @property
    def claimed_bytes(self) -> int:
        """Bytes of the file systems that slabs take."""
        with self._lock:
            return sum(each.claimed_bytes for each in self._directories)

    @property
    def taken_bytes(self) -> int:
        """Bytes handed out."""
        with self._lock:
            return sum(each.taken_bytes for each in self._directories)

    def allocate(self, nbytes: int) -> FlashPlace:
        """Hand out a place, claiming slabs as long as that spares cutting it up.

        Raises:
            NoSpaceError: The capacity, or the file systems, are full.
            TransferError: There may be room, but no file can be made there.
            ClosedError: It is closed.
        """
        stuck: dict[SlabDirectory, TransferError] = {}
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError("the flash tier's files are closed")
                found = self._find(round_up(nbytes, UNIT_BYTES), stuck)
            if isinstance(found, FlashPlace):
                return found
            if found is None:
                raise self._no_space(nbytes, stuck)
            try:
                self._grow(*found)
            except TransferError as error:
                stuck[found[0]] = error

    def release(self, place: FlashPlace) -> None:
        """Take a place back. Waits for nothing but the lock, which is never held for long."""
        with self._lock:
            for directory, extent in place.extents:
                directory.give(extent)

    def close(self) -> None:
        """Close the files, which frees their space."""
        with self._lock:
            self._closed = True
            self.close_files()

    def close_files(self) -> None:
        """Close the files and nothing else: all that can be done in a forked child."""
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
            with self._lock:
                directory.add(*slab)

    def _no_space(self, nbytes: int, stuck: dict[SlabDirectory, TransferError]) -> TransferError:
        for error in stuck.values():
            return error
        return NoSpaceError(
            errno=errno.ENOSPC,
            op="allocate",
            path=", ".join(each.path for each in self._directories),
            offset_bytes=0,
            nbytes=nbytes,
            free_bytes=min(free_space_bytes(each.path) for each in self._directories),
            advice=f"the tier holds {format_bytes(self.taken_bytes)} of the"
            f" {format_bytes(self.capacity_bytes)} that are its capacity; raise that",
        )


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
                piece, rests[index] = piece.cut(left)
            left -= piece.nbytes
            yield piece
