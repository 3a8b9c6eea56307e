"""Blocks of flash, and the planes that hold them.

Blocks come to be when they are first written, so a drive of terabytes costs no memory until it is used.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import Geometry

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
        stream: Of the host, whose pages it holds.
        row: All blocks of which a page each is a super-page, itself included; (): its pages are single.
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
        self.row: tuple[Block, ...] = ()

    @property
    def together(self) -> tuple[Block, ...]:
        """What is cleaned with it."""
        return self.row or (self,)


class Plane:
    """The blocks of a plane.

    Attributes:
        free: How many blocks are erased and not being filled.
        frontiers: Blocks that are being filled with single pages.
        closed: The full ones, in the order in which they were filled.
        cleaning: How many are being emptied.
        most_erases: Of any of its blocks.
        levelled: Whether the last victim was chosen for its wear.
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
        self._recycled: deque[Block] = deque()
        self.free = geometry.blocks_per_plane
        self.frontiers: list[Block | None] = [None] * frontiers
        self.closed: dict[Block, None] = {}
        self.cleaning = 0

    def open(self, stream: int) -> Block:
        """A block to fill: new ones first, then those erased longest ago, or least often."""
        if not self.free:
            raise ConfigError(
                f"the drive is full: plane {self._index} has no erased block left; use less of it, or"
                " give it more over-provisioning"
            )
        self.free -= 1
        block = self._erased()
        block.stream = stream
        return block

    def _erased(self) -> Block:
        if self._fresh < self._blocks:
            self._fresh += 1
            return Block(self._index, self._fresh - 1, self._pages)
        if self._level:
            least = min(self._recycled, key=erases)
            self._recycled.remove(least)
            return least
        return self._recycled.popleft()

    def recycle(self, block: Block) -> None:
        """A block has been erased."""
        block.lpns = [EMPTY] * self._pages
        block.filled = block.valid = 0
        block.row = ()
        block.erases += 1
        self.most_erases = max(self.most_erases, block.erases)
        self._recycled.append(block)
        self.free += 1

    def blocks(self) -> list[Block]:
        """All that have ever been used, but for those that super-pages fill."""
        open_ones = [block for block in self.frontiers if block is not None]
        return [*self.closed, *open_ones, *self._recycled]


def erases(block: Block) -> int:
    """Of a block, to compare."""
    return block.erases
