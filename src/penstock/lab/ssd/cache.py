"""The write cache: controller memory that completes writes before they are on flash.

A page is kept with its known sectors. A write completes when the memory has taken its bytes and each of
its pages has a place; if all places hold dirty pages, it waits until one has been written. A read takes
what the cache has and the rest from flash, and leaves nothing behind: there is no read cache.

Write-back begins when dirty pages exceed ``flush_from`` of all places, and ends when they are
``flush_to`` of them; the page written longest ago goes first, together with the dirty pages of its
super-page. A clean page stays for reads until its place is needed; then the one used longest ago is
evicted. The memory carries one transfer at a time, including those to flash.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import SECTOR_BYTES
from penstock.lab.ssd.commands import CommandOwner
from penstock.lab.ssd.device import PS_PER_NS, Device, duration_ps
from penstock.lab.ssd.events import Events
from penstock.lab.ssd.ftl import Ftl
from penstock.lab.ssd.pages import PageController, Part
from penstock.lab.ssd.requests import HostRequest

_COUNTS: Final = ("read_hits", "read_misses", "write_hits", "write_misses", "flushed")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Counts of a cache, in pages."""

    read_hits: int
    """Pages found whole."""
    read_misses: int
    write_hits: int
    """Pages written again before they were evicted."""
    write_misses: int
    flushed: int
    """Pages written to flash."""
    most_dirty_bytes: int
    """Most dirty bytes at any time: a loss of power would have lost them, or capacitors saved them."""
    dirty_bytes: int
    """Dirty bytes at the end."""


class CacheLine:
    """A page in the cache.

    Attributes:
        known: Bit mask of the sectors that are there; dirty: of those that flash lacks.
        flushing: True while the page is being written to flash.
        waiters: Flushes of the host that wait for the page.
    """

    __slots__ = ("dirty", "flushing", "known", "lpn", "stream", "waiters")

    def __init__(self, lpn: int, stream: int) -> None:
        self.lpn = lpn
        self.stream = stream
        self.known = self.dirty = 0
        self.flushing = False
        self.waiters: list[CommandOwner] = []


class WriteBack(CommandOwner):
    """Pages that are being written to flash.

    Attributes:
        lines: The pages.
        sectors: Sectors that count against the limit of those in flight, if sectors do.
    """

    __slots__ = ("lines", "sectors")

    def __init__(self, lines: list[CacheLine]) -> None:
        super().__init__(is_read=False, stream=lines[0].stream)
        self.lines = lines
        self.sectors = 0


class Cache:
    """The cache of one drive.

    Attributes:
        moved_bytes: Bytes moved in and out of its memory, since the drive was new.
    """

    def __init__(self, device: Device, events: Events, ftl: Ftl, pages: PageController) -> None:
        """Create an empty cache.

        Raises:
            ConfigError: The capacity is less than a page.
        """
        settings = device.cache
        self._events, self._ftl, self._pages = events, ftl, pages
        self._page_bytes = device.geometry.page_bytes
        self._places = settings.capacity_bytes // self._page_bytes
        if not self._places:
            raise ConfigError(
                f"cache.capacity_bytes is {settings.capacity_bytes}, less than one page of"
                f" {self._page_bytes}"
            )
        self._protected = settings.protected
        self._from, self._to = (
            int(share * self._places) for share in (settings.flush_from, settings.flush_to)
        )
        self._most_flushing = settings.flush_pages
        self._rate, self._access_ps = settings.bytes_per_s, settings.access_ns * PS_PER_NS
        self._free_ps = 0
        self._whole = (1 << self._page_bytes // SECTOR_BYTES) - 1
        self._lines: dict[int, CacheLine] = {}
        self._clean: OrderedDict[int, CacheLine] = OrderedDict()  # by last use
        self._dirty: OrderedDict[int, CacheLine] = (
            OrderedDict()
        )  # by their last write, unless on the way
        self._waiting: deque[tuple[HostRequest, Part]] = deque()
        self._on_the_way = self._flushes = 0
        self._draining = self._ending = False
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._most_dirty = 0
        self.moved_bytes = 0

    @property
    def dirty_pages(self) -> int:
        """Number of dirty pages."""
        return min(len(self._dirty) + self._on_the_way, len(self._lines))

    def use(self) -> CacheUse:
        """Return the counts since the drive was new, or since they were reset."""
        size = self._page_bytes
        return CacheUse(
            **self._counts,
            most_dirty_bytes=self._most_dirty * size,
            dirty_bytes=self.dirty_pages * size,
        )

    def reset_counts(self) -> None:
        """Reset the counts."""
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._most_dirty = self.dirty_pages

    def write(self, request: HostRequest) -> None:
        """Take the data of a request, which completes when everything is in memory."""
        parts = list(self._parts(request))
        request.left = len(parts) + 1
        self._transfer(request.nbytes, (request,))
        for part in parts:
            self._waiting.append((request, part))
        self._take_waiting()

    def read(self, request: HostRequest) -> None:
        """Serve what the cache has, and read the rest from flash."""
        misses: list[Part] = []
        found = 0
        for lpn, nbytes, sectors in self._parts(request):
            line = self._lines.get(lpn)
            there = 0 if line is None else line.known & sectors
            if line is not None and there:
                found += there.bit_count()
                if lpn in self._clean:
                    self._clean.move_to_end(lpn)
            self._counts["read_hits" if there == sectors else "read_misses"] += 1
            if there != sectors:
                left = sectors & ~there
                rest = nbytes - there.bit_count() * SECTOR_BYTES
                misses.append((lpn, rest, 0 if left == self._whole else left))
        if found:
            request.left += 1
            self._transfer(found * SECTOR_BYTES, (request,))
        if misses:
            self._pages.serve_parts(request, misses)

    def flush(self, owner: CommandOwner) -> None:
        """Call ``owner.done`` when flash has all that is dirty now, or capacitors protect it."""
        lines = () if self._protected else self._all()
        held = [line for line in lines if line.dirty or line.flushing]
        owner.left += 1 + len(held)
        for line in held:
            line.waiters.append(owner)
        self._flushes += len(held)
        count_down(owner)
        self._write_back()

    def drain(self) -> None:
        """Write everything to flash, as capacitors do after a loss of power."""
        self._ending = True
        self._write_back()

    def _all(self) -> Iterable[CacheLine]:
        """Return all pages that flash may lack, and possibly more."""
        return self._lines.values()

    def _parts(self, request: HostRequest) -> Iterable[Part]:
        size, begin = self._page_bytes, request.offset_bytes
        end = begin + request.nbytes
        for lpn in range(begin // size, (end - 1) // size + 1):
            low, high = max(begin, lpn * size), min(end, (lpn + 1) * size)
            sectors = (1 << -(-(high - low) // SECTOR_BYTES)) - 1
            yield lpn, high - low, sectors << low % size // SECTOR_BYTES

    def _transfer(self, nbytes: int, owners: tuple[CommandOwner, ...]) -> None:
        """Occupy the memory after all earlier transfers; then count down each owner."""
        self.moved_bytes += nbytes
        begin = max(self._free_ps, self._events.now_ps)
        self._free_ps = begin + self._access_ps + duration_ps(nbytes, self._rate)
        self._events.at(self._free_ps, _count_down_all, owners)

    # -- places ---------------------------------------------------------------------------------------

    def _take_waiting(self) -> None:
        """Give places to waiting pages in turn; then write back where that is due."""
        while self._waiting:
            request, (lpn, _, sectors) = self._waiting[0]
            line = self._place(lpn, request.stream)
            if line is None:
                break
            self._waiting.popleft()
            line.known |= sectors
            line.dirty |= sectors
            self._clean.pop(lpn, None)
            self._dirty[lpn] = line
            self._dirty.move_to_end(lpn)
            count_down(request)
        self._most_dirty = max(self._most_dirty, self.dirty_pages)
        self._write_back()

    def _place(self, lpn: int, stream: int) -> CacheLine | None:
        """Return the line of a page, or a new one; None if every place is dirty."""
        line = self._lines.get(lpn)
        if line is not None:
            self._counts["write_hits"] += 1
            line.stream = stream
            return line
        if len(self._lines) >= self._places:
            if not self._clean:
                return None
            old, _ = self._clean.popitem(last=False)
            del self._lines[old]
        self._counts["write_misses"] += 1
        line = self._lines[lpn] = CacheLine(lpn, stream)
        return line

    # -- to flash -------------------------------------------------------------------------------------

    def _write_back(self) -> None:
        """Write pages to flash while that is due, up to the limit in flight."""
        while self._dirty and self._on_the_way < self._most_flushing and self._due():
            line = next((one for one in self._dirty.values() if not one.flushing), None)
            if line is None:
                return  # all are being written already, and were written again meanwhile
            lines = [line, *self._superpage_mates(line)]
            back = WriteBack(lines)
            back.left = 1
            back.done = self._leave
            nbytes = 0
            for each in lines:
                del self._dirty[each.lpn]
                each.flushing = True
                nbytes += each.known.bit_count() * SECTOR_BYTES
            self._on_the_way += len(lines)
            self._transfer(nbytes, (back,))

    def _due(self) -> bool:
        if self._flushes or self._waiting or self._ending:
            return True
        if len(self._dirty) > self._from:
            self._draining = True
        elif len(self._dirty) <= self._to:
            self._draining = False
        return self._draining

    def _superpage_mates(self, line: CacheLine) -> list[CacheLine]:
        """Return the other dirty pages of its super-page."""
        superpages = self._ftl.superpages
        if superpages is None or line.lpn >= superpages.pages:
            return []
        first = line.lpn - line.lpn % superpages.width
        others = (self._dirty.get(lpn) for lpn in range(first, first + superpages.width))
        return [one for one in others if one is not None and one is not line and not one.flushing]

    def _leave(self, back: CommandOwner) -> None:
        """Hand pages that have left the memory to flash."""
        assert isinstance(back, WriteBack)  # the only kind of owner with this callback
        self._pages.serve_parts(back, self._start_flush(back))

    def _start_flush(self, back: WriteBack) -> list[Part]:
        """Return the parts that flash is to write."""
        back.done = self._written
        parts: list[Part] = []
        for line in back.lines:
            # sectors that are known need not be read from flash, even if flash has them
            whole = line.known == self._whole
            parts.append(
                (line.lpn, line.known.bit_count() * SECTOR_BYTES, 0 if whole else line.known)
            )
            if self._dirty.get(line.lpn) is not line:
                line.dirty = 0
        self._counts["flushed"] += len(parts)
        return parts

    def _keep(self, line: CacheLine) -> None:
        """Keep a line that flash has in full, for reads."""
        self._clean[line.lpn] = line

    def _written(self, back: CommandOwner) -> None:
        assert isinstance(back, WriteBack)  # the only kind of owner with this callback
        self._on_the_way -= len(back.lines)
        for line in back.lines:
            line.flushing = False
            if self._dirty.get(line.lpn) is line:
                continue  # written again meanwhile
            self._keep(line)
            waiters, line.waiters = line.waiters, []
            self._flushes -= len(waiters)
            for owner in waiters:
                count_down(owner)
        self._take_waiting()


def count_down(owner: CommandOwner) -> None:
    """Count one finished part of an owner; call ``done`` after the last."""
    owner.left -= 1
    if not owner.left:
        owner.done(owner)


def _count_down_all(owners: tuple[CommandOwner, ...]) -> None:
    for owner in owners:
        count_down(owner)
