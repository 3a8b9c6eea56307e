"""Resources for reading in one process: read memory and reader, within the memory that the user gave.

[Note: batch memory]
    A batch that is new memory each time costs a fault for each of its pages; and where a virtual machine
    returns pages that nobody uses to its host, taking them again costs fifty times as much. So large ones
    are blocks of an arena, which are free when the last tensor that refers to them dies. Of what is free,
    no more is kept than is set aside for batches that wait.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import BudgetError, ConfigError
from penstock.core.process import fork_guard
from penstock.core.units import format_bytes, round_down
from penstock.data.assemble import Assembler
from penstock.data.build import Opened
from penstock.data.extents import GRANULE, LONG_BYTES
from penstock.data.group import ALIGNED_BYTES, LEAST_LENT_BYTES, ReadMemory
from penstock.data.index import Index
from penstock.data.order import Order, Share
from penstock.data.rates import DatasetRates
from penstock.data.reader import GROUP_PART, ReadCounts, Reader
from penstock.io.engine import Engine
from penstock.io.mapping import PAGE_BYTES
from penstock.store.arena import Arena
from penstock.store.engine import shared_engine

CHUNK_BYTES: Final = 128 << 10
"""Random reads of this length are about as fast as sequential ones."""
_WINDOW_SHARE: Final = 0.45
"""Of the read memory: the next window arrives while one is used."""
LUMP_BYTES: Final = 1 << 20
"""Of small batches that are decoded together."""
LEAST_REUSED_BYTES: Final = 1 << 20
"""Of what is copied at once; smaller pieces are new memory each time."""
_LEAST_WITH_ARENA_BYTES: Final = 32 << 20
"""Of a loader's memory: up to a page is held beside what is stated."""
_MOST_BATCH_BYTES: Final = 1 << 40
"""Of address space."""
_LUMP_SHARE: Final = 1 / 64
"""Of the memory: less, where there is little."""
_WORKINGS_SHARE: Final = 1 / 16
"""Of the memory: for plans, the kernel's blocks, and what the allocator does not reuse at once."""


class LoaderResources:
    """The memory of a loader, and what fills it. Not inherited by fork.

    Attributes:
        reader: Reads.
        memory: Its memory.
        memory_bytes: The user's number: index, reads and batches that wait are within it.
        waiting_bytes: Set aside for batches that are decoded and wait.
    """

    def __init__(
        self,
        opened: Opened,
        memory_bytes: int,
        *,
        engine: Engine | None = None,
        verify: bool = True,
        waiting_bytes: int = 0,
        sharers: int = 1,
        counts: ReadCounts | None = None,
    ) -> None:
        """Reserve memory; it becomes resident as it is needed.

        Args:
            opened: The data set.
            memory_bytes: All that may be held.
            engine: Moves the bytes; the engine of this process if None.
            verify: Compare checksums.
            waiting_bytes: Set aside for batches that are decoded and wait.
            counts: Totals of reads to add to; new ones if None.
            sharers: Processes that share ``memory_bytes``, each with an index of its own.

        Raises:
            BudgetError: There is nothing left to read into.
            ConfigError: The engine is GPU-direct.
        """
        if engine is not None and engine.spec.gpu_direct:
            raise ConfigError(
                f"the engine {engine.spec.name!r} moves bytes to and from device memory, and samples are"
                " decoded in host memory: leave engine= out"
            )
        self.memory_bytes = memory_bytes // sharers
        self.waiting_bytes = waiting_bytes
        self._index = opened.index
        self.memory = ReadMemory(self.room_beside(waiting_bytes))
        self.engine = shared_engine() if engine is None else engine
        self.reader = Reader(
            opened,
            self.memory,
            self.engine,
            verify=verify,
            memory_bytes=self.memory_bytes,
            counts=counts,
        )
        self._batches: Arena | None = None
        self.guard = fork_guard()

    @property
    def held_bytes(self) -> int:
        """Bytes held now: the index, what is resident of the read memory, and what is reserved."""
        workings = int(self.memory_bytes * _WORKINGS_SHARE)
        return workings + self._index.nbytes + self.memory.held_bytes + self.waiting_bytes

    def set_aside(self, waiting_bytes: int) -> None:
        """Lower the limit of the read memory for batches that wait. Raises BudgetError: none is left."""
        if waiting_bytes <= self.waiting_bytes:
            return
        self.memory.limit_bytes = min(self.memory.limit_bytes, self.room_beside(waiting_bytes))
        self.waiting_bytes = waiting_bytes

    def batch_room(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory for a batch, used again when the batch is dropped; see [Note: batch memory].

        Thread-safe. Contents are undefined.
        """
        if nbytes < LEAST_REUSED_BYTES or self.memory_bytes < _LEAST_WITH_ARENA_BYTES:
            return np.empty(nbytes, np.uint8)
        if self._batches is None:
            self._batches = Arena(_MOST_BATCH_BYTES, owner="data loader")
        idle = self._batches.touched_bytes - self._batches.used_bytes
        if idle > max(self.waiting_bytes, nbytes):
            self._batches.trim(idle - self.waiting_bytes)
        block = self._batches.allocate(nbytes)
        return np.empty(nbytes, np.uint8) if block is None else block.lend(0, nbytes)

    def close(self) -> None:
        """Give the memory back. Nothing may be under way.

        Batches that were handed over stay what they are.
        """
        if self.guard.in_child:
            return
        if self._batches is not None:
            self._batches.close()
        self.reader.close()
        self.memory.close()

    def room_beside(self, waiting_bytes: int) -> int:
        """Return the bytes for reads beside batches of so many bytes. Raises BudgetError: none."""
        workings = int(self.memory_bytes * _WORKINGS_SHARE)
        needs = self._index.nbytes + waiting_bytes
        room = round_down(self.memory_bytes - workings - needs, PAGE_BYTES)
        if room < PAGE_BYTES:
            least = int((needs + 2 * PAGE_BYTES) / (1 - _WORKINGS_SHARE))
            longest, nbytes = self._index.longest()
            raise BudgetError(
                f"a loader with {format_bytes(self.memory_bytes)} of memory: its index takes"
                f" {format_bytes(self._index.nbytes)}, batches that wait"
                f" {format_bytes(waiting_bytes)}, and nothing is left to read into (the longest"
                f" sample is {longest}, of {nbytes} bytes); give it at least {least} bytes, or make"
                " batches smaller",
                slot="index",
                limit_bytes=self.memory_bytes,
                least_bytes=least,
            )
        return room


def lump_of(values: Assembler, batch_size: int, memory_bytes: int) -> int:
    """How many batches are decoded and handed over together: so many as make a MiB."""
    if not values.alike:
        return 1
    most_bytes = min(LUMP_BYTES, int(memory_bytes * _LUMP_SHARE))
    return max(1, most_bytes // max(1, values.decoded_bytes() * batch_size))


def lends_mostly(
    values: Assembler,
    index: Index,
    order: Order,
    share: Share,
    *,
    lump: int,
    waiting: int,
    room_bytes: int,
) -> bool:
    """Return whether nearly all batches of this order can be lent.

    They can where the samples of a batch lie side by side in the read memory, where reads begin at whole
    blocks, and where the read memory has as much room again as all the batches that wait.
    """
    columns = values.columns or ()
    if not values.alike or len(columns) != 1 or columns[0].cast is not None:
        return False
    first = index.locate(np.zeros(1, np.int64))
    start, nbytes = int(first.offset[0, 0]), int(first.nbytes[0, 0])
    batch_bytes = share.batch_size * nbytes
    lump_bytes, waiting_bytes = batch_bytes * lump, batch_bytes * waiting
    if lump_bytes < LEAST_LENT_BYTES or lump_bytes > room_bytes // GROUP_PART:
        return False
    if waiting_bytes > room_bytes // 2:
        return False
    if order.kind == "sequential":
        return not (start % ALIGNED_BYTES or nbytes % ALIGNED_BYTES) and 1 in (share.world, lump)
    alone = order.kind == "full" or order.chunk_samples == 1
    return alone and nbytes >= LONG_BYTES and not (start % GRANULE or nbytes % GRANULE)


def choose_order(
    kind: Order | str,
    index: Index,
    room_bytes: int,
    *,
    seed: int,
    batch_size: int,
    world: int,
    rates: DatasetRates | None = None,
) -> Order:
    """Return an order for so much memory; one that is given as it is.

    ``auto`` is a full shuffle where random reads cost nothing, or where all samples fit in memory; else a
    window. Whether they do, ``rates`` tell; if there are none, it is so for samples of 128 KiB and more.
    A window has as many chunks as fit in memory twice; with several ranks each has a lane of its own.
    """
    if isinstance(kind, Order):
        return kind
    mean = max(1, index.data_bytes // index.samples)
    if kind == "auto":
        quick = mean >= CHUNK_BYTES if rates is None else rates.full_is_quick
        kind = "full" if quick else "window"
    if kind == "window":
        room = int(room_bytes * _WINDOW_SHARE)
        found = _window(index, room, mean, seed=seed, batch_size=batch_size, world=world)
        if found is not None:
            return found
        kind = "full"
    return Order(kind=kind, seed=seed)  # type: ignore[arg-type]  # it checks


def _window(
    index: Index, room_bytes: int, mean: int, *, seed: int, batch_size: int, world: int
) -> Order | None:
    """None: no window of whole batches fits."""
    if index.data_bytes <= room_bytes:
        return None  # the whole set fits
    for chunk_samples in (max(1, CHUNK_BYTES // mean), 1):
        chunk_bytes = chunk_samples * mean + 2 * PAGE_BYTES
        unit = batch_size // math.gcd(chunk_samples, batch_size)
        chunks = room_bytes // chunk_bytes // unit * unit
        if chunks > 1:
            return Order(
                kind="window",
                seed=seed,
                chunk_samples=chunk_samples,
                window_chunks=chunks * world,
                lanes=world,
                stripe_samples=batch_size if world > 1 else 1,
            )
    return None
