"""The flash translation layer: the map from logical pages to flash, and the choice of blocks to clean.

A page map. The plane of a logical page follows from its number (static allocation): consecutive pages go
round the channels, chips, dies and planes in the order of ``ftl.allocation``; within its plane it goes to
the block that is being filled, the *frontier*. There is one frontier for each stream of the host, one for
pages of each stream that garbage collection moves, and one for the map itself, if that is on flash.
Nothing here takes time: the drive decides here, then flash works.

A part of the addresses may be mapped by super-pages: see :mod:`.superpages`.
"""

from __future__ import annotations

import random

from penstock.core.errors import ConfigError
from penstock.lab.ssd.allocation import plane_order
from penstock.lab.ssd.blocks import EMPTY, FlashBlock, Plane, erases
from penstock.lab.ssd.control import Victim
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.superpages import Superpages


class Ftl:
    """The map and the blocks of one drive.

    Attributes:
        user_writes: Pages placed for the host.
        moves: Pages placed by garbage collection, to complete a super-page, or of the map itself.
        partial: For pages with unwritten sectors, the bit mask of the written ones.
        superpages: The part of the addresses that is mapped by super-pages, or None.
        gc_when_filled: The device's setting.
        pages_per_block: Pages of every block.
        map_begin: First logical page of the map itself, after those of the host.
        map_entries_per_page: Entries in a page of the map on flash; 0 if all of the map is in memory.
    """

    def __init__(self, device: Device, *, seed: int = 1) -> None:
        """Create an empty drive; ``seed`` is for victims that are chosen at random."""
        geometry, settings = device.geometry, device.ftl
        self.pages_per_block = geometry.pages_per_block
        self._where: dict[int, tuple[FlashBlock, int]] = {}
        self._order = plane_order(geometry, settings.allocation)
        self._count = len(self._order)
        self._streams = settings.streams
        self.planes = [
            Plane(
                index,
                geometry,
                frontiers=2 * settings.streams + 1,
                least_worn_first=settings.least_worn_first,
            )
            for index in range(geometry.planes)
        ]
        self.gc_when_filled = settings.gc_when_filled
        if self.gc_when_filled:
            for plane in self.planes:
                for number in range(len(plane.frontiers)):
                    plane.frontiers[number] = plane.open(number % settings.streams)
        self._gap = settings.wear_gap
        self.user_pages = self.map_begin = device.user_pages
        if settings.map_stored:  # then the pages of the map begin on the first plane
            self.map_begin = -(-self.user_pages // self._count) * self._count
        blocks = geometry.blocks_per_plane
        self.threshold = max(int(settings.gc_threshold * blocks), settings.gc_least_blocks)
        self.least = settings.gc_least_blocks
        self._hard = max(1, int(settings.gc_hard_threshold * blocks))
        self._victims = settings.gc_victims
        self._policy = settings.victim
        self._random = random.Random(seed)
        self._few = max(2, blocks.bit_length() - 1)  # as in MQSim: log2 of the blocks
        self._closed = 0
        self.partial: dict[int, int] = {}
        self.user_writes = self.moves = 0
        self.superpages = Superpages.of(device, self.planes)
        self._supers = self.superpages.pages if self.superpages is not None else 0
        self._width = self.superpages.width if self.superpages is not None else 1
        self.map_entries_per_page = 0
        if settings.map_cache_bytes:
            self.map_entries_per_page = max(1, geometry.page_bytes // settings.map_entry_bytes)
        open_blocks = 2 * settings.streams * (2 if self._supers else 1)
        open_blocks += settings.map_cache_bytes > 0 or settings.gc_when_filled
        if self.least < self._victims:
            raise ConfigError(
                f"ftl.gc_least_blocks is {self.least}, less than the {self._victims} of ftl.gc_victims,"
                " so moved pages would have no room"
            )
        if self.least + open_blocks >= blocks:
            raise ConfigError(
                f"ftl.gc_least_blocks is {self.least}, geometry.blocks_per_plane {blocks}, and"
                f" {open_blocks} are filled at the same time, so no block would be left to write to"
            )

    def plane_of(self, lpn: int) -> int:
        """Return the plane of a logical page, which never changes."""
        if lpn < self._supers:
            assert self.superpages is not None  # the page is one of theirs
            return self.superpages.plane_of(lpn)
        return self._order[lpn % self._count]

    def map_entry(self, lpn: int) -> int:
        """Return the number of a page's map entry; a super-page has one."""
        if lpn < self._supers:
            return lpn // self._width
        return self._supers // self._width + lpn - self._supers

    def find(self, lpn: int) -> tuple[FlashBlock, int] | None:
        """Return the page of flash that holds a logical page; None if it was never written."""
        if lpn < self._supers:
            assert self.superpages is not None  # the page is one of theirs
            return self.superpages.find(lpn)
        return self._where.get(lpn)

    def place(self, lpn: int, *, cleaning: bool = False, stream: int = 0) -> tuple[FlashBlock, int]:
        """Give a logical page a new page of flash, which invalidates its old one.

        Raises:
            ConfigError: Its plane has no erased block left: the drive is full.
        """
        old = self._where.get(lpn)
        if old is not None:
            block, page = old
            block.lpns[page] = EMPTY
            block.valid -= 1
            if cleaning:
                stream = block.stream
        plane = self.planes[self._order[lpn % self._count]]
        if lpn >= self.map_begin:
            number = 2 * self._streams
        else:
            number = stream + self._streams if cleaning else stream
        frontier = plane.frontiers[number]
        if frontier is None:
            frontier = plane.frontiers[number] = plane.open(stream)
        page = frontier.filled
        frontier.lpns[page] = lpn
        frontier.filled = page + 1
        frontier.valid += 1
        place = self._where[lpn] = (frontier, page)
        if page + 1 == self.pages_per_block:
            self._close(frontier)
            plane.frontiers[number] = plane.open(stream) if self.gc_when_filled else None
        if cleaning or lpn >= self.map_begin:
            self.moves += 1
        else:
            self.user_writes += 1
        return place

    def place_row(
        self, number: int, *, cleaning: bool = False, stream: int = 0, wanted: int = 0
    ) -> tuple[tuple[FlashBlock, ...], int]:
        """Give a super-page new pages, one of each plane of its die.

        Args:
            number: Number of the super-page.
            cleaning: True if garbage collection moves it, False if the host writes it.
            stream: Stream of the host.
            wanted: Number of its pages that the host writes; the others complete it.

        Raises:
            ConfigError: A plane has no erased block left: the drive is full.
        """
        assert self.superpages is not None  # otherwise there are no super-page numbers
        row, page = self.superpages.place(number, cleaning=cleaning, stream=stream)
        if page + 1 == self.pages_per_block:
            for block in row:
                self._close(block)
        self.user_writes += wanted
        self.moves += len(row) - wanted
        return row, page

    def _close(self, block: FlashBlock) -> None:
        self._closed += 1
        block.closed_at = self._closed
        self.planes[block.plane].closed[block] = None

    def adopt(self, lpn: int, *, stream: int = 0) -> tuple[FlashBlock, int]:
        """Place a logical page that is read and was never written, as if it had been written."""
        if lpn < self._supers:
            assert self.superpages is not None  # the page is one of theirs
            number, plane = divmod(lpn, self.superpages.width)
            row, page = self.place_row(number, stream=stream)
            self.moves -= len(row)
            return row[plane], page
        place = self.place(lpn, stream=stream)
        self.user_writes -= 1
        return place

    def stopped(self, plane: int) -> bool:
        """Return True if a plane takes no writes of the host until a block has been erased."""
        return self.planes[plane].free < self.least

    def short(self, plane: int) -> bool:
        """Return True if garbage collection of a plane must not wait, even if it may be preempted."""
        return self.planes[plane].free < self._hard

    def victim(self, plane: int) -> tuple[FlashBlock, ...]:
        """Return the next block to clean, with its row, and remove it; () if none is needed or useful."""
        its = self.planes[plane]
        if its.free >= self.threshold or its.cleaning >= self._victims:
            return ()
        if all(block.valid == self.pages_per_block or _busy(block) for block in its.closed):
            return ()  # moving a block that is all valid frees nothing
        chosen = self._choose(its)
        if chosen is None:
            return ()
        for block in chosen.together:
            holder = self.planes[block.plane]
            del holder.closed[block]
            holder.cleaning += 1
        return chosen.together

    def erased(self, block: FlashBlock) -> None:
        """Take back a victim that has been erased."""
        plane = self.planes[block.plane]
        plane.cleaning -= 1
        plane.recycle(block)

    @property
    def write_amplification(self) -> float:
        """Pages programmed for each page that the host wrote."""
        return (self.user_writes + self.moves) / self.user_writes if self.user_writes else 1.0

    def erases(self) -> list[int]:
        """Return the erases of every block that has been used."""
        rows = self.superpages.open_blocks() if self.superpages is not None else []
        return [*(each.erases for plane in self.planes for each in plane.blocks()), *rows]

    def reset_counts(self) -> None:
        """Reset the counts, after the drive has been aged."""
        self.user_writes = self.moves = 0

    def _lagging(self, plane: Plane) -> FlashBlock | None:
        """Return a block that wears less than others because its pages stay; not twice in a row.

        Cleaning it frees no room, so a block that does is cleaned in between.
        """
        if not self._gap or plane.levelled:
            plane.levelled = False
            return None
        closed = [block for block in plane.closed if not _busy(block)]
        least = min(closed, key=erases, default=None)
        if least is None or plane.most_erases - least.erases < self._gap:
            return None
        plane.levelled = True
        return least

    def _choose(self, plane: Plane) -> FlashBlock | None:
        if (lagging := self._lagging(plane)) is not None:
            return lagging
        if self._policy is Victim.FIFO:
            return next((block for block in plane.closed if not _busy(block)), None)
        closed = [block for block in plane.closed if not _busy(block)]
        if not closed:
            return None
        if self._policy is Victim.RANDOM_GREEDY:
            return min(self._drawn(plane, closed), key=_valid, default=None)
        if self._policy is Victim.COST_BENEFIT:
            return max(closed, key=self._benefit)
        return min(closed, key=_valid)

    def _drawn(self, plane: Plane, closed: list[FlashBlock]) -> list[FlashBlock]:
        """Draw a few of the full blocks at random; like MQSim's draw, possibly from the erased ones too.

        A draw whose blocks are all valid gives none. If that happens while nothing is being cleaned, the
        drive would stop, so the draw is repeated among full blocks only.
        """
        if self.gc_when_filled:
            places = range(len(closed) + plane.free)
            drawn = self._random.sample(places, min(self._few, len(places)))
            found = [closed[place] for place in drawn if place < len(closed)]
            useful = [block for block in found if block.valid < self.pages_per_block]
            if useful or plane.cleaning:
                return useful
        return self._random.sample(closed, min(self._few, len(closed)))

    def _benefit(self, block: FlashBlock) -> float:
        """Return the room that cleaning a block frees, over its cost, times its age."""
        used = block.valid / self.pages_per_block
        age = self._closed - block.closed_at + 1
        return (1 - used) / (2 * used) * age if used else float("inf")


def _valid(block: FlashBlock) -> int:
    return block.valid


def _busy(block: FlashBlock) -> bool:
    return block.pending > 0 or any(each.pending for each in block.row)
