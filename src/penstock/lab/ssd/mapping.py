"""A map on flash, with the entries used last in the controller's memory.

This follows DFTL (Gupta, Kim and Urgaonkar, ASPLOS 2009), in MQSim's version. An entry that is not in
memory is read with its page of the map; the page or super-page that needs it waits meanwhile. A changed
entry is written back when it is evicted: its page of the map is read, updated with all changes in memory,
and programmed elsewhere. Garbage collection changes the entries of moved pages as well; those that are
not in memory are written once for each block that is cleaned. The places of the map's pages are always
in memory. A page of the map that was never written is not read: its first entries are created in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from penstock.lab.ssd.cleaning import Cleaner
from penstock.lab.ssd.commands import GC_PROGRAM, GC_READ, MAP_PROGRAM, MAP_READ, Op
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.flash import Flash
from penstock.lab.ssd.ftl import Ftl

_Waiter = tuple[int, bool, Callable[..., None], tuple[Any, ...]]
"""(entry, True if it changes, callback, its arguments)."""


class CachedMap:
    """The map of one drive.

    Attributes:
        entries: Entries of the whole map.
        hits: Entries found in memory; misses: not found.
        reads: Pages of the map that were read; writes: programmed.
    """

    def __init__(self, device: Device, ftl: Ftl, flash: Flash, cleaner: Cleaner) -> None:
        """Start with no entry in memory."""
        settings, page_bytes = device.ftl, device.geometry.page_bytes
        self._ftl, self._flash, self._cleaner = ftl, flash, cleaner
        # where garbage collection waits for the host, operations that the host needs must not wait
        own = settings.gc_preemptible
        self._queues = (MAP_READ, MAP_PROGRAM) if own else (GC_READ, GC_PROGRAM)
        self._places = settings.map_cache_bytes // settings.map_entry_bytes
        self._per_page = ftl.map_entries_per_page
        self._whole = page_bytes + device.geometry.spare_bytes * device.channel.send_spare
        self._miss_bytes = settings.map_read_bytes or self._whole
        self.entries = ftl.map_entry(ftl.user_pages - 1) + 1
        self._there: OrderedDict[int, bool] = OrderedDict()  # by last use; True if it has changed
        self._changed: dict[int, set[int]] = {}  # by page of the map
        self._loading: dict[int, list[_Waiter]] = {}
        self._updating: set[int] = set()  # pages that will be reprogrammed
        self.hits = self.misses = self.reads = self.writes = 0

    @classmethod
    def of(cls, device: Device, ftl: Ftl, flash: Flash, cleaner: Cleaner) -> CachedMap | None:
        """Create the map by the device's settings; None if all of it is in memory."""
        return cls(device, ftl, flash, cleaner) if device.ftl.map_cache_bytes else None

    def page_of(self, lpn: int) -> int:
        """Return the number of the map page with the entry of a logical page."""
        return self._ftl.map_entry(lpn) // self._per_page

    def hit(self, lpn: int, *, dirty: bool) -> bool:
        """Use an entry, and change it if ``dirty``; return True if it is in memory."""
        entry = self._ftl.map_entry(lpn)
        if entry not in self._there:
            self.misses += 1
            return False
        self.hits += 1
        self._use(entry, dirty)
        return True

    def load(
        self,
        lpn: int,
        *,
        dirty: bool,
        act: Callable[..., None],
        about: tuple[Any, ...],
        ops: list[Op],
    ) -> None:
        """Call ``act(*about, ops)`` when the entry is in memory; now, if flash lacks its page."""
        entry = self._ftl.map_entry(lpn)
        number = entry // self._per_page
        if number in self._loading:
            self._loading[number].append((entry, dirty, act, about))
            return
        read = self._reading(number, self._miss_bytes, self._loaded)
        if read is None:
            self._insert(entry, dirty, ops)
            act(*about, ops)
            return
        self._loading[number] = [(entry, dirty, act, about)]
        ops.append(read)

    def moved(self, lpn: int) -> bool:
        """Note that garbage collection moves a page; return True if the entry is in memory."""
        if lpn >= self._ftl.map_begin:
            return True  # the places of the map itself are always in memory
        entry = self._ftl.map_entry(lpn)
        if entry not in self._there:
            return False
        self._change(entry)
        return True

    def update(self, number: int, ops: list[Op]) -> None:
        """Reprogram a page of the map, with all its changes in memory."""
        for entry in self._changed.pop(number, ()):
            self._there[entry] = False
        if number in self._updating:
            return  # it will be programmed anyway, with these changes
        self._updating.add(number)
        read = self._reading(number, self._whole, self._read_for_update)
        if read is None:
            self._program(number, ops)
        else:
            ops.append(read)

    def reset_counts(self) -> None:
        """Reset the counts."""
        self.hits = self.misses = self.reads = self.writes = 0

    def _use(self, entry: int, dirty: bool) -> None:
        self._there.move_to_end(entry)
        if dirty:
            self._change(entry)

    def _change(self, entry: int) -> None:
        self._there[entry] = True
        self._changed.setdefault(entry // self._per_page, set()).add(entry)

    def _insert(self, entry: int, dirty: bool, ops: list[Op]) -> None:
        if entry in self._there:
            self._use(entry, dirty)
            return
        while len(self._there) >= self._places:
            old, changed = self._there.popitem(last=False)
            if changed:
                number = old // self._per_page
                self._changed[number].discard(old)
                self.update(number, ops)
        self._there[entry] = False
        if dirty:
            self._change(entry)

    def _reading(self, number: int, nbytes: int, done: Callable[[Op], None]) -> Op | None:
        lpn = self._ftl.map_begin + number
        place = self._ftl.find(lpn)
        if place is None:
            return None
        block, page = place
        block.pending += 1
        self.reads += 1
        return Op(self._queues[0], block, page, lpn, nbytes, number, done)

    def _program(self, number: int, ops: list[Op]) -> None:
        lpn = self._ftl.map_begin + number
        plane = self._ftl.plane_of(lpn)
        if self._ftl.stopped(plane):
            self._cleaner.wait(plane, self._program, (number,), ops)
            return
        self._updating.discard(number)
        block, page = self._ftl.place(lpn)
        block.pending += 1
        self.writes += 1
        ops.append(
            Op(self._queues[1], block, page, lpn, self._whole, number, self._left_alone),
        )
        self._cleaner.clean(plane, ops)

    # -- events -------------------------------------------------------------------------------------

    def _loaded(self, op: Op) -> None:
        self._left_alone(op)
        ops: list[Op] = []
        for entry, dirty, act, about in self._loading.pop(op.owner):
            self._insert(entry, dirty, ops)
            act(*about, ops)
        self._flash.submit(ops)

    def _read_for_update(self, op: Op) -> None:
        self._left_alone(op)
        ops: list[Op] = []
        self._program(op.owner, ops)
        self._flash.submit(ops)

    def _left_alone(self, op: Op) -> None:
        op.block.pending -= 1
        if not op.block.pending and self._cleaner.busy:
            self._cleaner.host_finished(op.block)
