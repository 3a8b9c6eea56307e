"""Between tensors and files, block by block, through a few buffers of huge pages.

One thread fills a buffer, takes its checksum and hands it to the engine, and fills the next; or takes the
checksum of one that has come and empties it. Both take a fraction of the time that the device needs for
the same bytes, so the device never waits, and no more than the buffers is ever held.

[Note: few buffers]
    What is copied to a buffer is read again at once, by the checksum and by the device. All buffers
    together are therefore to fit in the caches, which is felt where the device is as fast as memory is.
    And the engine has fewer than there are, or none would be full when it has done one.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final, NamedTuple

import xxhash

from penstock.checkpoint.moves import Region
from penstock.checkpoint.threads import in_thread
from penstock.core.errors import TransferError
from penstock.core.units import MIB, round_down, round_up
from penstock.io.engine import Engine, Op, Priority, Request, Transfer
from penstock.io.files import DirectFile, read_end
from penstock.io.traffic_report import reported
from penstock.observe.clients import CHECKPOINTS
from penstock.store.arena import Arena
from penstock.store.engine import shared_engine
from penstock.store.pool import Block

BUFFERS_BYTES: Final = 16 * MIB
"""Bytes in flight at once. See [Note: few buffers]."""
_DEVICE_BYTES_PER_S: Final = 2e9
"""Memory that is made at less than this holds up a device."""
_LEAST_BUFFERS: Final = 3
_MOST_BUFFERS: Final = 64

Regions = Sequence[tuple[int, Region]]
"""Offsets in a file and the regions there; in order, without overlaps."""


def count_within(memory_bytes: int, block_bytes: int) -> int:
    """How many blocks there are at once in so much memory."""
    return min(_MOST_BUFFERS, max(_LEAST_BUFFERS, memory_bytes // block_bytes))


class Buffers:
    """Blocks of memory for one save or load at a time; made at its first use, given back by ``close``.

    Not thread-safe. Memory that is new may take ten times as long as the device takes for as many bytes:
    a virtual machine's host has to find it first. Once that was seen, blocks are made in another thread,
    one at a time, while those that there are move.
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
            block_bytes: How long a block is.
            engine: Moves them; the engine of this process if None.
            memory_bytes: What all blocks take; three at least.
        """
        self.block_bytes = block_bytes
        self.count = count_within(memory_bytes, block_bytes)
        self.engine = shared_engine() if engine is None else engine
        self._arena = Arena(self.count * block_bytes, owner="checkpoint")
        self._free: list[Block] = []
        self._made = 0
        self._is_slow = False
        self._making: Future[Block] | None = None

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self) -> Block | None:
        """A block; None if all are taken, or the next one is being made. Raises TransferError."""
        if self._making is not None and self._making.done():
            self._have_made()
        if self._free:
            return self._free.pop()
        if self._made == self.count or self._making is not None:
            return None
        self._made += 1
        if not self._is_slow:
            return self._make()
        self._making = in_thread("penstock-buffers", self._make)
        return None

    def need(self) -> Block:
        """A block, when nothing is on its way: waits for the one that is being made."""
        block = self.take()
        if block is None:
            self._have_made()
            block = self._free.pop()
        return block

    def _have_made(self) -> None:
        making, self._making = self._making, None
        assert making is not None, "who holds all blocks waits for none"
        self._free.append(making.result())

    def _make(self) -> Block:
        start = time.perf_counter()
        block = self._arena.allocate(self.block_bytes)
        assert block is not None, "an arena without a budget has room for what it was made for"
        self._is_slow = time.perf_counter() - start > self.block_bytes / _DEVICE_BYTES_PER_S
        return block

    def give(self, block: Block) -> None:
        """Its contents are not needed any more."""
        self._free.append(block)

    def move(self, op: Op, file: DirectFile, offset: int, nbytes: int, block: Block) -> Transfer:
        """Begin a transfer of the first bytes of a block; up to the next granule of the file."""
        transfer = self.engine.submit(
            Request(
                op=op,
                file=file,
                offset_bytes=offset,
                address=block.address,
                nbytes=round_up(nbytes, file.granule_bytes),
                keep_alive=block,
                priority=Priority.PREFETCH,
            )
        )
        return reported(transfer, op, CHECKPOINTS, file.path)

    def close(self) -> None:
        """Give the memory back. Nothing may be on its way."""
        if self._making is not None and self._making.exception() is None:
            self._have_made()
        for block in self._free:
            block.free()
        self._free.clear()
        self._arena.close()


def digest(address: int, nbytes: int) -> str:
    """XXH3 (128 bits) of live memory, without the interpreter's lock; some 30 GB/s."""
    return xxhash.xxh3_128_hexdigest(_memory(address, nbytes))


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)


class BlockWrites:
    """Blocks on their way to files. Not thread-safe."""

    def __init__(self, buffers: Buffers) -> None:
        """Nothing is on its way."""
        self._buffers = buffers
        self._flying: deque[tuple[Transfer, Block]] = deque()

    def room(self) -> Block:
        """A block to fill; waits for the oldest that is on its way. Raises TransferError."""
        block = self._buffers.take()
        while block is None and self._flying:
            self._land()
            block = self._buffers.take()
        return self._buffers.need() if block is None else block

    def send(self, file: DirectFile, offset: int, nbytes: int, block: Block) -> Transfer:
        """Begin to write a block; zeros fill it up to the granule of the file."""
        padding = round_up(nbytes, file.granule_bytes) - nbytes
        if padding:
            ctypes.memset(block.address + nbytes, 0, padding)
        transfer = self._buffers.move("write", file, offset, nbytes, block)
        self._flying.append((transfer, block))
        return transfer

    def give(self, block: Block) -> None:
        """It is not sent."""
        self._buffers.give(block)

    def settle(self) -> None:
        """Wait for all of it, however it ends; nothing touches the buffers then."""
        while self._flying:
            transfer, block = self._flying.popleft()
            transfer.cancel()
            wait_quietly(transfer)
            self._buffers.give(block)

    def _land(self) -> None:
        transfer, block = self._flying[0]
        transfer.wait()
        self._flying.popleft()
        self._buffers.give(block)


def fill(regions: Regions, starts: Sequence[int], begin: int, end: int, address: int) -> str:
    """Put the bytes ``[begin, end)`` of a file together; their checksum, as :func:`digest` takes it.

    Args:
        regions: What is in the file, without a gap.
        starts: Where they begin.
        begin: The first byte.
        end: Past the last.
        address: Where to.
    """
    checksum = xxhash.xxh3_128()
    for start, region, low, high in _parts(regions, starts, begin, end):
        for first in range(low, high, region.step_bytes):
            last = min(first + region.step_bytes, high)
            region.copy_out(first - start, last - start, address + first - begin)
            checksum.update(_memory(address + first - begin, last - first))
    return checksum.hexdigest()


def empty(regions: Regions, starts: Sequence[int], begin: int, end: int, address: int) -> None:
    """Hand the bytes ``[begin, end)`` of a file to what is in it; there may be gaps."""
    for start, region, low, high in _parts(regions, starts, begin, end):
        region.copy_in(low - start, high - start, address + low - begin)


def _parts(
    regions: Regions, starts: Sequence[int], begin: int, end: int
) -> Iterator[tuple[int, Region, int, int]]:
    for index in range(max(0, bisect_right(starts, begin) - 1), len(regions)):
        start, region = regions[index]
        if start >= end:
            return
        low, high = max(start, begin), min(start + region.nbytes, end)
        if low < high:
            yield start, region, low, high


class Wanted(NamedTuple):
    """A block that is to be read.

    Attributes:
        file: From where.
        offset: Where it begins.
        nbytes: How long it is.
        key: For whoever asked.
    """

    file: DirectFile
    offset: int
    nbytes: int
    key: object


def read_blocks(
    buffers: Buffers,
    wanted: Iterable[Wanted],
    use: Callable[[Wanted, int], None],
    lost: Callable[[Wanted, TransferError], None],
) -> None:
    """Read blocks ahead, and hand each over, in order, with its address.

    Args:
        buffers: For blocks on their way.
        wanted: Which.
        use: Is given each.
        lost: Is given the first that could not be read, and why, and may raise another error.

    Raises:
        TransferError: One could not be read. What ``use`` and ``lost`` raise goes through. Nothing is
            under way then.
    """
    flying: deque[tuple[Wanted, Transfer | None, Block]] = deque()
    coming = iter(wanted)
    try:
        while True:
            while (block := buffers.take()) is not None:
                each = next(coming, None)
                if each is None:
                    buffers.give(block)
                    break
                flying.append((each, _begin(buffers, each, block), block))
            if not flying:
                return
            each, transfer, block = flying[0]
            try:
                _complete(each, transfer, block)
            except TransferError as error:
                lost(each, error)
                raise
            use(each, block.address)
            flying.popleft()
            buffers.give(block)
    finally:
        for _, transfer, block in flying:
            if transfer is not None:
                transfer.cancel()
                wait_quietly(transfer)
            buffers.give(block)


def _begin(buffers: Buffers, each: Wanted, block: Block) -> Transfer | None:
    granules = round_down(each.nbytes, each.file.granule_bytes)
    if not granules:
        return None
    return buffers.move("read", each.file, each.offset, granules, block)


def _complete(each: Wanted, transfer: Transfer | None, block: Block) -> None:
    if transfer is not None:
        transfer.wait()
    granules = round_down(each.nbytes, each.file.granule_bytes)
    if granules < each.nbytes:
        address = block.address + granules
        read_end(each.file, each.offset + granules, address, each.nbytes - granules)


def wait_quietly(transfer: Transfer) -> None:
    """Wait, whatever comes of it."""
    with suppress(Exception):
        transfer.wait()
