"""Transfers between tensors and files, block by block, through a few buffers of huge pages.

One thread fills a buffer, computes its checksum, submits it, and fills the next; or computes the checksum
of a buffer that was read, and empties it. Both take a fraction of the time that the device needs for the
same bytes, so the device never waits, and no memory but the buffers is held.

[Note: few buffers]
    The bytes copied to a buffer are read again at once, by the checksum and by the device. So all buffers
    should fit in the caches, which matters where the device is as fast as memory. There are more buffers
    than the engine has places, so that one is full whenever the engine has finished another.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import xxhash

from penstock.checkpoint.regions import Region, SourceRegion, TargetRegion
from penstock.core.threads import in_thread
from penstock.core.units import MIB, round_up
from penstock.io.engine import Engine, Op, Priority, Request, Transfer
from penstock.io.files import DirectFile
from penstock.io.traffic_report import reported
from penstock.observe.clients import CHECKPOINTS
from penstock.store.arena import Arena
from penstock.store.engine import shared_engine
from penstock.store.pool import Block
from penstock.store.window import TransferWindow

BUFFERS_BYTES: Final = 16 * MIB
"""Bytes in flight at once. See [Note: few buffers]."""
_DEVICE_BYTES_PER_S: Final = 2e9
"""Rate of allocating memory below which the device would have to wait."""
_LEAST_BUFFERS: Final = 3
_MOST_BUFFERS: Final = 64

_R = TypeVar("_R", bound=Region)
SourceRegions = Sequence[tuple[int, SourceRegion]]
"""Offsets in a file and the regions there, in order and without overlaps."""
TargetRegions = Sequence[tuple[int, TargetRegion]]
"""The same, of regions to fill."""


def count_within(memory_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks for so much memory."""
    return min(_MOST_BUFFERS, max(_LEAST_BUFFERS, memory_bytes // block_bytes))


class Buffers:
    """Blocks of memory for one save or load, allocated at first use and freed by ``close``.

    Not thread-safe. New memory may take ten times as long as the device takes for as many bytes, because
    a virtual machine's host has to find it first. If so, further blocks are allocated in another thread,
    one at a time, while the first ones are in use.
    """

    def __init__(
        self,
        block_bytes: int,
        engine: Engine | None = None,
        *,
        memory_bytes: int = BUFFERS_BYTES,
    ) -> None:
        """Reserve nothing yet.

        Args:
            block_bytes: Length of a block.
            engine: Moves the blocks; the engine of this process if None.
            memory_bytes: Memory of all blocks; there are at least three.
        """
        self.block_bytes = block_bytes
        self.count = count_within(memory_bytes, block_bytes)
        self.engine = shared_engine() if engine is None else engine
        self._arena = Arena(self.count * block_bytes, owner="checkpoint")
        self._free: list[Block] = []
        self._made = 0
        self._is_slow = False
        self._making: Future[Block | None] | None = None

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, window: TransferWindow[Any]) -> Block:
        """Return a block, completing the oldest transfers of a window as long as none is free.

        Raises:
            BudgetError: The process's account has no room for the least number of blocks.
            TransferError: The next block cannot be allocated, or a transfer failed.
        """
        block = window.take(self._free_block)
        if block is None:
            self._have_made()
            block = self._free.pop()
        return block

    def _free_block(self) -> Block | None:
        """Return a free block; None if all are in use, or the next one is being allocated."""
        if self._making is not None and self._making.done():
            self._have_made()
        if self._free:
            return self._free.pop()
        if self._made == self.count or self._making is not None:
            return None
        self._made += 1
        if not self._is_slow:
            return self._counted(self._make())
        self._making = Future()
        in_thread("penstock-buffers", self._make, self._making)
        return None

    def _have_made(self) -> None:
        making, self._making = self._making, None
        assert making is not None, "all blocks are in use, and none is being allocated"
        block = self._counted(making.result())
        if block is not None:
            self._free.append(block)

    def _counted(self, block: Block | None) -> Block | None:
        """Do with the blocks that there are if the account has refused another."""
        if block is None:
            self.count = self._made = self._made - 1
            if self.count < _LEAST_BUFFERS:
                missing = _LEAST_BUFFERS - self.count
                what = f"{missing} of the {_LEAST_BUFFERS} buffers that a checkpoint needs"
                advice = "give other uses of it less"
                raise self._arena.account.refusal(missing * self.block_bytes, what, advice)
        return block

    def _make(self) -> Block | None:
        start = time.perf_counter()
        block = self._arena.allocate(self.block_bytes)
        self._is_slow = time.perf_counter() - start > self.block_bytes / _DEVICE_BYTES_PER_S
        return block

    def give(self, block: Block) -> None:
        """Free a block for its next use."""
        self._free.append(block)

    def move(
        self,
        op: Op,
        file: DirectFile,
        offset: int,
        nbytes: int,
        block: Block,
        *,
        priority: Priority,
    ) -> Transfer:
        """Begin a transfer of a block's first bytes, rounded up to a granule of the file."""
        transfer = self.engine.submit(
            Request(
                op=op,
                file=file,
                offset_bytes=offset,
                address=block.address,
                nbytes=round_up(nbytes, file.granule_bytes),
                least_bytes=nbytes if op == "read" else None,
                keep_alive=block,
                priority=priority,
            )
        )
        return reported(transfer, op, CHECKPOINTS, file.path)

    def close(self) -> None:
        """Free the memory. Nothing may be in flight."""
        making, self._making = self._making, None
        if making is not None and not making.cancel() and making.exception() is None:
            made = making.result()
            if made is not None:
                self._free.append(made)
        for block in self._free:
            block.free()
        self._free.clear()
        self._arena.close()


def digest(address: int, nbytes: int) -> str:
    """Return the XXH3 (128 bits) of memory; 50 GB/s in a cache, without the interpreter's lock."""
    return xxhash.xxh3_128_hexdigest(_memory(address, nbytes))


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)


@dataclass(slots=True, eq=False)
class OutputFile:
    """A file that is being written."""

    file: DirectFile
    nbytes: int
    """Its length when all its blocks are written."""
    in_flight: int = 0
    """Blocks on their way to it."""
    is_complete: bool = False
    """Every block has been sent."""
    synced: Future[None] | None = None
    """Settled when it is on the device."""


class _Sent(NamedTuple):
    block: Block
    target: OutputFile


class BlockWrites(TransferWindow[_Sent]):
    """Blocks that are being written to files. Not thread-safe.

    [Note: early syncs]
        A device that has a cache writes most of it when a file is synced, which takes as long as writing
        did. So each file is synced, in a thread of its own, as soon as its last block is written, while
        the blocks of later files are on their way.

    Attributes:
        buffers: Memory of the blocks.
    """

    def __init__(
        self, buffers: Buffers, sync: Callable[[DirectFile, int], None] | None = None
    ) -> None:
        """Write nothing yet.

        Args:
            buffers: Memory for the blocks.
            sync: Called in a thread with each file and its length, once all its blocks are written;
                None if no block will be sent.
        """
        super().__init__(complete=self._written, release=lambda sent: buffers.give(sent.block))
        self.buffers = buffers
        self._sync = sync

    def take_block(self) -> Block:
        """Return a block to fill, waiting for the oldest in flight if none is free.

        Raises:
            TransferError: The oldest could not be written.
        """
        return self.buffers.take(self)

    def send(self, target: OutputFile, offset: int, nbytes: int, block: Block) -> None:
        """Begin to write a block; zeros fill it up to the granule of the file."""
        file = target.file
        padding = round_up(nbytes, file.granule_bytes) - nbytes
        if padding:
            ctypes.memset(block.address + nbytes, 0, padding)
        target.in_flight += 1
        self.begin(
            _Sent(block, target),
            lambda priority: self.buffers.move(
                "write", file, offset, nbytes, block, priority=priority
            ),
        )

    def end(self, target: OutputFile) -> None:
        """Note that every block of a file has been sent."""
        target.is_complete = True
        self._sync_if_written(target)

    def wait_for(self, target: OutputFile) -> None:
        """Wait until a file that has ended is on the device, and close it. Raises TransferError."""
        while target.in_flight:
            self.advance()
        assert target.synced is not None
        target.synced.result()
        target.file.close()

    def _written(self, sent: _Sent) -> None:
        sent.target.in_flight -= 1
        self._sync_if_written(sent.target)

    def _sync_if_written(self, target: OutputFile) -> None:
        if target.is_complete and not target.in_flight:
            assert self._sync is not None
            work = partial(self._sync, target.file, target.nbytes)
            target.synced = Future()
            in_thread("penstock-sync", work, target.synced)


def fill(regions: SourceRegions, starts: Sequence[int], begin: int, end: int, address: int) -> str:
    """Copy the bytes ``[begin, end)`` of a file to memory; return their checksum, as ``digest``.

    Args:
        regions: Contents of the file, without a gap.
        starts: Offsets of the regions.
        begin: Offset of the first byte.
        end: Offset after the last byte.
        address: Address of the memory.
    """
    checksum = xxhash.xxh3_128()
    for start, region, low, high in _parts(regions, starts, begin, end):
        for first in range(low, high, region.step_bytes):
            last = min(first + region.step_bytes, high)
            region.copy_out(first - start, last - start, address + first - begin)
            checksum.update(_memory(address + first - begin, last - first))
    return checksum.hexdigest()


def empty(
    regions: TargetRegions, starts: Sequence[int], begin: int, end: int, address: int
) -> None:
    """Copy the bytes ``[begin, end)`` of a file from memory to its regions; there may be gaps."""
    for start, region, low, high in _parts(regions, starts, begin, end):
        region.copy_in(low - start, high - start, address + low - begin)


def _parts(
    regions: Sequence[tuple[int, _R]], starts: Sequence[int], begin: int, end: int
) -> Iterator[tuple[int, _R, int, int]]:
    for index in range(max(0, bisect_right(starts, begin) - 1), len(regions)):
        start, region = regions[index]
        if start >= end:
            return
        low, high = max(start, begin), min(start + region.nbytes, end)
        if low < high:
            yield start, region, low, high
