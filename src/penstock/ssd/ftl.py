"""The flash translation layer: which page of flash holds a logical page, and which block is cleaned next.

A page map. Where a logical page goes is fixed by its number (static allocation): consecutive pages go
round the channels, chips, dies and planes in the order of ``ftl.allocation``; within its plane it goes to
the block that is being filled, the *frontier*, of which there is one for the host and one for what
garbage collection moves. Nothing here takes time: the drive asks, then flash works.

Blocks come to be when they are first written, so a drive of terabytes costs no memory until it is used.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

from penstock.core.errors import ConfigError
from penstock.ssd.cells import Geometry
from penstock.ssd.device import Device, Victim

EMPTY: Final = -1
"""In place of the logical page of a page that holds none, or an old version."""


class Block:
    """One block.

    Attributes:
        plane: Its plane, counted over the drive.
        index: In its plane.
        lpns: By page, the logical page that it holds, or EMPTY.
        filled: How many of its pages have been given out.
        valid: How many of them hold the newest version.
        erases: So far.
        closed_at: When it was filled, in blocks filled before it.
        pending: Operations of the host on it that are queued or under way: it is not erased before.
    """

    __slots__ = ("closed_at", "erases", "filled", "index", "lpns", "pending", "plane", "valid")

    def __init__(self, plane: int, index: int, pages: int) -> None:
        self.plane = plane
        self.index = index
        self.lpns = [EMPTY] * pages
        self.filled = self.valid = self.erases = self.closed_at = self.pending = 0


class Plane:
    """The blocks of a plane.

    Attributes:
        free: How many blocks are erased and not being filled.
        closed: The full ones, in the order in which they were filled.
        cleaning: How many are being emptied.
        most_erases: Of any of its blocks.
        levelled: Whether the last victim was chosen for its wear.
    """

    __slots__ = (
        *("_blocks", "_fresh", "_index", "_level", "_pages", "_recycled"),
        *("cleaning", "closed", "free", "frontiers", "levelled", "most_erases"),
    )

    def __init__(self, index: int, geometry: Geometry, *, least_worn_first: bool = False) -> None:
        self._level = least_worn_first
        self.most_erases = 0
        self.levelled = False
        self._index = index
        self._pages = geometry.pages_per_block
        self._blocks = geometry.blocks_per_plane
        self._fresh = 0
        self._recycled: deque[Block] = deque()
        self.free = geometry.blocks_per_plane
        self.frontiers: list[Block | None] = [None, None]
        self.closed: dict[Block, None] = {}
        self.cleaning = 0

    def open(self) -> Block:
        """A block to fill: new ones first, then those erased longest ago, or least often."""
        if not self.free:
            raise ConfigError(
                f"the drive is full: plane {self._index} has no erased block left; use less of it, or"
                " give it more over-provisioning"
            )
        self.free -= 1
        if self._fresh == self._blocks:
            if self._level:
                least = min(self._recycled, key=_erases)
                self._recycled.remove(least)
                return least
            return self._recycled.popleft()
        self._fresh += 1
        return Block(self._index, self._fresh - 1, self._pages)

    def recycle(self, block: Block) -> None:
        """A block has been erased."""
        block.lpns = [EMPTY] * self._pages
        block.filled = block.valid = 0
        block.erases += 1
        self.most_erases = max(self.most_erases, block.erases)
        self._recycled.append(block)
        self.free += 1

    def blocks(self) -> list[Block]:
        """All that have ever been used."""
        open_ones = [block for block in self.frontiers if block is not None]
        return [*self.closed, *open_ones, *self._recycled]


class Ftl:
    """The map and the blocks of one drive.

    Attributes:
        user_writes: Pages placed for the host.
        moves: Pages placed by garbage collection.
    """

    def __init__(self, device: Device, *, seed: int = 1) -> None:
        """An empty drive; ``seed`` is for victims that are chosen among a random few."""
        geometry, settings = device.geometry, device.ftl
        self._pages = geometry.pages_per_block
        self._where: dict[int, tuple[Block, int]] = {}
        self._order = plane_order(geometry, settings.allocation)
        self._count = len(self._order)
        self.planes = [
            Plane(index, geometry, least_worn_first=settings.least_worn_first)
            for index in range(geometry.planes)
        ]
        self._gap = settings.wear_gap
        self.user_pages = device.user_pages
        blocks = geometry.blocks_per_plane
        self.threshold = max(int(settings.gc_threshold * blocks), settings.gc_least_blocks)
        self.least = settings.gc_least_blocks
        self._victims = settings.gc_victims
        self._policy = settings.victim
        self._random = random.Random(seed)
        self._few = max(2, blocks.bit_length() - 1)  # MQSim: log2 of the blocks
        self._closed = 0
        self.user_writes = self.moves = 0
        if self.least < self._victims:
            raise ConfigError(
                f"ftl.gc_least_blocks is {self.least}, less than the {self._victims} of ftl.gc_victims:"
                " there would be no room for what is moved"
            )
        if self.least + 2 >= blocks:
            raise ConfigError(
                f"ftl.gc_least_blocks is {self.least}, geometry.blocks_per_plane {blocks}:"
                " no block would be left to write to"
            )

    def plane_of(self, lpn: int) -> int:
        """Where a logical page lives, now and ever."""
        return self._order[lpn % self._count]

    def find(self, lpn: int) -> tuple[Block, int] | None:
        """The page of flash that holds it; None: it was never written."""
        return self._where.get(lpn)

    def place(self, lpn: int, *, cleaning: bool = False) -> tuple[Block, int]:
        """Give a logical page a new page of flash; its old one is worth nothing now.

        Raises:
            ConfigError: Its plane has no erased block left: the drive is full.
        """
        old = self._where.get(lpn)
        if old is not None:
            block, page = old
            block.lpns[page] = EMPTY
            block.valid -= 1
        plane = self.planes[self._order[lpn % self._count]]
        frontier = plane.frontiers[cleaning]
        if frontier is None:
            frontier = plane.frontiers[cleaning] = plane.open()
        page = frontier.filled
        frontier.lpns[page] = lpn
        frontier.filled = page + 1
        frontier.valid += 1
        place = self._where[lpn] = (frontier, page)
        if page + 1 == self._pages:
            self._closed += 1
            frontier.closed_at = self._closed
            plane.closed[frontier] = None
            plane.frontiers[cleaning] = None
        if cleaning:
            self.moves += 1
        else:
            self.user_writes += 1
        return place

    def adopt(self, lpn: int) -> tuple[Block, int]:
        """A place for a logical page that is read and was never written, as if it had been."""
        place = self.place(lpn)
        self.user_writes -= 1
        return place

    def stopped(self, plane: int) -> bool:
        """Whether a plane takes nothing from the host until a block has been erased."""
        return self.planes[plane].free < self.least

    def victim(self, plane: int) -> Block | None:
        """The next block to clean, taken from the full ones; None: there is no need, or no use."""
        its = self.planes[plane]
        if its.free >= self.threshold or its.cleaning >= self._victims:
            return None
        if all(block.valid == self._pages for block in its.closed):
            return None
        chosen = self._choose(its)
        if chosen is None:
            return None
        del its.closed[chosen]
        its.cleaning += 1
        return chosen

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
        return [block.erases for plane in self.planes for block in plane.blocks()]

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
        closed = [block for block in plane.closed if not block.pending]
        least = min(closed, key=_erases, default=None)
        if least is None or plane.most_erases - least.erases < self._gap:
            return None
        plane.levelled = True
        return least

    def _choose(self, plane: Plane) -> Block | None:
        if (lagging := self._lagging(plane)) is not None:
            return lagging
        if self._policy is Victim.FIFO:
            return next((block for block in plane.closed if not block.pending), None)
        closed = [block for block in plane.closed if not block.pending]
        if not closed:
            return None
        if self._policy is Victim.RANDOM_GREEDY:
            few = self._random.sample(closed, min(self._few, len(closed)))
            return min(few, key=_valid)
        if self._policy is Victim.COST_BENEFIT:
            return max(closed, key=self._benefit)
        return min(closed, key=_valid)

    def _benefit(self, block: Block) -> float:
        """What cleaning a block frees, for what it takes, times its age."""
        used = block.valid / self._pages
        age = self._closed - block.closed_at + 1
        return (1 - used) / (2 * used) * age if used else float("inf")


def _valid(block: Block) -> int:
    return block.valid


def _erases(block: Block) -> int:
    return block.erases


def plane_order(geometry: Geometry, allocation: str) -> list[int]:
    """By ``lpn % planes``, the plane counted over the drive: channel, chip, die, plane, plane fastest."""
    sizes = {
        "C": geometry.channels,
        "W": geometry.chips_per_channel,
        "D": geometry.dies_per_chip,
        "P": geometry.planes_per_die,
    }
    order = []
    for number in range(geometry.planes):
        left, at = number, {}
        for letter in allocation:
            left, at[letter] = divmod(left, sizes[letter])
        die = (at["C"] * sizes["W"] + at["W"]) * sizes["D"] + at["D"]
        order.append(die * sizes["P"] + at["P"])
    return order
