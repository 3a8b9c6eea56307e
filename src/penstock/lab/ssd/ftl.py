"""The flash translation layer: which page of flash holds a logical page, and which block is cleaned next.

A page map. Where a logical page goes is fixed by its number (static allocation): consecutive pages go
round the channels, chips, dies and planes in the order of ``ftl.allocation``; within its plane it goes to
the block that is being filled, the *frontier*, of which there is one for each stream of the host, one for
what garbage collection moves of each, and one for the map itself, where that lies on flash. Nothing here
takes time: the drive asks, then flash works.

A part of the addresses may be mapped by super-pages: see :mod:`.superpages`.
"""

from __future__ import annotations

import random

from penstock.core.errors import ConfigError
from penstock.lab.ssd.allocation import plane_order
from penstock.lab.ssd.blocks import EMPTY, Block, Plane, erases
from penstock.lab.ssd.control import Victim
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.superpages import Superpages


class Ftl:
    """The map and the blocks of one drive.

    Attributes:
        user_writes: Pages placed for the host.
        moves: Pages placed by garbage collection, to complete a super-page, or of the map itself.
        partial: Of pages of which not every sector was ever written, those that were, as bits.
        superpages: The part of the addresses that is mapped by them; None: there is none.
        gc_when_filled: As of the device's settings.
        pages_per_block: Of every block.
        map_begin: The first logical page of the map itself, behind those of the host.
        map_entries_per_page: Of the map, where that lies on flash; 0: all of it is in memory.
    """

    def __init__(self, device: Device, *, seed: int = 1) -> None:
        """An empty drive; ``seed`` is for victims that are chosen among a random few."""
        geometry, settings = device.geometry, device.ftl
        self.pages_per_block = geometry.pages_per_block
        self._where: dict[int, tuple[Block, int]] = {}
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
        if settings.map_stored:  # the pages of the map begin on the first plane, then
            self.map_begin = -(-self.user_pages // self._count) * self._count
        blocks = geometry.blocks_per_plane
        self.threshold = max(int(settings.gc_threshold * blocks), settings.gc_least_blocks)
        self.least = settings.gc_least_blocks
        self._hard = max(1, int(settings.gc_hard_threshold * blocks))
        self._victims = settings.gc_victims
        self._policy = settings.victim
        self._random = random.Random(seed)
        self._few = max(2, blocks.bit_length() - 1)  # MQSim: log2 of the blocks
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
                f"ftl.gc_least_blocks is {self.least}, less than the {self._victims} of ftl.gc_victims:"
                " there would be no room for what is moved"
            )
        if self.least + open_blocks >= blocks:
            raise ConfigError(
                f"ftl.gc_least_blocks is {self.least}, geometry.blocks_per_plane {blocks}, and"
                f" {open_blocks} are filled at once: no block would be left to write to"
            )

    def plane_of(self, lpn: int) -> int:
        """Where a logical page lives, now and ever."""
        if lpn < self._supers:
            assert self.superpages is not None  # it has pages
            return self.superpages.plane_of(lpn)
        return self._order[lpn % self._count]

    def map_entry(self, lpn: int) -> int:
        """The number of its entry in the map: of a super-page there is one."""
        if lpn < self._supers:
            return lpn // self._width
        return self._supers // self._width + lpn - self._supers

    def find(self, lpn: int) -> tuple[Block, int] | None:
        """The page of flash that holds it; None: it was never written."""
        if lpn < self._supers:
            assert self.superpages is not None  # it has pages
            return self.superpages.find(lpn)
        return self._where.get(lpn)

    def place(self, lpn: int, *, cleaning: bool = False, stream: int = 0) -> tuple[Block, int]:
        """Give a logical page a new page of flash; its old one is worth nothing now.

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
    ) -> tuple[tuple[Block, ...], int]:
        """Give a super-page new pages, one of each plane of its die.

        Args:
            number: Of the super-page.
            cleaning: Whether garbage collection moves it, and not the host writes it.
            stream: Of the host.
            wanted: How many of its pages the host writes; the others complete it.

        Raises:
            ConfigError: A plane has no erased block left: the drive is full.
        """
        assert self.superpages is not None  # or nobody has its number
        row, page = self.superpages.place(number, cleaning=cleaning, stream=stream)
        if page + 1 == self.pages_per_block:
            for block in row:
                self._close(block)
        self.user_writes += wanted
        self.moves += len(row) - wanted
        return row, page

    def _close(self, block: Block) -> None:
        self._closed += 1
        block.closed_at = self._closed
        self.planes[block.plane].closed[block] = None

    def adopt(self, lpn: int, *, stream: int = 0) -> tuple[Block, int]:
        """A place for a logical page that is read and was never written, as if it had been."""
        if lpn < self._supers:
            assert self.superpages is not None  # it has pages
            number, plane = divmod(lpn, self.superpages.width)
            row, page = self.place_row(number, stream=stream)
            self.moves -= len(row)
            return row[plane], page
        place = self.place(lpn, stream=stream)
        self.user_writes -= 1
        return place

    def stopped(self, plane: int) -> bool:
        """Whether a plane takes nothing from the host until a block has been erased."""
        return self.planes[plane].free < self.least

    def short(self, plane: int) -> bool:
        """Whether garbage collection of a plane waits for nobody, even where it may be preempted."""
        return self.planes[plane].free < self._hard

    def victim(self, plane: int) -> tuple[Block, ...]:
        """The next block to clean, taken from the full ones, with its row; (): no need, or no use."""
        its = self.planes[plane]
        if its.free >= self.threshold or its.cleaning >= self._victims:
            return ()
        if all(block.valid == self.pages_per_block or _busy(block) for block in its.closed):
            return ()  # to move what is all valid frees nothing, and goes before what keeps others busy
        chosen = self._choose(its)
        if chosen is None:
            return ()
        for block in chosen.together:
            holder = self.planes[block.plane]
            del holder.closed[block]
            holder.cleaning += 1
        return chosen.together

    def erased(self, block: Block) -> None:
        """A victim has been erased."""
        plane = self.planes[block.plane]
        plane.cleaning -= 1
        plane.recycle(block)

    @property
    def write_amplification(self) -> float:
        """Pages programmed for each that the host wrote."""
        return (self.user_writes + self.moves) / self.user_writes if self.user_writes else 1.0

    def erases(self) -> list[int]:
        """Of every block that has been used."""
        rows = self.superpages.open_blocks() if self.superpages is not None else []
        return [*(each.erases for plane in self.planes for each in plane.blocks()), *rows]

    def forget_counts(self) -> None:
        """Begin to count anew: what came before was to age the drive."""
        self.user_writes = self.moves = 0

    def _lagging(self, plane: Plane) -> Block | None:
        """A block that holds its pages for so long that it wears less than the others; not twice in turn.

        It frees no room, so what does is cleaned in between.
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

    def _choose(self, plane: Plane) -> Block | None:
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

    def _drawn(self, plane: Plane, closed: list[Block]) -> list[Block]:
        """A random few of the full ones; as MQSim draws them, from the erased ones as well.

        It takes none then that is all valid. Nothing would go on if none is found and none is under way:
        so another few are drawn, of the full ones alone.
        """
        if self.gc_when_filled:
            places = range(len(closed) + plane.free)
            drawn = self._random.sample(places, min(self._few, len(places)))
            found = [closed[place] for place in drawn if place < len(closed)]
            useful = [block for block in found if block.valid < self.pages_per_block]
            if useful or plane.cleaning:
                return useful
        return self._random.sample(closed, min(self._few, len(closed)))

    def _benefit(self, block: Block) -> float:
        """What cleaning a block frees, for what it takes, times its age."""
        used = block.valid / self.pages_per_block
        age = self._closed - block.closed_at + 1
        return (1 - used) / (2 * used) * age if used else float("inf")


def _valid(block: Block) -> int:
    return block.valid


def _busy(block: Block) -> bool:
    return block.pending > 0 or any(each.pending for each in block.row)
