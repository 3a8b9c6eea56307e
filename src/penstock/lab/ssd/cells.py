"""The flash array: number and arrangement of cells, and the times of a page."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.checks import whole

SECTOR_BYTES: Final = 512
MAX_BYTES: Final = 1 << 60
"""Limit for the bytes of a drive; more is a mistake."""


class CellMode(enum.StrEnum):
    """Number of bits in a cell; pSLC is a denser cell used for one bit."""

    SLC = "slc"
    PSLC = "pslc"
    MLC = "mlc"
    TLC = "tlc"
    QLC = "qlc"

    @property
    def bits(self) -> int:
        """Bits in a cell, which is the number of page types."""
        return {"slc": 1, "pslc": 1, "mlc": 2, "tlc": 3, "qlc": 4}[self.value]


class PageOrder(enum.StrEnum):
    """Assignment of the pages of a block to types."""

    TURNS = "turns"
    """Type is the page number modulo bits."""
    PAIRS = "pairs"
    """Order of MQSim for three bits, after Yaakobi et al. (ICNC 2012): six pages of the first type, two
    of the second, then pairs in turn. For other numbers of bits as ``turns``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Numbers and sizes of the parts of a drive."""

    channels: int
    chips_per_channel: int
    """Number of chips, also called ways; each has one chip-enable."""
    dies_per_chip: int
    planes_per_die: int
    blocks_per_plane: int
    pages_per_block: int
    page_bytes: int
    spare_bytes: int
    """Bytes beside each page for error correction; not part of the capacity."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "spare_bytes" else 1
            whole(f"geometry.{field.name}", getattr(self, field.name), least)
        if self.page_bytes % SECTOR_BYTES:
            raise ConfigError(
                f"geometry.page_bytes is {self.page_bytes}; it must be a multiple of {SECTOR_BYTES}"
            )
        if self.blocks_per_plane < 4:
            raise ConfigError(
                f"geometry.blocks_per_plane is {self.blocks_per_plane}; a plane needs at least 4: two to"
                " write to, one to clean and one to spare"
            )
        if self.raw_bytes > MAX_BYTES:
            raise ConfigError(
                f"geometry: {self.raw_bytes} bytes in total is impossible; check each of its numbers"
            )

    @property
    def dies_per_channel(self) -> int:
        """Dies on all chips of a channel."""
        return self.chips_per_channel * self.dies_per_chip

    @property
    def dies(self) -> int:
        """Dies of the drive."""
        return self.channels * self.dies_per_channel

    @property
    def planes(self) -> int:
        """Planes of the drive."""
        return self.dies * self.planes_per_die

    @property
    def pages_per_plane(self) -> int:
        """Pages in all blocks of a plane."""
        return self.blocks_per_plane * self.pages_per_block

    @property
    def raw_bytes(self) -> int:
        """Bytes of the drive, including over-provisioned blocks."""
        return self.planes * self.pages_per_plane * self.page_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Times of the array for a page, by the type of the page."""

    mode: CellMode
    read_ns: tuple[int, ...]
    """Read time (tR) for each bit of a cell, from the lowest (LSB, CSB, MSB)."""
    program_ns: tuple[int, ...]
    """Program time (tPROG) likewise; or one for a whole word line that is programmed in one shot."""
    one_shot: bool
    """True if all pages of a word line are loaded, then programmed together."""
    order: PageOrder
    erase_ns: int
    """Erase time (tBERS)."""
    cycles: int
    """Rated programs and erases of a block, in this mode."""
    program_suspend_ns: int = 0
    """Time to suspend a program for a read; 0 if that is impossible."""
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
            raise ConfigError(
                "cell.one_shot needs cell.order 'turns', where pages of a word line follow"
            )
        whole("cell.erase_ns", self.erase_ns, 0)
        whole("cell.cycles", self.cycles, 1)
        for name in ("program_suspend_ns", "erase_suspend_ns"):
            whole(f"cell.{name}", getattr(self, name), 0)

    def page_type(self, page: int) -> int:
        """Return the index into ``read_ns`` of a page, by its number in the block."""
        if self.order is PageOrder.PAIRS and self.mode.bits == 3:
            return 0 if page < 6 else 1 if page < 8 else (page - 8) // 2 % 3
        return page % self.mode.bits

    def page_read_ns(self, page: int) -> int:
        """Return the array time (tR) of a page, by its number in the block."""
        return self.read_ns[self.page_type(page)]

    def page_program_ns(self, page: int) -> int:
        """Return the array time (tPROG) of a page; in a one-shot word line the last page has it all."""
        bits = self.mode.bits
        if not self.one_shot:
            return self.program_ns[self.page_type(page)]
        return self.program_ns[0] if page % bits == bits - 1 else 0

    @property
    def mean_read_ns(self) -> float:
        """Mean read time over all pages of a block."""
        return sum(self.read_ns) / len(self.read_ns)

    @property
    def mean_program_ns(self) -> float:
        """Mean program time of a page, over all pages of a block."""
        return sum(self.program_ns) / self.mode.bits
