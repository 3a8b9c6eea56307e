"""Requests of a host to a drive, and their sources."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.lab.ssd.cells import SECTOR_BYTES
from penstock.lab.ssd.commands import CommandOwner


class HostRequest(CommandOwner):
    """One read or write; a write of no bytes is a flush, which completes when flash has all earlier data.

    Attributes:
        arrival_ps: Time of arrival; None for as soon as the queue has room.
        began_ps: Time at which it entered the queue.
        flow: Number of its flow among the host's.
        cached: True if the write cache serves it, if the drive has one.
    """

    __slots__ = ("arrival_ps", "began_ps", "cached", "flow", "nbytes", "offset_bytes")

    def __init__(
        self,
        is_read: bool,
        offset_bytes: int,
        nbytes: int,
        arrival_ps: int | None = None,
        *,
        stream: int = 0,
    ) -> None:
        super().__init__(is_read, stream)
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        self.arrival_ps = arrival_ps
        self.began_ps = self.flow = 0
        self.cached = True

    @property
    def is_flush(self) -> bool:
        """True for a flush."""
        return not self.nbytes and not self.is_read


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A synthetic workload; sizes in bytes."""

    requests: int
    read_share: float = 1.0
    request_bytes: int = 4096
    queue_depth: int = 1
    """Number of requests that the host keeps in the queue."""
    random: bool = True
    """True for random aligned offsets in the working set; False for a sequence that wraps around it."""
    start_bytes: int = 0
    """Start of sequential requests; it decides which of them straddle pages of planes and dies."""
    align_bytes: int = 0
    """Alignment of random offsets; 0 for the request size."""
    working_set: float = 0.5
    """Share of the host's address space."""
    filled: float = 0.0
    """Share of the host's address space that was written, in order, before time begins."""
    hot_share: float = 0.0
    """Share of random requests that go to the hot part of the working set, its start; they use another
    stream than the others if ``ftl.streams`` has two."""
    hot_set: float = 0.1
    """Share of the working set that is hot."""
    flush_every: int = 0
    """Number of writes between the host's flushes, like those of a file system; 0 for no flushes."""
    skip: int = 0
    """Requests that complete before the measurement starts."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("requests", "queue_depth"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"workload: {name} is {getattr(self, name)}; it must be 1 or more"
                )
        if not 0 <= self.skip < self.requests:
            raise ConfigError(
                f"workload: skip is {self.skip}; it must be below the {self.requests} requests"
            )
        if self.request_bytes < 1:
            raise ConfigError(
                f"workload: request_bytes is {self.request_bytes}; it must be {SECTOR_BYTES} or more"
            )
        if self.request_bytes % SECTOR_BYTES:
            raise ConfigError(
                f"workload: request_bytes is {self.request_bytes}; use a multiple of {SECTOR_BYTES}"
            )
        if self.align_bytes < 0 or self.align_bytes % SECTOR_BYTES:
            raise ConfigError(
                f"workload: align_bytes is {self.align_bytes}; it must be a multiple of {SECTOR_BYTES}"
            )
        if self.start_bytes < 0 or self.start_bytes % SECTOR_BYTES:
            raise ConfigError(
                f"workload: start_bytes is {self.start_bytes}; it must be a multiple of {SECTOR_BYTES}"
            )
        if self.flush_every < 0:
            raise ConfigError(f"workload: flush_every is {self.flush_every}; it must be 0 or more")
        shares = {"read_share": 0, "filled": 0, "working_set": 1e-12, "hot_share": 0, "hot_set": 0}
        for name, least in shares.items():
            if not least <= getattr(self, name) <= 1:
                meant = "a share above 0 and up to 1" if least else "a share from 0 to 1"
                raise ConfigError(f"workload: {name} is {getattr(self, name)}; it must be {meant}")

    def __iter__(self) -> Iterator[HostRequest]:
        raise TypeError("a workload needs the size of a drive: use its stream(user_bytes)")

    def stream(self, user_bytes: int) -> Iterator[HostRequest]:
        """Return its requests, for a drive with ``user_bytes`` that the host can address.

        Raises:
            ConfigError: The working set is smaller than one request.
        """
        room = int(user_bytes * self.working_set) - self.request_bytes
        room -= 0 if self.random else self.start_bytes
        if room < 0:
            raise ConfigError(
                f"workload: a working set of {self.working_set} of {user_bytes} bytes has no room for a"
                f" request of {self.request_bytes} bytes after its start"
            )
        return self._stream(room)

    def _stream(self, room_bytes: int) -> Iterator[HostRequest]:
        chance = random.Random(self.seed)
        align = self.align_bytes if self.random and self.align_bytes else self.request_bytes
        places = room_bytes // align + 1
        start = 0 if self.random else self.start_bytes
        hot, size, writes = int(places * self.hot_set), self.request_bytes, 0
        for number in range(self.requests):
            stream = 0
            if not self.random:
                place = number % places
            elif self.hot_share and hot:
                stream = int(chance.random() < self.hot_share)
                least, room = (0, hot) if stream else (hot, places - hot)
                place = least + int(chance.random() * room)
            else:
                place = int(chance.random() * places)
            is_read = self.read_share == 1 or chance.random() < self.read_share
            yield HostRequest(is_read, start + place * align, size, stream=stream)
            writes += not is_read
            if self.flush_every and not is_read and not writes % self.flush_every:
                yield HostRequest(False, 0, 0)
