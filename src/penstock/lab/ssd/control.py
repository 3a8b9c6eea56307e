"""Settings of a controller: the flash translation layer, and the write cache."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.checks import rate, real, whole


class Victim(enum.StrEnum):
    """Choice of the block that garbage collection cleans."""

    GREEDY = "greedy"
    """The block with the fewest valid pages; the oldest of several."""
    RANDOM_GREEDY = "random-greedy"
    """The block with the fewest valid pages among some at random (d-choices; MQSim's RGA)."""
    FIFO = "fifo"
    """The block that was filled first."""
    COST_BENEFIT = "cost-benefit"
    """The block with the largest (1 - u) / 2u * age (Rosenblum and Ousterhout, SOSP 1991)."""


ALLOCATIONS: Final = tuple(
    a + b + c + d
    for a in "CWDP"
    for b in "CWDP"
    for c in "CWDP"
    for d in "CWDP"
    if len({a, b, c, d}) == 4
)
"""Orders in which consecutive pages go to Channels, ways (chips, W), Dies and Planes; the first letter
varies fastest (Tavakkol et al., TOMPECS 2016)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FtlSettings:
    """The flash translation layer: placement of pages, and cleaning of blocks."""

    allocation: str
    """Allocation: one of the 24 orders, as ``CWDP``; the first letter varies fastest."""
    victim: Victim
    overprovisioning: float
    """Share of all blocks that the host cannot address."""
    gc_threshold: float
    """Share of free blocks below which garbage collection starts in a plane."""
    gc_least_blocks: int
    """Number of free blocks below which it starts as well; down to it the plane takes writes of the
    host."""
    gc_victims: int
    """Most blocks of a plane that are cleaned at the same time."""
    gc_when_filled: bool = False
    """True if garbage collection looks for one victim only when a block has been filled, by the host or
    by moved pages, and draws random victims from the erased blocks as well; the next block to fill, and
    one for the map, are open already. MQSim does so. Otherwise it looks for victims with every page, and
    blocks are opened when they are needed."""
    gc_preemptible: bool = False
    """True if requests of the host precede garbage collection, on dies (or chips) whose planes all have
    enough erased blocks. Operations under way are not interrupted."""
    gc_hard_threshold: float = 0.005
    """Share of free blocks below which a plane is short of them; a plane without any always is."""
    least_worn_first: bool = False
    """Dynamic wear levelling: the erased block with the fewest erases is filled next."""
    wear_gap: int = 0
    """Static wear levelling: a block that lags this many erases behind the most worn of its plane is
    cleaned in turn with the victims, whatever it holds; 0 for never."""
    levels_planes: bool = False
    """True if states that dies update exchange places with the gradient's plane from time to time, so
    that all planes of a die wear alike; a step on the dies then takes 2.6 % longer. The engine of drives
    ignores this."""
    streams: int = 1
    """Streams of the host, each with its own blocks: pages written together are cleaned together."""
    superpage_share: float = 0.0
    """Share of the host's address space, from its start, that is mapped by super-pages: pages of all
    planes of a die at one offset, with one map entry. A super-page that is written in part is written
    whole."""
    sector_map: bool = False
    """True if the drive knows which sectors of a page were ever written. A partial write then first reads
    only the written ones among the others, and unwritten sectors do not cross the channel, as in MQSim;
    otherwise it reads the rest of the page, and sends the whole page."""
    map_entry_bytes: int = 4
    """Size of the entry of a page, or a super-page, in the map on flash."""
    map_cache_bytes: int = 0
    """Bytes of the map that the controller's memory holds, the entries used last; 0 for all of it."""
    map_read_bytes: int = 0
    """Bytes that cross the channel when an entry is not in memory: a sector, in MQSim; 0 for its whole
    page of the map, with its spare bytes if those are sent."""
    map_stored: bool = False
    """True if flash holds the whole map before anything is written, from the first plane on, as in
    MQSim; an entry is then read even if its page was never written."""

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise ConfigError(
                f"ftl.allocation is {self.allocation!r}; use an order of the letters C, W, D and P,"
                " such as 'CWDP'"
            )
        for name in ("overprovisioning", "gc_threshold", "gc_hard_threshold"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"ftl.{name} is {value}; it must be at least 0 and below 1")
        whole("ftl.gc_victims", self.gc_victims, 1)
        whole("ftl.gc_least_blocks", self.gc_least_blocks, 2)
        whole("ftl.wear_gap", self.wear_gap, 0)
        whole("ftl.streams", self.streams, 1)
        real("ftl.superpage_share", self.superpage_share, positive=False)
        if self.superpage_share > 1:
            raise ConfigError(
                f"ftl.superpage_share is {self.superpage_share}; it must be at most 1"
            )
        whole("ftl.map_entry_bytes", self.map_entry_bytes, 1)
        whole("ftl.map_cache_bytes", self.map_cache_bytes, 0)
        whole("ftl.map_read_bytes", self.map_read_bytes, 0)
        if 0 < self.map_read_bytes < self.map_entry_bytes:
            raise ConfigError(
                f"ftl.map_read_bytes is {self.map_read_bytes}, less than an entry of"
                f" {self.map_entry_bytes} bytes"
            )
        if 0 < self.map_cache_bytes < self.map_entry_bytes:
            raise ConfigError(
                f"ftl.map_cache_bytes is {self.map_cache_bytes}, which holds no entry of"
                f" {self.map_entry_bytes} bytes"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteCache:
    """Controller memory that completes writes before they are on flash."""

    capacity_bytes: int = 0
    """Capacity, used in whole pages; 0 for no cache."""
    bytes_per_s: int = 6_400_000_000
    """Rate of the memory, which makes one transfer after the other."""
    access_ns: int = 26
    """Time before each transfer."""
    flush_from: float = 0.5
    """Share of the capacity; write-back begins when more pages are dirty ..."""
    flush_to: float = 0.25
    """Share of the capacity; ... and ends when as few are dirty."""
    flush_pages: int = 256
    """Most pages that are being written to flash at the same time."""
    at_once: bool = False
    """True if a page that was not written within the last second starts its program at the moment of its
    write, with the others of its request, without a read of the memory, while other pages stay until
    their places are needed. MQSim does so. Otherwise write-back runs from one mark to the other, and
    each page starts when it has left the memory, after those before it."""
    protected: bool = True
    """True if capacitors last until flash has everything; otherwise a loss of power loses dirty pages,
    and a flush of the host waits for flash."""

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "access_ns"):
            whole(f"cache.{name}", getattr(self, name), 0)
        rate("cache.bytes_per_s", self.bytes_per_s)
        whole("cache.flush_pages", self.flush_pages, 1)
        for name in ("flush_from", "flush_to"):
            real(f"cache.{name}", getattr(self, name), positive=False)
        if not self.flush_to <= self.flush_from <= 1:
            raise ConfigError(
                f"cache.flush_to is {self.flush_to} and cache.flush_from {self.flush_from}; both must be"
                " shares, and flush_to must not exceed flush_from"
            )
