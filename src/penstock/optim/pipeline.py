"""Tiles on their way: read ahead, updated, written behind, through a fixed number of buffers.

[Note: which tiles stay]
    A pass visits tiles in an order that is known in advance, at least roughly. Reads begin in that order
    as long as a buffer is free. A buffer is freed by writing a tile that was updated in this pass; of
    those, the one that the next pass needs last. So if the next pass goes backwards, the tiles visited
    last stay: they are not written, and are updated where they are. If it goes the same way again, the
    tiles visited first stay; those visited last are written when the next pass begins, so that buffers
    are free for its first reads. With as many buffers as tiles, nothing is ever moved.

[Note: the pipeline never deadlocks]
    A visitor holds one buffer, and waits for another only before it has one. Every other buffer is being
    read or written, which ends; or holds a tile that was updated, which is written for the visitor that
    waits; or one that was read too early, which is dropped for it. There is one buffer more than
    visitors.

[Note: spare buffers]
    A session may have memory left. Then there are more buffers, of which it can have the memory again at
    any time: one that no visitor works on, and that was not read ahead, is written if need be, and is no
    buffer any more. Between passes their number follows what is left.

[Note: which thread compresses]
    A record is squeezed by the thread that begins its write, and expanded by the one that visits it: a
    visitor, or the thread that flushes. The engine's threads only move bytes, so they begin reads and
    never writes. A buffer whose record was written and is visited again is expanded in place.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.locks import condition
from penstock.core.process import fork_guard
from penstock.core.units import round_up
from penstock.homed import UpdateMemory
from penstock.io.mapping import PAGE_BYTES
from penstock.optim.params import Tile
from penstock.optim.squeeze import Squeezer
from penstock.optim.store import RecordStore
from penstock.store.arena import Arena, lone_block
from penstock.store.pool import Block

_NOTHING: Final = np.empty(0, np.uint8)


class BufferPhase(enum.Enum):
    """Contents of a buffer."""

    FREE = "nothing"
    READING = "a record on its way in"
    CLEAN = "a record as it is on flash"
    DIRTY = "a record newer than on flash, or never written"
    BUSY = "a record that a visitor works on"
    WRITING = "a record on its way out"


class RecordBuffer:
    """Memory for one record. The pipeline's lock guards it, except for a visitor's use of the memory.

    Attributes:
        memory: uint8; the record of ``tile`` is its beginning.
        address: Address of ``memory``.
        tile: Tile whose record it holds; None: none.
        phase: Contents.
        before: Phase that BUSY came after.
        is_fresh: True if the record was never filled, so that its contents mean nothing.
        is_early: True if it was read ahead, and not visited yet.
        is_done: True if it was visited in this pass.
        leaves: True if the buffer becomes free once its record is written.
        squeezed_bytes: Length of the squeezed record at the end of the buffer; 0: it is not squeezed.
        error: Why it could not be read.
        is_spare: True if its memory is lent: see [Note: spare buffers].
        retires: True if it is no buffer any more once it is free.
    """

    __slots__ = (
        *("address", "memory", "tile", "phase", "before", "error", "is_spare", "retires"),
        *("is_done", "is_early", "is_fresh", "leaves", "squeezed_bytes"),
    )

    def __init__(self, address: int, memory: NDArray[np.uint8], *, is_spare: bool = False) -> None:
        """Make an empty buffer."""
        self.address = address
        self.memory = memory
        self.is_spare = is_spare
        self.retires = False
        self.before = BufferPhase.FREE
        self.is_done = False
        self.clear()

    def clear(self) -> None:
        """Mark the buffer as empty."""
        self.tile: Tile | None = None
        self.phase = BufferPhase.FREE
        self.is_fresh = self.is_early = self.leaves = False
        self.squeezed_bytes = 0
        self.error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        """True if it holds a record that no visitor changes now."""
        return self.phase in (BufferPhase.CLEAN, BufferPhase.DIRTY, BufferPhase.WRITING)

    @property
    def is_moving(self) -> bool:
        """True if its record is on its way in or out."""
        return self.phase in (BufferPhase.READING, BufferPhase.WRITING)


class TilePipeline:
    """The buffers of an optimizer, and which tile is in which. Thread-safe.

    Attributes:
        store: Records on flash.
        buffer_bytes: Length of a buffer.
        write_failure: Why a record could not be written, if one could not; it is still in memory.
        waited_s: Time that visitors have waited while ``is_awaited``.
        is_awaited: True while the training thread waits for the visitors.
    """

    def __init__(
        self,
        store: RecordStore,
        *,
        count: int,
        least: int,
        buffer_bytes: int,
        write_through: bool,
        squeezer: Squeezer,
        most: int = 0,
    ) -> None:
        """Make the buffers; memory becomes resident as it is first used.

        Args:
            store: Records on flash.
            count: Number of buffers, if the process's account of memory has room for them.
            least: Smallest number of buffers; two more than simultaneous visitors, or as many as tiles.
            buffer_bytes: Length of the longest record, with what squeezing needs.
            write_through: Write each tile in each pass.
            squeezer: Compresses the records that are written.
            most: Number of buffers with spare ones at most: of tiles.

        Raises:
            BudgetError: There is no memory for the buffers.
        """
        self.store = store
        self.buffer_bytes = buffer_bytes
        self.write_failure: BaseException | None = None
        self.waited_s = 0.0
        self.is_awaited = True
        self._squeezer = squeezer
        self._most = 0 if write_through else most
        self._write_through = write_through
        self._wake = condition()
        self._block_bytes = round_up(max(buffer_bytes, 1), PAGE_BYTES)
        self._arena = Arena(count * self._block_bytes, owner="optimizer")
        self._buffers: list[RecordBuffer] = []
        self._holding: dict[int, RecordBuffer] = {}  # by number of a tile
        self._ahead: deque[Tile] = deque()  # to read, in this order
        self._rank: Mapping[int, int] = {}
        self._places: dict[int, int] = {}  # by number of a tile, in this pass
        self._reads: deque[Callable[[], None]] = deque()  # to submit without the lock
        self._writes: deque[Callable[[], None]] = deque()
        self._closed = False
        self._guard = fork_guard()
        self._lender: UpdateMemory | None = None
        self._make_buffers(count, least)
        self._rotating = self.count

    @property
    def memory_bytes(self) -> int:
        """Bytes of the buffers when all are in use, without spare ones."""
        return self.own_count * self.buffer_bytes

    @property
    def count(self) -> int:
        """Number of buffers."""
        return len(self._buffers)

    @property
    def own_count(self) -> int:
        """Number of buffers without spare ones."""
        return sum(not each.is_spare for each in self._buffers)

    def begin(
        self,
        order: Sequence[Tile],
        rank: Mapping[int, int],
        *,
        rotating: int | None = None,
        lender: UpdateMemory | None = None,
    ) -> None:
        """Begin a pass.

        Args:
            order: The tiles to visit, as far as is known.
            rank: By number of a tile, its place in the pass after this one.
            rotating: Most buffers on their way in or out at once; the others are left to tiles that stay.
                None: all.
            lender: Memory of spare buffers, in a session that has any.
        """
        self._borrow(lender)
        with self._wake:
            self.write_failure = None  # try again
            self._ahead = deque(order)
            self._places = {tile.index: place for place, tile in enumerate(order)}
            self._rank = rank
            self._rotating = self.count if rotating is None else rotating
            for buffer in self._buffers:
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
            self._expand(tile, buffer)
        except BaseException:
            self.drop(buffer)
            raise
        return buffer

    def release(self, buffer: RecordBuffer, *, changed: bool = True) -> None:
        """Return an acquired buffer, whose record was ``changed`` or not; begin what makes room."""
        assert buffer.tile is not None
        with self._wake:
            buffer.is_done = True
            if changed:
                buffer.is_fresh = False
                buffer.phase = BufferPhase.DIRTY
                self.store.filled.add(buffer.tile.index)
                if self._write_through:
                    self._write(buffer)
            elif buffer.is_fresh:
                self._free(buffer)
            else:
                buffer.phase = buffer.before
            self._evict()
            self._read_ahead()
            self._wake.notify_all()
        self._launch()

    def drop(self, buffer: RecordBuffer) -> None:
        """Forget the contents of an acquired buffer: the record on flash counts, if there is one."""
        with self._wake:
            self._free(buffer)
            self._wake.notify_all()

    def forget_all(self) -> None:
        """Forget the records of all tiles. No pass may be under way."""
        with self._wake:
            self._ahead.clear()
        self._launch()
        with self._wake:  # to the end: buffers may give way at any time
            self._await_transfers()
            for buffer in tuple(self._buffers):
                self._free(buffer)
            self.store.filled.clear()

    def flush(self) -> None:
        """Write every record that is newer than on flash, and wait.

        Raises:
            TransferError: One could not be written; it is still in memory.
        """
        with self._wake:
            self._ahead.clear()
            for buffer in self._buffers:
                if buffer.phase is BufferPhase.DIRTY and not buffer.is_fresh:
                    self._write(buffer)
        self._settle()
        if self.write_failure is not None:
            raise self._take_write_failure()

    def close(self) -> None:
        """Wait for what is in flight and free the memory; the contents are gone. Idempotent.

        The memory of a buffer of which an array is left is freed with that array.
        """
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._ahead.clear()
        self._settle()
        self._buffers.clear()
        self._holding.clear()
        self._arena.close()
        if self._lender is not None:
            self._lender.want_records(self, 0)

    # -- spare buffers ----------------------------------------------------------------------------

    def give_way(self, nbytes: int) -> int:
        """See :class:`penstock.homed.RecordHolder`. In any thread."""
        if self._guard.in_child:
            return 0
        with self._wake:
            if self._closed:
                return 0
            spare = [each for each in self._buffers if each.is_spare]
            going = sum(each.retires for each in spare) * self._block_bytes
            idle = [each for each in spare if self._can_retire(each)]
            idle.sort(
                key=lambda each: (each.tile is None, each.tile is not None and self._needed(each))
            )
            while idle and going < nbytes:
                self._retire(idle.pop())
                going += self._block_bytes
            self._wake.notify_all()
        self._launch()
        return going

    def _borrow(self, memory: UpdateMemory | None) -> None:
        """Have as many spare buffers as there is memory for, between passes."""
        if memory is None:
            self.give_way(len(self._buffers) * self._block_bytes)
            return
        self._lender = memory
        account = memory.records
        spare = sum(each.is_spare for each in self._buffers)
        memory.want_records(self, max(0, self._most - self.count + spare) * self._block_bytes)
        self.give_way(account.used_bytes - account.limit_bytes)
        while self.count < self._most and account.free_bytes >= self._block_bytes:
            try:
                arena = Arena(self._block_bytes, account=account, owner="optimizer")
            except ConfigError:  # the limit was lowered meanwhile
                return
            block = arena.allocate(self._block_bytes, wait=False)
            arena.close()  # as soon as the block is freed
            if block is None:
                return
            with self._wake:
                self._add_buffer(block, is_spare=True)

    def _can_retire(self, buffer: RecordBuffer) -> bool:
        """Return whether nobody works with a buffer, or is about to. Under the lock."""
        if buffer.retires or buffer.is_early:
            return False
        is_written = buffer.phase is not BufferPhase.DIRTY or self.write_failure is None
        return buffer.phase is BufferPhase.FREE or (buffer.is_settled and is_written)

    def _retire(self, buffer: RecordBuffer) -> None:
        """Let a buffer that can retire be none any more when its record is on flash. Under the lock."""
        buffer.retires = True
        if buffer.phase is BufferPhase.FREE or buffer.is_fresh:
            self._free(buffer)
        else:
            self._begin_eviction(buffer)

    # -- errors that no frame names, since frames that name what they raise live until a collection --

    def _take_write_failure(self) -> BaseException:
        error, self.write_failure = self.write_failure, None
        assert error is not None
        return error.with_traceback(None)

    def _take_read_failure(self, buffer: RecordBuffer) -> BaseException:
        """Free the buffer as well."""
        error = buffer.error
        assert error is not None
        self._free(buffer)
        return error.with_traceback(None)

    # -- without the lock -------------------------------------------------------------------------

    def _expand(self, tile: Tile, buffer: RecordBuffer) -> None:
        """Expand the record that a buffer holds, if it is squeezed."""
        if buffer.squeezed_bytes:
            length, buffer.squeezed_bytes = buffer.squeezed_bytes, 0
            if not self._squeezer.expand(tile, buffer.memory, length):
                raise self.store.damage(tile, "cannot be expanded")

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
            self._await_transfers()

    def _await_transfers(self) -> None:
        """Wait until nothing is in flight. Under the lock."""
        self._wake.wait_for(lambda: not any(each.is_moving for each in self._buffers))

    def _launch(self) -> None:
        """Hand to the engine what was begun. Its callbacks may run at once, and take the lock."""
        _begin_all(self._reads)
        _begin_all(self._writes)

    def _start_read(self, tile: Tile, buffer: RecordBuffer) -> None:
        buffer.squeezed_bytes = self.store.squeezed_bytes(tile)
        try:
            transfer = self.store.start_read(tile, buffer.address, buffer.memory)
        except PenstockError as error:
            self._was_read(buffer, error.with_traceback(None))  # whose frames would keep all this
            return
        transfer.add_done_callback(lambda done: self._was_read(buffer, done.error))

    def _start_write(self, tile: Tile, buffer: RecordBuffer) -> None:
        if not buffer.squeezed_bytes:
            buffer.squeezed_bytes = self._squeezer.squeeze(tile, buffer.memory)
        length = buffer.squeezed_bytes
        try:
            transfer = self.store.start_write(tile, buffer.address, buffer.memory, length)
        except PenstockError as error:
            self._was_written(buffer, error.with_traceback(None))  # as in _start_read
            return
        transfer.add_done_callback(lambda done: self._was_written(buffer, done.error))

    # -- under the lock: what moves when ----------------------------------------------------------

    def _look_for(self, tile: Tile) -> RecordBuffer | None:
        """Return the tile's buffer if it can be visited now; else begin what makes that possible."""
        buffer = self._holding.get(tile.index)
        if buffer is None:
            buffer = self._make_room()
            if buffer is None:
                return None
            self._fetch(tile, buffer)
        if buffer.error is not None:
            raise self._take_read_failure(buffer)
        if buffer.phase in (BufferPhase.CLEAN, BufferPhase.DIRTY):
            buffer.before, buffer.phase = buffer.phase, BufferPhase.BUSY
            buffer.is_early = False
            return buffer
        if buffer.phase is BufferPhase.WRITING:
            buffer.leaves = buffer.retires = False
        return None

    def _make_room(self) -> RecordBuffer | None:
        """Return a free buffer for a visitor that waits; or None, having begun to write for it."""
        free = self._first_free()
        if free is not None:
            return free
        if any(each.phase is BufferPhase.WRITING and each.leaves for each in self._buffers):
            return None
        spare = self._to_reuse()
        if spare is not None:
            return self._reuse(spare)
        if any(each.is_moving for each in self._buffers):
            return None
        dirty = self._to_write_back()
        if dirty is not None and self.write_failure is not None:  # the pass ends in memory
            self._add_buffer(lone_block(self._block_bytes, owner="optimizer"))
            return self._first_free()
        if dirty is not None:
            self._begin_eviction(dirty)
        return None

    def _to_reuse(self) -> RecordBuffer | None:
        """Return a buffer that can be reused at once: its record is on flash as it is, or not needed."""
        spare = [
            each
            for each in self._buffers
            if each.phase is BufferPhase.CLEAN or (each.is_fresh and each.is_settled)
        ]
        return max(spare, key=lambda b: (b.is_done, b.is_early, self._next_use(b)), default=None)

    def _reuse(self, buffer: RecordBuffer) -> RecordBuffer:
        """Free a buffer; read its tile again later if it was not visited yet."""
        tile, is_early = buffer.tile, buffer.is_early
        self._free(buffer)
        if tile is not None and is_early:
            self._ahead.append(tile)
        return buffer

    def _to_write_back(self) -> RecordBuffer | None:
        """Return the changed buffer to write back for a visitor that waits."""
        dirty = [each for each in self._buffers if each.phase is BufferPhase.DIRTY]
        return max(dirty, key=lambda b: (b.is_done, self._next_use(b)), default=None)

    def _read_ahead(self) -> None:
        """Begin reads in the order of the pass as long as a buffer is free."""
        while True:
            while self._ahead and self._ahead[0].index in self._holding:
                self._ahead.popleft()
            room = self._first_free() if self._ahead else None
            if room is None:
                return
            self._fetch(self._ahead.popleft(), room)

    def _fetch(self, tile: Tile, buffer: RecordBuffer) -> None:
        """Give a free buffer to a tile, and begin to read its record if it has one."""
        self._holding[tile.index] = buffer
        buffer.tile = tile
        buffer.is_done = buffer.leaves = False
        buffer.is_early = True
        buffer.is_fresh = tile.index not in self.store.filled
        if buffer.is_fresh or not tile.record_bytes:
            buffer.memory[: tile.record_bytes] = 0
            buffer.phase = BufferPhase.DIRTY
            return
        buffer.phase = BufferPhase.READING
        self._reads.append(partial(self._start_read, tile, buffer))

    def _evict(self) -> None:
        """Write or free tiles as long as reads wait for room, those needed last first."""
        if self.write_failure is not None or not self._ahead:
            return
        most, room = self._rotating, 0
        for each in self._buffers:  # those that tiles pass through now; without calls: hot
            is_free, leaves = each.phase is BufferPhase.FREE, each.leaves
            if is_free or leaves or each.is_early or each.phase is BufferPhase.READING:
                most -= 1
                room += is_free or leaves
        if most <= 0:
            return
        absent = (tile for tile in self._ahead if tile.index not in self._holding)
        waiting = list(islice(absent, self.count))  # there is room for no more
        wanted = min(len(waiting) - room, most)
        if wanted <= 0:
            return
        held = [e for e in self._buffers if not (e.leaves or e.is_early) and e.is_settled]
        held.sort(key=self._needed, reverse=True)
        for buffer, tile in zip(held[:wanted], waiting[room:], strict=False):
            if not buffer.is_done and self._needed(buffer)[1] < self._place(tile) + self.count:
                break  # it will soon be visited, and need not be written before
            self._begin_eviction(buffer)

    def _begin_eviction(self, buffer: RecordBuffer) -> None:
        assert buffer.tile is not None
        if buffer.phase is BufferPhase.CLEAN or not buffer.tile.record_bytes:
            self._free(buffer)
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
        self._writes.append(partial(self._start_write, tile, buffer))

    def _needed(self, buffer: RecordBuffer) -> tuple[bool, int]:
        """Return when the tile of a buffer is visited next: in the next pass or not, and its place."""
        assert buffer.tile is not None
        return buffer.is_done, self._next_use(buffer) if buffer.is_done else self._place(
            buffer.tile
        )

    def _place(self, tile: Tile) -> int:
        return self._places.get(tile.index, 1 << 60)

    def _next_use(self, buffer: RecordBuffer) -> int:
        assert buffer.tile is not None
        return self._rank.get(buffer.tile.index, 1 << 60)

    # -- under the lock: buffers ------------------------------------------------------------------

    def _first_free(self) -> RecordBuffer | None:
        return next((each for each in self._buffers if each.phase is BufferPhase.FREE), None)

    def _free(self, buffer: RecordBuffer) -> None:
        if buffer.tile is not None:
            self._holding.pop(buffer.tile.index, None)
        buffer.clear()
        if buffer.retires:
            self._buffers.remove(buffer)
            buffer.memory = _NOTHING

    def _make_buffers(self, count: int, least: int) -> None:
        for made in range(count):
            block = self._arena.allocate(self._block_bytes)
            if block is None and made < least:
                missing = (least - made) * self._block_bytes
                raise self._arena.account.refusal(
                    missing,
                    f"{least - made} of the {least} buffers that an optimizer needs",
                    "give a smaller `tile`",
                )
            if block is None:
                return
            self._add_buffer(block)

    def _add_buffer(self, block: Block, *, is_spare: bool = False) -> None:
        memory = block.lend(0, block.nbytes)
        self._buffers.append(RecordBuffer(block.address, memory, is_spare=is_spare))

    # -- in a thread of the engine ----------------------------------------------------------------

    def _was_read(self, buffer: RecordBuffer, error: BaseException | None) -> None:
        with self._wake:
            buffer.phase = BufferPhase.CLEAN
            buffer.error = error
            self._wake.notify_all()

    def _was_written(self, buffer: RecordBuffer, error: BaseException | None) -> None:
        with self._wake:
            assert buffer.tile is not None
            if error is not None:
                self.write_failure = error
                buffer.phase = BufferPhase.DIRTY
                buffer.leaves = buffer.retires = False
            else:
                buffer.phase = BufferPhase.CLEAN
                if buffer.leaves:
                    self._free(buffer)
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
