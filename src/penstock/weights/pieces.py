"""Bytes of any length to and from files in pieces, so that never more than a few pieces are in memory.

Direct transfers need offsets, lengths and addresses that are multiples of 4 KiB; tensors begin anywhere.
So the bytes go through blocks of memory that are aligned: written behind, and read ahead.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ShortTransferError
from penstock.core.units import MIB, round_down, round_up
from penstock.io.engine import Priority, Request, Transfer
from penstock.io.files import MAX_GRANULE_BYTES, DirectFile
from penstock.io.mapping import memory_at
from penstock.io.traffic_report import reported
from penstock.observe.clients import WEIGHTS
from penstock.store.arena import Arena
from penstock.store.checksums import RunningSum
from penstock.store.engine import shared_engine
from penstock.store.pool import Block
from penstock.store.window import TransferWindow
from penstock.weights.failures import named_failure, named_reads

PIECE_BYTES: Final = 32 * MIB
_WRITTEN_PIECES: Final = 4
_READ_PIECES: Final = 3
Fill = Callable[[NDArray[np.uint8]], None]
"""Fills memory with the bytes that come next."""


def named_fill(fill: Fill, name: str, advice: str) -> Fill:
    """Return a function that fills memory as ``fill`` does, with the errors of ``named_reads``."""

    def filled(target: NDArray[np.uint8]) -> None:
        with named_reads(name, advice):
            fill(target)

    return filled


class _Written(NamedTuple):
    """A piece that is being written, and the name of the weight that it is of."""

    block: Block
    name: str


class PieceWriter:
    """Writes ranges of files behind the caller. Not thread-safe.

    The first error of a write is raised by the next call, and by every one after it. As a context
    manager it finishes, or cancels what has not begun if the block raises.
    """

    def __init__(self, *, owner: str, advice: str = "") -> None:
        """Take no memory yet.

        Args:
            owner: Owner of the memory in the account.
            advice: What to do if a named weight cannot be written.
        """
        self._arena = Arena(_WRITTEN_PIECES * PIECE_BYTES, owner=owner)
        self._advice = advice
        self._window: TransferWindow[_Written] = TransferWindow(
            release=lambda piece: piece.block.free(),
            limit_bytes=(_WRITTEN_PIECES - 1) * PIECE_BYTES,
            fail=self._failed,
        )
        self._failure: BaseException | None = None

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.close()

    def write(
        self,
        ranges: Iterable[tuple[DirectFile, int, int]],
        fill: Fill,
        running: RunningSum | None = None,
        *,
        name: str = "",
    ) -> None:
        """Write what ``fill`` brings to ranges of files.

        A range whose length is no multiple of 4 KiB is followed by zeros up to the next one. Returns
        before the last pieces are written.

        Args:
            ranges: File, offset and length of each; offsets are multiples of 4 KiB.
            fill: Called for one piece after the other, in the order of the ranges.
            running: Gets the bytes too.
            name: Name of the weight that is written, for errors; none if it is not one alone.

        Raises:
            TransferError: A piece could not be written.
        """
        for file, offset, nbytes in ranges:
            for start in range(0, nbytes, PIECE_BYTES):
                length = min(PIECE_BYTES, nbytes - start)
                self._write_piece((file, offset + start, length), fill, running, name)

    def _write_piece(
        self,
        piece: tuple[DirectFile, int, int],
        fill: Fill,
        running: RunningSum | None,
        name: str,
    ) -> None:
        file, offset, nbytes = piece
        moved = round_up(nbytes, MAX_GRANULE_BYTES)
        self._window.make_room(moved)
        block = self._window.take(lambda: self._arena.allocate(moved, force=True))
        assert block is not None, "an empty arena has room for a piece"
        try:
            memory = memory_at(block.address, moved)
            fill(memory[:nbytes])
            memory[nbytes:] = 0
            if running is not None:
                running.add(block.address, nbytes)
            self._check()
        except BaseException:
            block.free()
            raise
        request = Request(
            op="write",
            file=file,
            offset_bytes=offset,
            address=block.address,
            nbytes=moved,
            keep_alive=block,
            priority=Priority.PREFETCH,
        )
        self._window.begin(_Written(block, name), lambda _: _begun(request), moved)

    def finish(self) -> None:
        """Wait until everything is written. Raises TransferError if something could not be."""
        self._window.finish()
        self._check()

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and free the memory. Idempotent."""
        self._window.cancel()
        self._arena.close()

    def _failed(self, piece: _Written, error: Exception) -> None:
        if self._failure is None:
            name = piece.name
            self._failure = named_failure(error, name, self._advice, "write") if name else error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)


def _begun(request: Request) -> Transfer:
    """Begin a transfer that the open session counts among those of weights."""
    transfer = shared_engine().submit(request)
    return reported(transfer, request.op, WEIGHTS, request.file.path)


def reader_arena(owner: str) -> Arena:
    """Return memory for one ``PieceReader`` at a time."""
    return Arena(_READ_PIECES * PIECE_BYTES, owner=owner)


class _Piece(NamedTuple):
    block: Block
    start: int
    end: int


class PieceReader:
    """Reads a range of a file from its start to its end, ahead of the caller. Not thread-safe."""

    def __init__(
        self,
        file: DirectFile,
        start: int,
        end: int,
        *,
        owner: str,
        running: RunningSum | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            file: The file.
            start: Offset of the first byte.
            end: Offset behind the last one.
            owner: Owner of the memory in the account.
            running: Gets the bytes too, if ``start`` is a multiple of 4 KiB and nothing is skipped.
            arena: Memory that readers use in turn, from ``reader_arena``; None: its own.
        """
        self._file = file
        self._running = running
        self._at = start
        self._end = end
        self._next = round_down(start, MAX_GRANULE_BYTES)  # begun up to here
        self._is_own = arena is None
        self._arena = reader_arena(owner) if arena is None else arena
        self._window: TransferWindow[tuple[_Piece, Transfer]] = TransferWindow(
            release=lambda item: item[0].block.free()
        )
        self._current: _Piece | None = None

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and free the memory. Idempotent."""
        self._free_current()
        self._window.cancel()
        if self._is_own:
            self._arena.close()

    def skip_to(self, offset: int) -> None:
        """Go on at a later offset."""
        assert self._at <= offset <= self._end
        self._at = offset

    def fill(self, target: NDArray[np.uint8]) -> None:
        """Fill memory with the bytes that come next.

        Raises:
            TransferError: They cannot be read; ShortTransferError if the file ends before.
        """
        done = 0
        while done < target.nbytes:
            piece = self._piece()
            length = min(target.nbytes - done, piece.end - self._at)
            begin = self._at - piece.start
            memory = memory_at(piece.block.address + begin, length)
            target[done : done + length] = memory
            done += length
            self._at += length

    def _piece(self) -> _Piece:
        """Return the piece that has the next byte."""
        while True:
            current = self._current
            if current is not None and self._at < current.end:
                return current
            self._free_current()
            if self._at >= self._end:
                raise ShortTransferError(
                    errno=errno.EIO,
                    op="read",
                    path=self._file.path,
                    offset_bytes=self._at,
                    nbytes=1,
                )
            if not len(self._window):
                self._next = max(self._next, round_down(self._at, MAX_GRANULE_BYTES))
            while self._begin():
                pass
            piece, transfer = self._window.pop()
            self._current = piece
            transfer.wait()
            if self._running is not None:
                self._running.add(piece.block.address, piece.end - piece.start)

    def _begin(self) -> bool:
        """Begin to read the next piece; return False if there is none, or no memory for it."""
        if self._next >= self._end:
            return False
        end = min(self._end, self._next + PIECE_BYTES)
        nbytes = round_up(end - self._next, MAX_GRANULE_BYTES)
        block = self._arena.allocate(nbytes, force=True)
        if block is None:
            return False
        piece = _Piece(block, self._next, end)
        request = Request(
            op="read",
            file=self._file,
            offset_bytes=self._next,
            address=block.address,
            nbytes=nbytes,
            keep_alive=block,
            priority=Priority.PREFETCH,
            least_bytes=end - self._next,
        )
        try:
            transfer = _begun(request)
        except BaseException:
            block.free()
            raise
        self._window.add((piece, transfer), transfer, nbytes)
        self._next = end
        return True

    def _free_current(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.block.free()
