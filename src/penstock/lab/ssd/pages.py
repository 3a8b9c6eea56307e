"""Translation of page accesses to operations of flash: reads in advance, waiting writes, cleaning.

1. If the map is not all in the controller's memory, the entry of a page is loaded first
   (:mod:`.mapping`).
2. A page that is read has its place; one that was never written gets one, unprogrammed.
3. A page that is written gets a new place at once. If it is written in part, the rest of it is read
   first, and the program waits for that, at the place in its queue that it had at the request.
4. A plane without erased blocks takes no writes of the host until one has been erased
   (:mod:`.cleaning`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from penstock.lab.ssd.blocks import FlashBlock
from penstock.lab.ssd.cells import SECTOR_BYTES
from penstock.lab.ssd.cleaning import Cleaner
from penstock.lab.ssd.commands import USER_PROGRAM, USER_READ, CommandOwner, Op
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.flash import Flash
from penstock.lab.ssd.ftl import Ftl
from penstock.lab.ssd.mapping import CachedMap

Part = tuple[int, int, int]
"""(logical page, bytes of it, bit mask of its sectors: 0 for all, or if sectors are not tracked)."""


@dataclass(slots=True)
class _RowWrite:
    """A super-page that is written; its programs wait for reads of its other data."""

    owner: CommandOwner
    wanted: frozenset[int]
    """Pages that its owner writes."""
    programs: list[Op]
    reads_left: int


class PageController:
    """The controller between requests and flash.

    Attributes:
        cleaner: Garbage collection, and the writes that wait for it.
        map: The map on flash; None if all of it is in memory.
    """

    def __init__(self, device: Device, ftl: Ftl, flash: Flash) -> None:
        self._ftl, self._flash = ftl, flash
        self._page_bytes = device.geometry.page_bytes
        self._spare = device.geometry.spare_bytes if device.channel.send_spare else 0
        self._sector_map = device.ftl.sector_map
        self._last = ftl.pages_per_block - 1
        self._every_sector = (1 << self._page_bytes // SECTOR_BYTES) - 1
        self.cleaner = Cleaner(device, ftl, flash)
        self.map = CachedMap.of(device, ftl, flash, self.cleaner)
        self.cleaner.map = self.map
        self._first_single = ftl.superpages.pages if ftl.superpages is not None else 0
        self._when_done = self._done

    def serve(self, owner: CommandOwner, begin: int, end: int) -> None:
        """Read or write bytes of the drive; ``owner.left`` counts their pages.

        All operations are known at the same time, so those of one die are combined where possible.
        """
        size = self._page_bytes
        first, last = begin // size, (end - 1) // size
        owner.left += last - first + 1
        if self.map is not None or (first < self._first_single and not owner.is_read):
            ops: list[Op] = []
            self._enter(owner, self._parts(begin, end), ops)
            self._flash.submit(ops)
            return
        ops = []
        act = self._read if owner.is_read else self._write
        if first == last:
            act(owner, (first, end - begin, self._sectors(begin, end)), ops)
        else:
            middle = (first + 1) * size
            act(owner, (first, middle - begin, self._sectors(begin, middle)), ops)
            for lpn in range(first + 1, last):
                act(owner, (lpn, size, 0), ops)
            act(owner, (last, end - last * size, self._sectors(last * size, end)), ops)
        self._flash.submit(ops)

    def serve_parts(self, owner: CommandOwner, parts: Iterable[Part]) -> None:
        """Read or write pages that need not be consecutive."""
        self.serve_together([(owner, list(parts))])

    def serve_together(self, wanted: list[tuple[CommandOwner, list[Part]]]) -> None:
        """Read or write pages of several owners, all of whose operations are known at the same time."""
        ops: list[Op] = []
        for owner, parts in wanted:
            owner.left += len(parts)
            self._enter(owner, parts, ops)
        self._flash.submit(ops)

    def _parts(self, begin: int, end: int) -> Iterable[Part]:
        size = self._page_bytes
        for lpn in range(begin // size, (end - 1) // size + 1):
            low, high = max(begin, lpn * size), min(end, (lpn + 1) * size)
            yield lpn, high - low, self._sectors(low, high)

    def _sectors(self, low: int, high: int) -> int:
        """Return the bit mask of a page's sectors in a range of the drive's bytes."""
        nbytes = high - low
        if nbytes == self._page_bytes or not self._sector_map:
            return 0
        return ((1 << nbytes // SECTOR_BYTES) - 1) << low % self._page_bytes // SECTOR_BYTES

    def _enter(self, owner: CommandOwner, parts: Iterable[Part], ops: list[Op]) -> None:
        """Load map entries where the map is not all in memory; super-pages go by their number."""
        rows: dict[int, list[Part]] = {}
        width = self._ftl.superpages.width if self._ftl.superpages is not None else 1
        for part in parts:
            if owner.is_read:
                self._by_map(part[0], self._read, (owner, part), ops)
            elif part[0] < self._first_single:
                rows.setdefault(part[0] // width, []).append(part)
            else:
                self._by_map(part[0], self._write, (owner, part), ops)
        for number, its in rows.items():
            self._by_map(number * width, self._write_row, (owner, number, its), ops)

    def _by_map(
        self, lpn: int, act: Callable[..., None], about: tuple[Any, ...], ops: list[Op]
    ) -> None:
        dirty = act != self._read
        if self.map is None or self.map.hit(lpn, dirty=dirty):
            act(*about, ops)
        else:
            self.map.load(lpn, dirty=dirty, act=act, about=about, ops=ops)

    def _read(self, owner: CommandOwner, part: Part, ops: list[Op]) -> None:
        lpn, nbytes, sectors = part
        place = self._ftl.find(lpn)
        if place is None:
            place = self._ftl.adopt(lpn, stream=owner.stream)
            if sectors and self._sector_map:
                self._ftl.partial[lpn] = sectors
        block, page = place
        block.pending += 1
        ops.append(Op(USER_READ, block, page, lpn, nbytes + self._spare, owner, self._when_done))

    def _write(self, owner: CommandOwner, part: Part, ops: list[Op]) -> None:
        """Place and program a page, after a read of its remaining data; or let it wait for room."""
        ftl, (lpn, nbytes, sectors) = self._ftl, part
        plane = ftl.plane_of(lpn)
        if ftl.planes[plane].free < ftl.least:
            self.cleaner.wait(plane, self._write, (owner, part), ops)
            return
        rest = 0
        if nbytes < self._page_bytes:
            rest, nbytes = self._kept(lpn, nbytes, sectors)
        elif ftl.partial:
            ftl.partial.pop(lpn, None)
        read: Op | None = None
        if rest:
            read = self._reading(lpn, rest)
        block, page = ftl.place(lpn, stream=owner.stream)
        block.pending += 1
        op = Op(USER_PROGRAM, block, page, lpn, nbytes + self._spare, owner, self._when_done)
        if read is None:
            ops.append(op)
        else:
            read.owner, read.done = op, self._rest_read
            ops.append(read)
            for each in (*ops, op):  # it is queued after the pages before it
                each.order = each.order or self._flash.next_order()
        if not ftl.gc_when_filled or page == self._last:
            self.cleaner.clean(plane, ops)

    def _kept(self, lpn: int, nbytes: int, sectors: int) -> tuple[int, int]:
        """Return (bytes to read, bytes to send) of a page of which ``nbytes`` are written."""
        ftl = self._ftl
        written = ftl.find(lpn) is not None
        if not self._sector_map:
            return (self._page_bytes - nbytes, self._page_bytes) if written else (0, nbytes)
        had = ftl.partial.get(lpn, self._every_sector) if written else 0
        if had | sectors == self._every_sector:
            ftl.partial.pop(lpn, None)
        else:
            ftl.partial[lpn] = had | sectors
        return (had & ~sectors).bit_count() * SECTOR_BYTES, nbytes

    def _reading(self, lpn: int, nbytes: int) -> Op:
        """Return the read of a page's remaining data at its old place."""
        place = self._ftl.find(lpn)
        assert place is not None  # otherwise no data would remain
        block, page = place
        block.pending += 1
        return Op(USER_READ, block, page, lpn, nbytes + self._spare, None, self._when_done)

    def _write_row(
        self, owner: CommandOwner, number: int, parts: list[Part], ops: list[Op]
    ) -> None:
        """Write a whole super-page, even if only a part of it is written."""
        superpages = self._ftl.superpages
        assert superpages is not None  # otherwise there are no super-page numbers
        planes = superpages.planes_of(number)
        for plane in planes:
            if self._ftl.stopped(plane):
                self.cleaner.wait(plane, self._write_row, (owner, number, parts), ops)
                return
        written = {lpn: nbytes for lpn, nbytes, _ in parts}
        first = number * superpages.width
        lpns = range(first, first + superpages.width)
        reads: list[Op] = []
        if superpages.find(first) is not None:
            left = ((lpn, self._page_bytes - written.get(lpn, 0)) for lpn in lpns)
            reads = [self._reading(lpn, rest) for lpn, rest in left if rest]
        row, page = self._ftl.place_row(number, stream=owner.stream, wanted=len(written))
        whole = self._page_bytes + self._spare
        write = _RowWrite(owner, frozenset(written), [], len(reads))
        for lpn, block in zip(lpns, row, strict=True):
            block.pending += 1
            write.programs.append(
                Op(USER_PROGRAM, block, page, lpn, whole, write, self._row_programmed)
            )
        if reads:
            for read in reads:
                read.owner, read.done = write, self._row_read
            for op in write.programs:
                op.order = self._flash.next_order()
        ops += reads or write.programs
        for plane in planes:
            self.cleaner.clean(plane, ops)

    # -- events -------------------------------------------------------------------------------------

    def _done(self, op: Op) -> None:
        """Count a finished page of an owner."""
        block, owner = op.block, op.owner
        block.pending -= 1
        if not block.pending and self.cleaner.busy:
            self.cleaner.host_finished(block)
        owner.left -= 1
        if not owner.left:
            owner.done(owner)

    def _rest_read(self, op: Op) -> None:
        """Program a page after the read of its remaining data."""
        self._flash.submit((op.owner,))
        self._free(op.block)

    def _row_read(self, op: Op) -> None:
        write: _RowWrite = op.owner
        write.reads_left -= 1
        if not write.reads_left:
            self._flash.submit(write.programs)
        self._free(op.block)

    def _row_programmed(self, op: Op) -> None:
        write: _RowWrite = op.owner
        self._free(op.block)
        if op.lpn in write.wanted:
            owner = write.owner
            owner.left -= 1
            if not owner.left:
                owner.done(owner)

    def _free(self, block: FlashBlock) -> None:
        block.pending -= 1
        if not block.pending and self.cleaner.busy:
            self.cleaner.host_finished(block)
