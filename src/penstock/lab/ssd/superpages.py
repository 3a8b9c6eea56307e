"""Super-pages: pages of all planes of a die at one offset, with one entry of the map.

OptimStore (HPCA 2023) keeps weight, momentum, variance and gradient of the same parameters in one, to
read and program them by one multi-plane operation. The die of a super-page follows from its number
(static allocation over channels, chips and dies); there it is in a *row*: a block of each plane, filled,
cleaned and erased together. It is written whole: parts that the host does not write are read first.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.lab.ssd.allocation import die_order
from penstock.lab.ssd.blocks import EMPTY, FlashBlock, Plane
from penstock.lab.ssd.device import Device


class Superpages:
    """The part of a drive's addresses, from their start, that is mapped by super-pages.

    Attributes:
        width: Pages of a super-page.
        pages: Logical pages in this part.
    """

    def __init__(self, device: Device, planes: Sequence[Plane], count: int) -> None:
        """Map ``count`` super-pages; ``planes`` are those of the drive."""
        geometry, settings = device.geometry, device.ftl
        self.width = geometry.planes_per_die
        self.pages = count * self.width
        self._planes = planes
        self._block_pages = geometry.pages_per_block
        self._streams = settings.streams
        self._dies = die_order(geometry, settings.allocation)
        self._where: dict[int, tuple[tuple[FlashBlock, ...], int]] = {}
        self._frontiers: dict[tuple[int, int], tuple[FlashBlock, ...]] = {}

    @classmethod
    def of(cls, device: Device, planes: Sequence[Plane]) -> Superpages | None:
        """Create them by the device's settings; None if there are none."""
        count = (
            int(device.user_pages * device.ftl.superpage_share) // device.geometry.planes_per_die
        )
        return cls(device, planes, count) if count else None

    def plane_of(self, lpn: int) -> int:
        """Return the plane of a logical page."""
        number, plane = divmod(lpn, self.width)
        return self._dies[number % len(self._dies)] * self.width + plane

    def planes_of(self, number: int) -> range:
        """Return the planes of a super-page's die."""
        first = self._dies[number % len(self._dies)] * self.width
        return range(first, first + self.width)

    def find(self, lpn: int) -> tuple[FlashBlock, int] | None:
        """Return the page of flash that holds a logical page; None if it was never written."""
        number, plane = divmod(lpn, self.width)
        place = self._where.get(number)
        return None if place is None else (place[0][plane], place[1])

    def place(
        self, number: int, *, cleaning: bool, stream: int
    ) -> tuple[tuple[FlashBlock, ...], int]:
        """Give a super-page new pages; see :meth:`.Ftl.place_row`."""
        old = self._where.get(number)
        if old is not None:
            row, page = old
            for block in row:
                block.lpns[page] = EMPTY
                block.valid -= 1
            if cleaning:
                stream = row[0].stream
        key = (self._dies[number % len(self._dies)], stream + self._streams * cleaning)
        row = self._frontiers.get(key) or self._open(key, number, stream)
        page = row[0].filled
        for plane, block in enumerate(row):
            block.lpns[page] = number * self.width + plane
            block.filled = page + 1
            block.valid += 1
        if page + 1 == self._block_pages:
            del self._frontiers[key]
        self._where[number] = (row, page)
        return row, page

    def open_blocks(self) -> list[int]:
        """Return the erases of the blocks that are being filled."""
        return [block.erases for row in self._frontiers.values() for block in row]

    def _open(self, key: tuple[int, int], number: int, stream: int) -> tuple[FlashBlock, ...]:
        row = tuple(self._planes[plane].open(stream) for plane in self.planes_of(number))
        for block in row:
            block.row = row
        self._frontiers[key] = row
        return row
