"""A write cache that starts to write pages to flash at the moment in which they come, like MQSim's.

Pages that were not written within the last second are sent to flash at once, with all such pages of a
request, so that pages of several planes go in one command; the memory takes the request's bytes
meanwhile, and is not read for them. Pages that are written again stay until their places are needed.
Clean pages do not stay. If too much is being written to flash, requests wait, each with its remaining
pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from penstock.lab.ssd.cache import Cache, CacheLine, WriteBack
from penstock.lab.ssd.cells import SECTOR_BYTES
from penstock.lab.ssd.commands import CommandOwner
from penstock.lab.ssd.device import PS_PER_S, Device
from penstock.lab.ssd.events import Events
from penstock.lab.ssd.ftl import Ftl
from penstock.lab.ssd.pages import PageController
from penstock.lab.ssd.requests import HostRequest

_FORGET_PS: Final = PS_PER_S
"""Interval after which all recent writes are forgotten at once, as by MQSim."""


class Destaging(Cache):
    """The cache of one drive."""

    def __init__(self, device: Device, events: Events, ftl: Ftl, pages: PageController) -> None:
        """Create an empty cache. Raises ConfigError if the capacity is less than a page."""
        super().__init__(device, events, ftl, pages)
        self._most_sectors = device.cache.flush_pages * (self._page_bytes // SECTOR_BYTES)
        self._sectors = 0  # being written
        self._evicted: set[CacheLine] = set()  # being written, and without a place
        self._met: set[int] = set()
        self._forget_ps = 0

    @property
    def dirty_pages(self) -> int:
        """Number of dirty pages; one that is written again while it goes to flash counts twice."""
        return len(self._dirty) + self._on_the_way

    def write(self, request: HostRequest) -> None:
        """Take the data of a request, which completes when everything is in memory."""
        parts = list(self._parts(request))
        request.left = len(parts)
        self._waiting += ((request, part) for part in parts)
        self._take_waiting()

    def _take_waiting(self) -> None:
        while self._waiting and self._take(self._waiting[0][0]):
            pass
        self._most_dirty = max(self._most_dirty, self.dirty_pages)
        self._write_back()

    def _take(self, request: HostRequest) -> bool:
        """Take pages of the first waiting request; return True if there was room for any."""
        evicted: list[CacheLine] = []
        new: list[CacheLine] = []
        taken = nbytes = 0
        while self._waiting and self._waiting[0][0] is request:
            if self._sectors >= self._most_sectors:
                break
            lpn, size, sectors = self._waiting[0][1]
            if lpn not in self._lines and len(self._lines) >= self._places:
                old = self._evict()
                if old is None:
                    break
                evicted.append(old)
                self._sectors += old.known.bit_count()
            self._waiting.popleft()
            taken, nbytes = taken + 1, nbytes + size
            line = self._place(lpn, request.stream)
            assert line is not None  # a place was freed for it
            line.known |= sectors
            line.dirty |= sectors
            self._dirty.pop(lpn, None)
            if lpn in self._met or line.flushing:
                self._dirty[lpn] = line
            else:
                self._met.add(lpn)
                new.append(line)
                self._sectors += line.known.bit_count()
        if not taken:
            return False
        if evicted:
            self._evicted.update(evicted)
            backs = self._backs(evicted)
            leaving = CommandOwner(is_read=False, stream=0)
            leaving.left = 1
            leaving.done = lambda _: self._start(backs)
            self._transfer(sum(back.sectors for back in backs) * SECTOR_BYTES, (leaving,))
        request.left += 1 - taken
        self._transfer(nbytes, (request,))
        if new:
            self._start(self._backs(new))
        if self._events.now_ps > self._forget_ps:
            self._met.clear()
            self._forget_ps = self._events.now_ps + _FORGET_PS
        return True

    def _evict(self) -> CacheLine | None:
        """Free the place of the page that was written longest ago; None if all are being written."""
        old = next((line for line in self._dirty.values() if not line.flushing), None)
        if old is not None:
            del self._dirty[old.lpn], self._lines[old.lpn]
        return old

    def _backs(self, lines: list[CacheLine]) -> list[WriteBack]:
        """Group pages to write: each alone, because it frees its own place; super-pages together."""
        groups: dict[int, list[CacheLine]] = {}
        rows = self._ftl.superpages
        for line in lines:
            key = line.lpn
            if rows is not None and key < rows.pages:
                key -= key % rows.width
            groups.setdefault(key, []).append(line)
            line.flushing = True
        self._on_the_way += len(lines)
        backs = [WriteBack(each) for each in groups.values()]
        for back in backs:
            back.sectors = sum(line.known.bit_count() for line in back.lines)
        return backs

    def _start(self, backs: list[WriteBack]) -> None:
        self._pages.serve_together([(back, self._start_flush(back)) for back in backs])

    def _due(self) -> bool:
        return self._flushes > 0 or self._ending

    def _all(self) -> Iterable[CacheLine]:
        return [*self._lines.values(), *self._evicted]

    def _keep(self, line: CacheLine) -> None:
        if line in self._evicted:
            self._evicted.remove(line)
        else:
            del self._lines[line.lpn]

    def _written(self, back: CommandOwner) -> None:
        assert isinstance(back, WriteBack)  # the only kind of owner with this callback
        self._sectors -= back.sectors
        super()._written(back)


def cache_of(device: Device, events: Events, ftl: Ftl, pages: PageController) -> Cache | None:
    """Create the cache of a device by its settings; None without a capacity."""
    if not device.cache.capacity_bytes:
        return None
    kind = Destaging if device.cache.at_once else Cache
    return kind(device, events, ftl, pages)
