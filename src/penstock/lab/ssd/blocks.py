"""Blocks of flash, and the planes that hold them.

Blocks are created when they are first written, so a drive of terabytes costs no memory until it is used.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import Geometry

EMPTY: Final = -1
"""Entry of a page without a logical page, or with an old version of one."""


class FlashBlock:
    """One block.

    Attributes:
        plane: Plane of the block, counted over the drive.
        index: Number of the block in its plane.
        lpns: Logical page of each page, or EMPTY.
        filled: Number of pages that have been allocated.
        valid: Number of pages that hold the newest version.
        erases: Number of erases so far.
        closed_at: Number of blocks that had been filled before it.
        pending: Operations of the host on the block that are queued or under way; it is erased after
            them.
        stream: Stream of the host whose pages the block holds.
        row: All blocks, this one included, whose pages form super-pages; () if its pages are single.
    """

    __slots__ = (
        *("closed_at", "erases", "filled", "index", "lpns", "pending", "plane"),
        *("row", "stream", "valid"),
    )

    def __init__(self, plane: int, index: int, pages: int) -> None:
        self.plane = plane
        self.index = index
        self.lpns = [EMPTY] * pages
        self.filled = self.valid = self.erases = self.closed_at = self.pending = self.stream = 0
        self.row: tuple[FlashBlock, ...] = ()

    @property
    def together(self) -> tuple[FlashBlock, ...]:
        """Blocks that are cleaned together with this one, itself included."""
        return self.row or (self,)


class Plane:
    """The blocks of a plane.

    Attributes:
        free: Number of erased blocks that are not being filled.
        frontiers: Blocks that are being filled with single pages.
        closed: The full blocks, in the order in which they were filled.
        cleaning: Number of blocks that are being cleaned.
        most_erases: Most erases of any of the blocks.
        levelled: True if the last victim was chosen for its wear.
    """

    __slots__ = (
        *("_blocks", "_fresh", "_index", "_level", "_pages", "_recycled"),
        *("cleaning", "closed", "free", "frontiers", "levelled", "most_erases"),
    )

    def __init__(
        self, index: int, geometry: Geometry, *, frontiers: int = 2, least_worn_first: bool = False
    ) -> None:
        self._level = least_worn_first
        self.most_erases = 0
        self.levelled = False
        self._index = index
        self._pages = geometry.pages_per_block
        self._blocks = geometry.blocks_per_plane
        self._fresh = 0
        self._recycled: deque[FlashBlock] = deque()
        self.free = geometry.blocks_per_plane
        self.frontiers: list[FlashBlock | None] = [None] * frontiers
        self.closed: dict[FlashBlock, None] = {}
        self.cleaning = 0

    def open(self, stream: int) -> FlashBlock:
        """Return a block to fill: a new one first, then the one erased longest ago, or least often."""
        if not self.free:
            raise ConfigError(
                f"the drive is full: plane {self._index} has no erased block left; use less of it, or"
                " increase its over-provisioning"
            )
        self.free -= 1
        block = self._erased()
        block.stream = stream
        return block

    def _erased(self) -> FlashBlock:
        if self._fresh < self._blocks:
            self._fresh += 1
            return FlashBlock(self._index, self._fresh - 1, self._pages)
        if self._level:
            least = min(self._recycled, key=erases)
            self._recycled.remove(least)
            return least
        return self._recycled.popleft()

    def recycle(self, block: FlashBlock) -> None:
        """Take back a block that has been erased."""
        block.lpns = [EMPTY] * self._pages
        block.filled = block.valid = 0
        block.row = ()
        block.erases += 1
        self.most_erases = max(self.most_erases, block.erases)
        self._recycled.append(block)
        self.free += 1

    def blocks(self) -> list[FlashBlock]:
        """Return all blocks that have ever been used, except those that super-pages fill."""
        open_ones = [block for block in self.frontiers if block is not None]
        return [*self.closed, *open_ones, *self._recycled]


def erases(block: FlashBlock) -> int:
    """Return the erases of a block, as a key to compare."""
    return block.erases
