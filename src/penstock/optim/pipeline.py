"""Tiles on their way: read ahead, updated, written behind, through a ring of buffers.

[Note: which tiles stay]
    A pass visits tiles in an order that is known before, at least roughly. Reads are begun in that
    order as long as a buffer is free. A buffer is freed by writing a tile that was updated in this
    pass, and of those the one that the next pass needs last. So if the next pass goes backwards, what
    was visited last stays, is not written at all, and is updated where it is; if it goes the same way
    again, what was visited first stays. As many buffers as tiles, and nothing is ever moved.

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

import enum
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import BudgetError, PenstockError
from penstock.core.locks import condition
from penstock.core.units import format_bytes
from penstock.io.arena import Arena
from penstock.optim.layout import Tile
from penstock.optim.squeeze import Squeezer
from penstock.optim.store import Store


class Phase(enum.Enum):
    """What a buffer holds."""

    FREE = "nothing"
    READING = "a record on its way in"
    CLEAN = "a record as it is on flash"
    DIRTY = "a record newer than on flash, or never written"
    BUSY = "a record that a visitor works on"
    WRITING = "a record on its way out"


class Buffer:
    """Memory for one record. Everything is guarded by the pipeline's lock, but for a visitor's use.

    Attributes:
        memory: uint8; the record of ``tile`` is its beginning.
        address: Where the record begins.
        is_fresh: Whether the record was never filled, so that its contents mean nothing.
        squeezed_bytes: Length of the record at the end of its place, squeezed; 0: it is at the beginning.
    """

    __slots__ = (
        *("address", "memory", "tile", "phase", "before", "error"),
        *("is_done", "is_early", "is_fresh", "leaves", "squeezed_bytes", "unseen"),
    )

    def __init__(self, address: int, memory: NDArray[np.uint8]) -> None:
        self.address = address
        self.memory = memory
        self.tile: Tile | None = None
        self.phase = Phase.FREE
        self.before = Phase.FREE  # the phase that BUSY came after
        self.is_fresh = False
        self.is_early = False  # read ahead, and not visited yet
        self.is_done = False  # visited in this pass
        self.leaves = False  # free when written
        self.squeezed_bytes = 0
        self.unseen = False  # read, and not yet compared with its checksum
        self.error: BaseException | None = None


class Pipeline:
    """The buffers of an optimizer, and which tile is in which. Thread-safe.

    Attributes:
        store: Where records rest.
        buffer_bytes: Length of a buffer.
        write_failure: Why a record could not be written, if one could not; it is still in memory.
        waited_s: How long visitors have waited while somebody waited for them.
        is_awaited: Whether somebody waits for them now.
    """

    def __init__(
        self,
        store: Store,
        *,
        count: int,
        buffer_bytes: int,
        write_through: bool,
        names: Callable[[Tile], str],
        squeezer: Squeezer,
    ) -> None:
        """Make the buffers; memory becomes resident as it is first used.

        Args:
            store: Where records rest.
            count: Buffers; two more than there are visitors at once, at least.
            buffer_bytes: The longest record, with what squeezing needs.
            write_through: Write each tile in each pass, to its other slot.
            names: What is in a tile, for errors.
            squeezer: Makes records shorter that are written.
        """
        self.store = store
        self.waited_s = 0.0
        self.is_awaited = True
        self._squeezer = squeezer
        self.buffer_bytes = buffer_bytes
        self.write_failure: BaseException | None = None
        self._write_through = write_through
        self._names = names
        self._wake = condition()
        self._arenas: list[Arena] = []
        self._buffers: list[Buffer] = []
        self._holding: dict[int, Buffer] = {}
        self._filled: set[int] = set()  # tiles that have a record somewhere
        self._slot: dict[int, int] = {}  # of the newest record
        self._committed: dict[int, int] = {}  # of the record that the journal knows
        self._ahead: deque[Tile] = deque()
        self._rank: Mapping[int, int] = {}
        self._rotating = count
        self._reads: deque[Callable[[], None]] = deque()  # to submit without the lock
        self._writes: deque[Callable[[], None]] = deque()
        self._closed = False
        self._grow(count)

    @property
    def memory_bytes(self) -> int:
        """What the buffers take when all are in use."""
        return len(self._buffers) * self.buffer_bytes

    @property
    def count(self) -> int:
        """How many buffers there are."""
        return len(self._buffers)

    def inherit(self, other: Pipeline) -> None:
        """Take over what another pipeline on the same store has flushed, before its close."""
        self._filled = set(other._filled)
        self._slot, self._committed = dict(other._slot), dict(other._committed)

    def begin(self, order: Sequence[Tile], rank: Mapping[int, int], *, rotating: int) -> None:
        """Begin a pass.

        Args:
            order: The tiles to visit, as far as is known.
            rank: By number of a tile, its place in the pass after this one.
            rotating: Buffers that may be on their way in or out at once, the rest being left to
                tiles that stay.
        """
        with self._wake:
            self._rank = rank
            self._rotating = rotating
            self.write_failure = None  # try again
            self._ahead = deque(order)
            for buffer in self._buffers:
                buffer.is_done = False
            self._evict()
            self._read_ahead()
        self._launch()

    def acquire(self, tile: Tile) -> Buffer:
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

    def release(self, buffer: Buffer) -> None:
        """The tile was updated. Begins to write what should make room."""
        assert buffer.tile is not None
        with self._wake:
            buffer.is_fresh = False
            buffer.is_done = True
            buffer.phase = Phase.DIRTY
            self._filled.add(buffer.tile.index)
            if self._write_through:
                self._write(buffer)
            self._evict()
            self._read_ahead()
            self._wake.notify_all()
        self._launch()

    def drop(self, buffer: Buffer) -> None:
        """Forget what an acquired buffer holds: what is on flash counts, if anything does."""
        with self._wake:
            self._free(buffer)
            self._wake.notify_all()

    def put_back(self, buffer: Buffer) -> None:
        """Give an acquired buffer back as it was: it was only looked at."""
        with self._wake:
            buffer.phase = buffer.before
            buffer.is_done = True
            if buffer.is_fresh:
                self._free(buffer)
            self._evict()
            self._read_ahead()
            self._wake.notify_all()
        self._launch()

    def record_bytes(self, tile: Tile) -> int:
        """What was last written of a tile, in bytes; all of it if nothing was."""
        return self.store.record_bytes(tile, self._slot.get(tile.index, 0))

    def is_filled(self, tile: Tile) -> bool:
        """Whether the tile has a record."""
        return tile.index in self._filled

    def forget_all(self) -> None:
        """No tile has a record any more. No pass may be under way."""
        with self._wake:
            self._ahead.clear()
        self._settle()
        with self._wake:
            for buffer in self._buffers:
                self._free(buffer)
            self._filled.clear()

    def flush(self) -> None:
        """Write everything that is newer than on flash, and wait.

        Raises:
            TransferError: Something could not be written; it is still in memory.
        """
        with self._wake:
            self._ahead.clear()
            for buffer in self._buffers:
                if buffer.phase is Phase.DIRTY and not buffer.is_fresh:
                    self._write(buffer)
        self._settle()
        if self.write_failure is not None:
            error, self.write_failure = self.write_failure, None
            raise error

    def commit(self) -> None:
        """What was written last is what a journal knows now: it is not overwritten next."""
        with self._wake:
            self._committed = dict(self._slot)

    def keep(self, slots: Mapping[int, int]) -> None:
        """What a journal knows, though nobody wants to read it: it is not overwritten next."""
        with self._wake:
            self._committed = dict(slots)

    def restore(self, slots: Mapping[int, int]) -> None:
        """What a journal says: which tiles have a record, and in which slot."""
        self.forget_all()
        with self._wake:
            self._slot, self._committed = dict(slots), dict(slots)
            self._filled = set(slots)

    @property
    def slots(self) -> dict[int, int]:
        """The slot of the newest record of each tile that has one on flash."""
        return dict(self._slot)

    def close(self) -> None:
        """Wait for what is in flight and give the memory back. The contents are gone. Idempotent."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._ahead.clear()
        self._settle()
        with self._wake:
            self._buffers.clear()  # the memory of each is free when nobody has an array of it
            self._holding.clear()
        for arena in self._arenas:
            arena.close()

    # -- without the lock -------------------------------------------------------------------------

    def _look_at(self, tile: Tile, buffer: Buffer) -> None:
        """Have the record as it was when it was visited last."""
        slot, names = self._slot.get(tile.index, 0), partial(self._names, tile)
        if buffer.unseen:
            self.store.verify(tile, buffer.address, slot, names)
            buffer.unseen = False
        if buffer.squeezed_bytes:
            length, buffer.squeezed_bytes = buffer.squeezed_bytes, 0
            if not self._squeezer.expand(tile, buffer.memory, length):
                raise self.store.damage(tile, slot, names, "cannot be expanded")

    def _wait_for(self, tile: Tile) -> Buffer:
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
            self._wake.wait_for(
                lambda: all(b.phase not in (Phase.READING, Phase.WRITING) for b in self._buffers)
            )

    def _launch(self) -> None:
        """Hand to the engine what was begun. Its callbacks may run at once, and take the lock."""
        _begin_all(self._reads)
        _begin_all(self._writes)

    def _start_read(self, tile: Tile, buffer: Buffer, slot: int) -> None:
        buffer.squeezed_bytes = self.store.squeezed_bytes(tile, slot)
        try:
            transfer = self.store.start_read(tile, buffer.address, buffer.memory, slot)
        except PenstockError as error:
            self._was_read(buffer, error)
            return
        transfer.add_done_callback(lambda done: self._was_read(buffer, done.error))

    def _start_write(self, tile: Tile, buffer: Buffer, slot: int) -> None:
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

    def _look_for(self, tile: Tile) -> Buffer | None:
        """The tile's buffer if it can be visited now; else something may have been begun for it."""
        buffer = self._holding.get(tile.index)
        if buffer is None:
            room = self._make_room()
            if room is None:
                return None
            self._fetch(tile, room)
            buffer = room
        if buffer.error is not None:
            error = buffer.error
            self._free(buffer)
            raise error.with_traceback(None)
        if buffer.phase in (Phase.CLEAN, Phase.DIRTY):
            buffer.before, buffer.phase = buffer.phase, Phase.BUSY
            buffer.is_early = False
            return buffer
        if buffer.phase is Phase.WRITING:
            buffer.leaves = False
        return None

    def _make_room(self) -> Buffer | None:
        """A free buffer for who waits; or None, having begun to write for it."""
        free = self._first(Phase.FREE)
        if free is not None:
            return free
        if any(each.phase is Phase.WRITING and each.leaves for each in self._buffers):
            return None
        spare = [b for b in self._buffers if b.phase is Phase.CLEAN or (b.is_fresh and _rests(b))]
        if spare:
            return self._give_up(
                max(spare, key=lambda b: (b.is_done, b.is_early, self._next_use(b)))
            )
        if any(each.phase in (Phase.READING, Phase.WRITING) for each in self._buffers):
            return None
        dirty = [each for each in self._buffers if each.phase is Phase.DIRTY]
        if dirty and self.write_failure is not None:  # the pass ends in memory
            self._grow(1)
            return self._first(Phase.FREE)
        if dirty:
            self._let_go(max(dirty, key=lambda b: (b.is_done, self._next_use(b))))
        return None

    def _give_up(self, buffer: Buffer) -> Buffer:
        """Free a buffer whose record is on flash, or means nothing."""
        tile, is_early = buffer.tile, buffer.is_early
        self._free(buffer)
        if tile is not None and is_early:
            self._ahead.append(tile)
        return buffer

    def _next_use(self, buffer: Buffer) -> int:
        assert buffer.tile is not None
        return self._rank.get(buffer.tile.index, 1 << 60)

    def _first(self, phase: Phase) -> Buffer | None:
        return next((each for each in self._buffers if each.phase is phase), None)

    def _read_ahead(self) -> None:
        while self._ahead:
            if self._ahead[0].index in self._holding:
                self._ahead.popleft()
                continue
            room = self._first(Phase.FREE)
            if room is None:
                return
            self._fetch(self._ahead.popleft(), room)

    def _fetch(self, tile: Tile, buffer: Buffer) -> None:
        self._holding[tile.index] = buffer
        buffer.tile = tile
        buffer.is_done = buffer.leaves = buffer.unseen = False
        buffer.is_early = True
        buffer.is_fresh = tile.index not in self._filled
        if buffer.is_fresh or not tile.record_bytes:
            buffer.memory[: tile.record_bytes] = 0
            buffer.phase = Phase.DIRTY
            return
        buffer.phase = Phase.READING
        slot = self._slot.get(tile.index, 0)
        self._reads.append(partial(self._start_read, tile, buffer, slot))

    def _evict(self) -> None:
        """Let go of updated tiles as long as reads wait for room."""
        if not self._ahead or self.write_failure is not None:
            return
        absent = (tile for tile in self._ahead if tile.index not in self._holding)
        waiting = sum(1 for _ in islice(absent, len(self._buffers)))  # no more can be helped
        moving = [each for each in self._buffers if self._is_rotating(each)]
        room = sum(each.phase is Phase.FREE or each.leaves for each in moving)
        wanted = min(waiting - room, self._rotating - len(moving))
        if wanted <= 0:
            return
        done = [each for each in self._buffers if each.is_done and not each.leaves and _rests(each)]
        done.sort(key=self._next_use, reverse=True)
        for buffer in done[:wanted]:
            self._let_go(buffer)

    @staticmethod
    def _is_rotating(buffer: Buffer) -> bool:
        return buffer.phase in (Phase.FREE, Phase.READING) or buffer.leaves or buffer.is_early

    def _let_go(self, buffer: Buffer) -> None:
        assert buffer.tile is not None
        if buffer.phase is Phase.CLEAN or not buffer.tile.record_bytes:
            self._free(buffer)
        else:
            buffer.leaves = True
            if buffer.phase is Phase.DIRTY:
                self._write(buffer)

    def _write(self, buffer: Buffer) -> None:
        tile = buffer.tile
        assert tile is not None
        if not tile.record_bytes:
            return
        buffer.phase = Phase.WRITING
        slot = 1 - self._committed.get(tile.index, 1) if self._write_through else 0
        self._writes.append(partial(self._start_write, tile, buffer, slot))

    def _free(self, buffer: Buffer) -> None:
        if buffer.tile is not None:
            self._holding.pop(buffer.tile.index, None)
        buffer.tile = None
        buffer.phase = Phase.FREE
        buffer.is_fresh = buffer.is_early = buffer.leaves = buffer.unseen = False
        buffer.squeezed_bytes = 0
        buffer.error = None

    def _grow(self, count: int) -> None:
        each = max(self.buffer_bytes, 4096)
        arena = Arena(count * each, owner="optimizer")
        self._arenas.append(arena)
        block = arena.allocate(count * each)  # one: no page is left over between two buffers
        if block is None:
            raise BudgetError(
                f"an optimizer's ring of {count} buffers of {format_bytes(self.buffer_bytes)}"
                " does not fit in memory; lower host_memory or the tile",
                slot="optimizer",
                limit_bytes=arena.capacity_bytes,
                least_bytes=count * self.buffer_bytes,
            )
        memory = block.lend(0, block.nbytes)
        for start in range(0, block.nbytes, each):
            self._buffers.append(Buffer(block.address + start, memory[start : start + each]))

    # -- in a thread of the engine ----------------------------------------------------------------

    def _was_read(self, buffer: Buffer, error: BaseException | None) -> None:
        with self._wake:
            buffer.phase = Phase.CLEAN
            buffer.error = error
            buffer.unseen = True
            self._wake.notify_all()

    def _was_written(self, buffer: Buffer, slot: int, error: BaseException | None) -> None:
        with self._wake:
            assert buffer.tile is not None
            if error is not None:
                self.write_failure = error
                buffer.phase = Phase.DIRTY
                buffer.leaves = False
            else:
                self._slot[buffer.tile.index] = slot
                buffer.phase = Phase.CLEAN
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


def _rests(buffer: Buffer) -> bool:
    return buffer.phase in (Phase.CLEAN, Phase.DIRTY, Phase.WRITING)
