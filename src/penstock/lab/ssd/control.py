"""What a controller is set to: the flash translation layer, and the write cache."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.checks import rate, real, whole


class Victim(enum.StrEnum):
    """Which block garbage collection cleans."""

    GREEDY = "greedy"
    """The one with the fewest valid pages; the oldest of several."""
    RANDOM_GREEDY = "random-greedy"
    """The greediest of a random few (d-choices; MQSim's RGA)."""
    FIFO = "fifo"
    """The one that was filled first."""
    COST_BENEFIT = "cost-benefit"
    """The largest (1 - u) / 2u * age (Rosenblum and Ousterhout, SOSP 1991)."""


ALLOCATIONS: Final = tuple(
    a + b + c + d
    for a in "CWDP"
    for b in "CWDP"
    for c in "CWDP"
    for d in "CWDP"
    if len({a, b, c, d}) == 4
)
"""In which order consecutive pages go to Channels, ways (chips, W), Dies and Planes: the first varies
fastest (Tavakkol et al., TOMPECS 2016)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ftl:
    """The flash translation layer: where pages go, and which blocks are cleaned."""

    allocation: str
    """One of the 24 orders, as ``CWDP``; the first letter varies fastest."""
    victim: Victim
    overprovisioning: float
    """Share of all blocks that the host cannot address."""
    gc_threshold: float
    """Garbage collection begins in a plane below this share of free blocks."""
    gc_least_blocks: int
    """It also does below so many, and below as many the plane takes no writes from the host."""
    gc_victims: int
    """Blocks of a plane that are cleaned at the same time, at most."""
    gc_when_filled: bool = False
    """Whether garbage collection looks for one victim when a block has been filled, by the host or with
    what is moved, and only then, and draws random victims from the erased blocks as well; the next block
    to fill is open already, and one for the map. As in MQSim; else it looks for victims with every page,
    and blocks are opened when they are wanted."""
    gc_preemptible: bool = False
    """Whether what the host asks for goes before garbage collection, on dies (or chips) none of whose
    planes is short of erased blocks. What is under way is not stopped for it."""
    gc_hard_threshold: float = 0.005
    """A plane is short of them below this share of free blocks, and without any."""
    least_worn_first: bool = False
    """Dynamic wear levelling: of the erased blocks the one with the fewest erases is filled next."""
    wear_gap: int = 0
    """Static wear levelling: a block that lags so many erases behind the most worn of its plane is
    cleaned in turn with the victims, whatever it holds; 0: never."""
    levels_planes: bool = False
    """Whether states that dies update change places with the gradient's plane now and then, so that all
    planes of a die wear alike; a step on the dies takes 2.6 % longer for it. The engine of drives has
    nothing to do for it."""
    streams: int = 1
    """Of the host, each with blocks of its own: what is written together is cleaned together."""
    superpage_share: float = 0.0
    """Of what the host can address, from its start, mapped by super-pages: pages of all planes of a die
    at one offset, with one entry of the map. One that is written in part is written whole."""
    sector_map: bool = False
    """Whether it is known which sectors of a page were ever written. Of a page written in part, only
    those of the others are read first that were, and what is programmed crosses the channel without them,
    as in MQSim; else the rest of the page is read, and the whole of it sent."""
    map_entry_bytes: int = 4
    """Of a page, or a super-page, in the map that lies on flash."""
    map_cache_bytes: int = 0
    """Of the map that is in the controller's memory at once, the entries used last; 0: all of it."""
    map_read_bytes: int = 0
    """That cross the channel when an entry is not in memory: a sector, in MQSim; 0: its whole page of the
    map, with its spare bytes where those are sent."""
    map_stored: bool = False
    """Whether flash has all of the map before anything was written, from the first plane on, as in MQSim:
    an entry is then read even if it is of a page that nobody has written."""

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise ConfigError(
                f"ftl.allocation is {self.allocation!r}; it is an order of the letters C, W, D and P,"
                " as 'CWDP'"
            )
        for name in ("overprovisioning", "gc_threshold", "gc_hard_threshold"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"ftl.{name} is {value}, it must be at least 0 and below 1")
        whole("ftl.gc_victims", self.gc_victims, 1)
        whole("ftl.gc_least_blocks", self.gc_least_blocks, 2)
        whole("ftl.wear_gap", self.wear_gap, 0)
        whole("ftl.streams", self.streams, 1)
        real("ftl.superpage_share", self.superpage_share, positive=False)
        if self.superpage_share > 1:
            raise ConfigError(f"ftl.superpage_share is {self.superpage_share}, it is at most 1")
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
    """Memory of the controller in which writes are done before flash has them."""

    capacity_bytes: int = 0
    """In whole pages; 0: there is none."""
    bytes_per_s: int = 6_400_000_000
    """Of the memory, one transfer after the other."""
    access_ns: int = 26
    """Before each transfer."""
    flush_from: float = 0.5
    """Pages that flash has not are written when they are a larger share of the capacity than this..."""
    flush_to: float = 0.25
    """...until they are this share of it."""
    flush_pages: int = 256
    """On their way to flash at the same time, at most."""
    at_once: bool = False
    """Whether a page that was not written within the last second starts its program in the instant in
    which its write comes, with the others of its request, and memory is not read for it; others stay
    until their places are wanted. As in MQSim; else pages go to flash from one mark to the other, and
    each starts when it has left the memory, behind those before it."""
    protected: bool = True
    """Whether capacitors last until flash has everything: else a loss of power loses what it has not, and
    a flush of the host waits for flash."""

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "access_ns"):
            whole(f"cache.{name}", getattr(self, name), 0)
        rate("cache.bytes_per_s", self.bytes_per_s)
        whole("cache.flush_pages", self.flush_pages, 1)
        for name in ("flush_from", "flush_to"):
            real(f"cache.{name}", getattr(self, name), positive=False)
        if not self.flush_to <= self.flush_from <= 1:
            raise ConfigError(
                f"cache.flush_to is {self.flush_to} and cache.flush_from {self.flush_from}: these are"
                " shares, the first no larger"
            )
