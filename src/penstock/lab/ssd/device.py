"""Parts of a simulated SSD: geometry, cells, channels, link, FTL, processing elements, energy.

Every duration of a device is in whole nanoseconds, every rate in bytes per second, every size in bytes.
The engines compute in integer picoseconds: a byte at 800 MB/s takes 1.25 ns, so nanoseconds would be
too coarse, and 2**63 ps are a hundred days.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import Cell, Geometry
from penstock.lab.ssd.checks import rate, real, whole
from penstock.lab.ssd.control import FtlSettings, WriteCache

PS_PER_NS: Final = 1000
PS_PER_S: Final = 10**12
_NS_PER_S: Final = 10**9
WORD_BYTES: Final = 4
"""Size of FP32, in which processing elements compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSpec:
    """The bus between the controller and the chips of a channel, and the operations that it allows."""

    bytes_per_s: int
    read_command_ns: int
    """Time of command and address of a read, before tR."""
    read_plane_ns: int
    """Time of each further plane of a multi-plane read."""
    read_settle_ns: int
    """Time from the end of tR until data can be sent."""
    program_command_ns: int
    program_plane_ns: int
    """Time of each further plane of a multi-plane program."""
    erase_command_ns: int
    send_spare: bool
    """True if spare bytes cross the bus with their page."""
    dies_in_parallel: bool
    """True if the dies of a chip work at the same time; MQSim's do not."""
    multi_plane: bool
    """True if planes of a die are read, programmed and erased together, at one offset."""
    any_page_order: bool
    """True if pages of a block may be programmed out of order, to go with those of other planes. No flash
    allows it; MQSim does."""
    independent_plane_reads: bool
    """True if planes are read at the same time at any offset."""
    cache_read: bool
    """True if a die may read a page while an earlier one still waits to be sent."""
    cache_program: bool
    """True if a die may take the next page's data while it programs a page."""

    def __post_init__(self) -> None:
        rate("channel.bytes_per_s", self.bytes_per_s)
        for field in fields(self):
            if field.name.endswith("_ns"):
                whole(f"channel.{field.name}", getattr(self, field.name), 0)
        if self.independent_plane_reads and not self.multi_plane:
            raise ConfigError("channel.independent_plane_reads needs channel.multi_plane")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """PCIe and NVMe, as one lane of time in each direction."""

    up_bytes_per_s: int
    """Rate from the drive to the host."""
    down_bytes_per_s: int
    """Rate from the host to the drive."""
    payload_bytes: int
    """Largest payload of a transaction-layer packet."""
    overhead_bytes: int
    """Further bytes of each packet; 0 if the rates above are net of them."""
    command_bytes: int
    """Size of a submission queue entry, and of the answer to its fetch."""
    completion_bytes: int
    doorbell_bytes: int
    fetch_depth: int
    """Most requests that the drive has taken from the queue and not completed."""
    read_firmware_ns: int
    """Time of the controller's firmware for a read before flash is asked."""
    write_firmware_ns: int
    lanes: int = 0
    """Lanes for rounding like MQSim's: each carries its share of a message's bytes, rounded up, in whole
    nanoseconds, rounded down; 0 rounds only to a picosecond."""

    def __post_init__(self) -> None:
        rate("link.up_bytes_per_s", self.up_bytes_per_s)
        rate("link.down_bytes_per_s", self.down_bytes_per_s)
        for name in ("payload_bytes", "fetch_depth"):
            whole(f"link.{name}", getattr(self, name), 1)
        for name in ("overhead", "command", "completion", "doorbell"):
            whole(f"link.{name}_bytes", getattr(self, f"{name}_bytes"), 0)
        for name in ("read_firmware_ns", "write_firmware_ns", "lanes"):
            whole(f"link.{name}", getattr(self, name), 0)

    def wire_bytes(self, payload_bytes: int) -> int:
        """Return the bytes with the overhead of every packet, the last one included."""
        return payload_bytes + -(-payload_bytes // self.payload_bytes) * self.overhead_bytes

    def message_ps(self, payload_bytes: int, bytes_per_s: int) -> int:
        """Return the time for which a message occupies its direction of that rate."""
        nbytes = self.wire_bytes(payload_bytes)
        if not self.lanes:
            return duration_ps(nbytes, bytes_per_s)
        share = -(-nbytes // self.lanes) * self.lanes
        return share * _NS_PER_S // bytes_per_s * PS_PER_NS


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A processing element beside the page registers of a die."""

    divider: int
    """Byte times of the flash interface for an FP32 word: 4 is a quarter of its clock."""
    double_buffered: bool
    """True if gradients and weights cross the bus while the die works on another unit."""
    overlaps_array: bool
    """True if it computes while the array reads or programs other pages."""
    controller_words_per_s: int
    """Rate of the controller's updates, in FP32 words for each pass."""

    def __post_init__(self) -> None:
        whole("unit.divider", self.divider, 1)
        rate("unit.controller_words_per_s", self.controller_words_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Energy:
    """Energy of bits and operations, and static power of the controller."""

    read_pj_per_bit: float
    program_pj_per_bit: float
    erase_pj_per_bit: float
    channel_pj_per_bit: float
    link_pj_per_bit: float
    host_dram_pj_per_bit: float
    controller_dram_pj_per_bit: float
    controller_ecc_pj_per_bit: float
    """Energy of decoding in the controller."""
    die_ecc_pj_per_bit: float
    """Energy of decoding on the die; 0 without a decoder."""
    multiply_pj: float
    add_pj: float
    controller_static_w: float

    def __post_init__(self) -> None:
        for field in fields(self):
            real(f"energy.{field.name}", getattr(self, field.name), positive=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The computer beside the drive."""

    parameters_per_s: float
    """Rate at which its processor updates."""
    io_efficiency: float
    """Share of the drive's bandwidth that the software reaches."""
    overlap: bool
    """True if it reads, updates and writes at the same time."""
    busy_w: float
    """Power while it runs the weight update itself."""
    idle_w: float
    """Power while the drive runs it."""

    def __post_init__(self) -> None:
        for name in ("parameters_per_s", "io_efficiency", "busy_w"):
            real(f"host.{name}", getattr(self, name), positive=True)
        real("host.idle_w", self.idle_w, positive=False)
        if self.io_efficiency > 1:
            raise ConfigError(f"host.io_efficiency is {self.io_efficiency}; it must be at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endurance:
    """Ratings of the drive."""

    capacity_bytes: int
    """Capacity over which wear is spread."""
    tbw_bytes: int
    """Bytes that the host may write, by the data sheet; 0 if it states none."""
    retention_credit: float
    """Factor by which blocks outlive their rating if data need not be kept for months."""

    def __post_init__(self) -> None:
        whole("endurance.capacity_bytes", self.capacity_bytes, 1)
        whole("endurance.tbw_bytes", self.tbw_bytes, 0)
        real("endurance.retention_credit", self.retention_credit, positive=True)


_NO_CACHE: Final = WriteCache()


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One SSD and its host."""

    name: str
    geometry: Geometry
    cell: Cell
    channel: ChannelSpec
    link: HostLink
    ftl: FtlSettings
    unit: Unit
    energy: Energy
    host: Host
    endurance: Endurance
    cache: WriteCache = _NO_CACHE

    def __post_init__(self) -> None:
        bits, pages = self.cell.mode.bits, self.geometry.pages_per_block
        if self.cell.one_shot and pages % bits:
            raise ConfigError(
                f"device {self.name!r}: geometry.pages_per_block is {pages}; it must be a multiple of the"
                f" {bits} bits of a {self.cell.mode} cell"
            )
        if self.ftl.map_read_bytes > self.geometry.page_bytes:
            raise ConfigError(
                f"device {self.name!r}: ftl.map_read_bytes is {self.ftl.map_read_bytes}, more than a page"
                f" of {self.geometry.page_bytes}"
            )

    @property
    def page_bus_ps(self) -> int:
        """Time for which a page occupies the channel."""
        sent = self.geometry.page_bytes
        sent += self.geometry.spare_bytes if self.channel.send_spare else 0
        return duration_ps(sent, self.channel.bytes_per_s)

    @property
    def user_pages(self) -> int:
        """Number of pages that the host can address."""
        geometry = self.geometry
        pages = geometry.planes * geometry.pages_per_plane * (1 - self.ftl.overprovisioning)
        return math.ceil(round(pages, 6))


def duration_ps(nbytes: int, bytes_per_s: int) -> int:
    """Return the time of a transfer, to the nearest picosecond, halves up."""
    return (nbytes * PS_PER_S * 2 + bytes_per_s) // (2 * bytes_per_s)
