"""The array: how many cells there are, arranged how, and what they take for a page."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.checks import whole

SECTOR_BYTES: Final = 512
MOST_BYTES: Final = 1 << 60
"""Of a whole drive: more is a mistake."""


class CellMode(enum.StrEnum):
    """How many bits a cell holds; pSLC is a denser cell used for one."""

    SLC = "slc"
    PSLC = "pslc"
    MLC = "mlc"
    TLC = "tlc"
    QLC = "qlc"

    @property
    def bits(self) -> int:
        """Bits in a cell, which is the number of types that pages have."""
        return {"slc": 1, "pslc": 1, "mlc": 2, "tlc": 3, "qlc": 4}[self.value]


class PageOrder(enum.StrEnum):
    """Which pages of a block are of which type."""

    TURNS = "turns"
    """Types take turns: page modulo bits."""
    PAIRS = "pairs"
    """Of three bits as in MQSim, after Yaakobi et al. (ICNC 2012): six of the first type, two of the
    second, then pairs in turn. Of other bits as above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What there is how many of."""

    channels: int
    chips_per_channel: int
    """Also called ways: each has one chip-enable."""
    dies_per_chip: int
    planes_per_die: int
    blocks_per_plane: int
    pages_per_block: int
    page_bytes: int
    spare_bytes: int
    """Beside each page, for error correction; not part of the capacity."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "spare_bytes" else 1
            whole(f"geometry.{field.name}", getattr(self, field.name), least)
        if self.page_bytes % SECTOR_BYTES:
            raise ConfigError(
                f"geometry.page_bytes is {self.page_bytes}, which is no multiple of {SECTOR_BYTES}"
            )
        if self.blocks_per_plane < 4:
            raise ConfigError(
                f"geometry.blocks_per_plane is {self.blocks_per_plane}: a plane needs at least 4, two"
                " to write to, one to clean and one to spare"
            )
        if self.raw_bytes > MOST_BYTES:
            raise ConfigError(
                f"geometry: {self.raw_bytes} bytes in all is impossible; check each of its numbers"
            )

    @property
    def dies_per_channel(self) -> int:
        """On all chips of a channel."""
        return self.chips_per_channel * self.dies_per_chip

    @property
    def dies(self) -> int:
        """Of the drive."""
        return self.channels * self.dies_per_channel

    @property
    def planes(self) -> int:
        """Of the drive."""
        return self.dies * self.planes_per_die

    @property
    def pages_per_plane(self) -> int:
        """In all blocks of a plane."""
        return self.blocks_per_plane * self.pages_per_block

    @property
    def raw_bytes(self) -> int:
        """Of the drive, over-provisioned blocks included."""
        return self.planes * self.pages_per_plane * self.page_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """What the array of cells takes for a page, by the type of the page."""

    mode: CellMode
    read_ns: tuple[int, ...]
    """tR: one for each bit of a cell, from the lowest (LSB, CSB, MSB)."""
    program_ns: tuple[int, ...]
    """tPROG: likewise; or one for a whole word line, where that is programmed in one shot."""
    one_shot: bool
    """All pages of a word line are loaded, then programmed together."""
    order: PageOrder
    erase_ns: int
    """tBERS."""
    cycles: int
    """Programs and erases that a block is rated for, in this mode."""
    program_suspend_ns: int = 0
    """What it takes to suspend a program for a read; 0: that cannot be."""
    erase_suspend_ns: int = 0

    def __post_init__(self) -> None:
        bits = self.mode.bits
        for name, count in (("read_ns", bits), ("program_ns", 1 if self.one_shot else bits)):
            times = getattr(self, name)
            if len(times) != count:
                raise ConfigError(
                    f"cell.{name} has {len(times)} values; {self.mode} with one_shot ="
                    f" {str(self.one_shot).lower()} needs {count}"
                )
            for time_ns in times:
                whole(f"cell.{name}", time_ns, 1)
        if self.one_shot and self.order is not PageOrder.TURNS:
            raise ConfigError("cell.one_shot needs cell.order 'turns': a word line's pages follow")
        whole("cell.erase_ns", self.erase_ns, 0)
        whole("cell.cycles", self.cycles, 1)
        for name in ("program_suspend_ns", "erase_suspend_ns"):
            whole(f"cell.{name}", getattr(self, name), 0)

    def page_type(self, page: int) -> int:
        """Which of ``read_ns`` is a page's, by its number in the block."""
        if self.order is PageOrder.PAIRS and self.mode.bits == 3:
            return 0 if page < 6 else 1 if page < 8 else (page - 8) // 2 % 3
        return page % self.mode.bits

    def page_read_ns(self, page: int) -> int:
        """Array time (tR) of a page by its number in the block."""
        return self.read_ns[self.page_type(page)]

    def page_program_ns(self, page: int) -> int:
        """Array time (tPROG) of a page by its number; of a one-shot word line the last has all of it."""
        bits = self.mode.bits
        if not self.one_shot:
            return self.program_ns[self.page_type(page)]
        return self.program_ns[0] if page % bits == bits - 1 else 0

    @property
    def mean_read_ns(self) -> float:
        """Over all pages of a block."""
        return sum(self.read_ns) / len(self.read_ns)

    @property
    def mean_program_ns(self) -> float:
        """For one page, over all pages of a block."""
        return sum(self.program_ns) / self.mode.bits
