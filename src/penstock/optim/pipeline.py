"""Tiles on their way: read ahead, updated, written behind, through a ring of buffers.

The memory is :mod:`ring`'s; which tile stays and which one goes is decided in :mod:`turns`.

[Note: the pipeline never deadlocks]
    A visitor holds one buffer and waits for another only before it has one. All other buffers are
    being read or written, which ends; or hold a tile that was updated, which is written for who
    waits; or one that was read too early, which is dropped for who waits. There is one buffer more
    than visitors.

[Note: who squeezes]
    A record is squeezed by the thread that has begun to write it, and expanded by the one that visits
    it: both are visitors, or whoever flushes. The engine's threads only move bytes, so they begin reads,
    never writes. A buffer whose record was written and is still wanted is expanded where it lies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.core.errors import PenstockError
from penstock.core.locks import condition
from penstock.optim.layout import Tile
from penstock.optim.ring import BufferPhase, BufferRing, RecordBuffer
from penstock.optim.slots import RecordSlots
from penstock.optim.squeeze import Squeezer
from penstock.optim.store import RecordStore
from penstock.optim.turns import Turns


class TilePipeline:
    """The buffers of an optimizer, and which tile is in which. Thread-safe.

    Attributes:
        store: Where records rest.
        write_failure: Why a record could not be written, if one could not; it is still in memory.
        waited_s: How long visitors have waited while somebody waited for them.
        is_awaited: Whether somebody waits for them now.
    """

    def __init__(
        self,
        store: RecordStore,
        *,
        slots: RecordSlots,
        count: int,
        buffer_bytes: int,
        write_through: bool,
        names: Callable[[Tile], str],
        squeezer: Squeezer,
    ) -> None:
        """Make the buffers; memory becomes resident as it is first used.

        Args:
            store: Where records rest.
            slots: Where the newest record of each tile is; kept up to date.
            count: Buffers; two more than there are visitors at once, at least.
            buffer_bytes: The longest record, with what squeezing needs.
            write_through: Write each tile in each pass, to its other slot.
            names: What is in a tile, for errors.
            squeezer: Makes records shorter that are written.
        """
        self.store = store
        self.waited_s = 0.0
        self.is_awaited = True
        self._slots = slots
        self._squeezer = squeezer
        self.write_failure: BaseException | None = None
        self._write_through = write_through
        self._names = names
        self._wake = condition()
        self._ring = BufferRing(count, buffer_bytes)
        self._turns = Turns(self._ring)
        self._reads: deque[Callable[[], None]] = deque()  # to submit without the lock
        self._writes: deque[Callable[[], None]] = deque()
        self._closed = False

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers when all are in use."""
        return len(self._ring) * self._ring.buffer_bytes

    @property
    def count(self) -> int:
        """How many buffers there are."""
        return len(self._ring)

    def begin(self, order: Sequence[Tile], rank: Mapping[int, int], *, rotating: int) -> None:
        """Begin a pass.

        Args:
            order: The tiles to visit, as far as is known.
            rank: By number of a tile, its place in the pass after this one.
            rotating: Buffers that may be on their way in or out at once, the rest being left to
                tiles that stay.
        """
        with self._wake:
            self.write_failure = None  # try again
            self._turns.begin(order, rank, rotating)
            for buffer in self._ring:
                buffer.is_done = False
            self._evict()
            self._read_ahead()
        self._launch()

    def acquire(self, tile: Tile) -> RecordBuffer:
        """Wait until a buffer holds the tile; it is the caller's until ``release``.

        Raises:
            TransferError: The record cannot be read.
            ChecksumError: It is not what was written.
        """
        buffer = self._wait_for(tile)
        try:
            self._look_at(tile, buffer)
        except BaseException:
            self.drop(buffer)
            raise
        return buffer

    def release(self, buffer: RecordBuffer) -> None:
        """The tile was updated. Begins to write what should make room."""
        assert buffer.tile is not None
        with self._wake:
            buffer.is_fresh = False
            buffer.is_done = True
            buffer.phase = BufferPhase.DIRTY
            self._slots.filled.add(buffer.tile.index)
            if self._write_through:
                self._write(buffer)
            self._evict()
            self._read_ahead()
            self._wake.notify_all()
        self._launch()

    def drop(self, buffer: RecordBuffer) -> None:
        """Forget what an acquired buffer holds: what is on flash counts, if anything does."""
        with self._wake:
            self._ring.free(buffer)
            self._wake.notify_all()

    def put_back(self, buffer: RecordBuffer) -> None:
        """Give an acquired buffer back as it was: it was only looked at."""
        with self._wake:
            buffer.phase = buffer.before
            buffer.is_done = True
            if buffer.is_fresh:
                self._ring.free(buffer)
            self._evict()
            self._read_ahead()
            self._wake.notify_all()
        self._launch()

    def record_bytes(self, tile: Tile) -> int:
        """Return the bytes last written of a tile; its full length if none were."""
        return self.store.record_bytes(tile, self._slots.of(tile))

    def is_filled(self, tile: Tile) -> bool:
        """Return whether the tile has a record."""
        return tile.index in self._slots.filled

    def forget_all(self) -> None:
        """No tile has a record any more. No pass may be under way."""
        with self._wake:
            self._turns.forget()
        self._settle()
        with self._wake:
            for buffer in self._ring:
                self._ring.free(buffer)
            self._slots.filled.clear()

    def flush(self) -> None:
        """Write everything that is newer than on flash, and wait.

        Raises:
            TransferError: Something could not be written; it is still in memory.
        """
        with self._wake:
            self._turns.forget()
            for buffer in self._ring:
                if buffer.phase is BufferPhase.DIRTY and not buffer.is_fresh:
                    self._write(buffer)
        self._settle()
        if self.write_failure is not None:
            error, self.write_failure = self.write_failure, None
            raise error

    def commit(self) -> None:
        """Take the last writes as committed to a journal. See ``RecordSlots.commit``."""
        with self._wake:
            self._slots.commit()

    def restore(self, slots: Mapping[int, int]) -> None:
        """Restore from a journal which tiles have a record, and in which slot."""
        self.forget_all()
        with self._wake:
            self._slots.restore(slots)

    def close(self) -> None:
        """Wait for what is in flight and give the memory back. The contents are gone. Idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._turns.forget()
        self._settle()
        self._ring.close()

    # -- without the lock -------------------------------------------------------------------------

    def _look_at(self, tile: Tile, buffer: RecordBuffer) -> None:
        """Have the record as it was when it was visited last."""
        slot, names = self._slots.of(tile), partial(self._names, tile)
        if buffer.unseen:
            self.store.verify(tile, buffer.address, slot, names)
            buffer.unseen = False
        if buffer.squeezed_bytes:
            length, buffer.squeezed_bytes = buffer.squeezed_bytes, 0
            if not self._squeezer.expand(tile, buffer.memory, length):
                raise self.store.damage(tile, slot, names, "cannot be expanded")

    def _wait_for(self, tile: Tile) -> RecordBuffer:
        while True:
            with self._wake:
                buffer = self._look_for(tile)
                if buffer is None and not (self._reads or self._writes):
                    begun = time.perf_counter()
                    self._wake.wait()
                    self.waited_s += (time.perf_counter() - begun) * self.is_awaited
            self._launch()
            if buffer is not None:
                return buffer

    def _settle(self) -> None:
        """Wait until nothing is in flight."""
        self._launch()
        with self._wake:
            self._wake.wait_for(lambda: not any(each.is_moving for each in self._ring))

    def _launch(self) -> None:
        """Hand to the engine what was begun. Its callbacks may run at once, and take the lock."""
        _begin_all(self._reads)
        _begin_all(self._writes)

    def _start_read(self, tile: Tile, buffer: RecordBuffer, slot: int) -> None:
        buffer.squeezed_bytes = self.store.squeezed_bytes(tile, slot)
        try:
            transfer = self.store.start_read(tile, buffer.address, buffer.memory, slot)
        except PenstockError as error:
            self._was_read(buffer, error)
            return
        transfer.add_done_callback(lambda done: self._was_read(buffer, done.error))

    def _start_write(self, tile: Tile, buffer: RecordBuffer, slot: int) -> None:
        if not buffer.squeezed_bytes:
            buffer.squeezed_bytes = self._squeezer.squeeze(tile, buffer.memory)
        length = buffer.squeezed_bytes
        try:
            transfer = self.store.start_write(
                tile, buffer.address, buffer.memory, slot, squeezed_bytes=length
            )
        except PenstockError as error:
            self._was_written(buffer, slot, error)
            return
        transfer.add_done_callback(lambda done: self._was_written(buffer, slot, done.error))

    # -- under the lock ---------------------------------------------------------------------------

    def _look_for(self, tile: Tile) -> RecordBuffer | None:
        """The tile's buffer if it can be visited now; else something may have been begun for it."""
        buffer = self._ring.of(tile)
        if buffer is None:
            room = self._make_room()
            if room is None:
                return None
            self._fetch(tile, room)
            buffer = room
        if buffer.error is not None:
            error = buffer.error
            self._ring.free(buffer)
            raise error.with_traceback(None)
        if buffer.phase in (BufferPhase.CLEAN, BufferPhase.DIRTY):
            buffer.before, buffer.phase = buffer.phase, BufferPhase.BUSY
            buffer.is_early = False
            return buffer
        if buffer.phase is BufferPhase.WRITING:
            buffer.leaves = False
        return None

    def _make_room(self) -> RecordBuffer | None:
        """A free buffer for who waits; or None, having begun to write for it."""
        free = self._ring.first(BufferPhase.FREE)
        if free is not None:
            return free
        if any(each.phase is BufferPhase.WRITING and each.leaves for each in self._ring):
            return None
        spare = self._turns.to_give_up()
        if spare is not None:
            return self._give_up(spare)
        if any(each.is_moving for each in self._ring):
            return None
        dirty = self._turns.to_write()
        if dirty is not None and self.write_failure is not None:  # the pass ends in memory
            self._ring.grow(1)
            return self._ring.first(BufferPhase.FREE)
        if dirty is not None:
            self._let_go(dirty)
        return None

    def _give_up(self, buffer: RecordBuffer) -> RecordBuffer:
        """Free a buffer whose record is on flash, or means nothing."""
        tile, is_early = buffer.tile, buffer.is_early
        self._ring.free(buffer)
        if tile is not None and is_early:
            self._turns.postpone(tile)
        return buffer

    def _read_ahead(self) -> None:
        while (found := self._turns.next_to_read()) is not None:
            self._fetch(*found)

    def _fetch(self, tile: Tile, buffer: RecordBuffer) -> None:
        self._ring.give(buffer, tile)
        buffer.is_early = True
        buffer.is_fresh = tile.index not in self._slots.filled
        if buffer.is_fresh or not tile.record_bytes:
            buffer.memory[: tile.record_bytes] = 0
            buffer.phase = BufferPhase.DIRTY
            return
        buffer.phase = BufferPhase.READING
        slot = self._slots.of(tile)
        self._reads.append(partial(self._start_read, tile, buffer, slot))

    def _evict(self) -> None:
        """Let go of updated tiles as long as reads wait for room."""
        if self.write_failure is None:
            for buffer in self._turns.to_let_go():
                self._let_go(buffer)

    def _let_go(self, buffer: RecordBuffer) -> None:
        assert buffer.tile is not None
        if buffer.phase is BufferPhase.CLEAN or not buffer.tile.record_bytes:
            self._ring.free(buffer)
        else:
            buffer.leaves = True
            if buffer.phase is BufferPhase.DIRTY:
                self._write(buffer)

    def _write(self, buffer: RecordBuffer) -> None:
        tile = buffer.tile
        assert tile is not None
        if not tile.record_bytes:
            return
        buffer.phase = BufferPhase.WRITING
        slot = self._slots.not_committed(tile) if self._write_through else 0
        self._writes.append(partial(self._start_write, tile, buffer, slot))

    # -- in a thread of the engine ----------------------------------------------------------------

    def _was_read(self, buffer: RecordBuffer, error: BaseException | None) -> None:
        with self._wake:
            buffer.phase = BufferPhase.CLEAN
            buffer.error = error
            buffer.unseen = True
            self._wake.notify_all()

    def _was_written(self, buffer: RecordBuffer, slot: int, error: BaseException | None) -> None:
        with self._wake:
            assert buffer.tile is not None
            if error is not None:
                self.write_failure = error
                buffer.phase = BufferPhase.DIRTY
                buffer.leaves = False
            else:
                self._slots.newest[buffer.tile.index] = slot
                buffer.phase = BufferPhase.CLEAN
                if buffer.leaves:
                    self._ring.free(buffer)
                    self._read_ahead()
            self._wake.notify_all()
        _begin_all(self._reads)


def _begin_all(begun: deque[Callable[[], None]]) -> None:
    while begun:
        try:
            begin = begun.popleft()
        except IndexError:  # another thread was quicker
            return
        begin()
