"""Tiers in host memory: bytes rest in blocks of an arena, or at places that belong to the caller."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, NoSpaceError
from penstock.core.locks import Lock
from penstock.core.units import format_bytes, round_down, round_up
from penstock.io.copies import MEMORY, CopyEngine
from penstock.io.engine import File
from penstock.io.mapping import PAGE_BYTES
from penstock.observe.recorder import Recorder
from penstock.store.arena import Arena
from penstock.store.base import Tier, TierSpec
from penstock.store.pool import Block


@dataclass(frozen=True, slots=True, eq=False)
class HostPlace:
    """Place of one ticket's bytes."""

    blocks: tuple[Block, ...]
    """In order; the last may be longer than the data."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes of the tier's capacity."""
        return sum(block.nbytes for block in self.blocks)

    def ranges(self, nbytes: int) -> Iterator[tuple[File, int, int]]:
        """Yield memory, address and length of each part of ``nbytes``, in the order of memory."""
        for block in self.blocks:
            yield MEMORY, block.address, min(block.nbytes, nbytes)
            nbytes -= block.nbytes

    def __str__(self) -> str:
        more = f" and {len(self.blocks) - 1} more" if len(self.blocks) > 1 else ""
        return f"{self.blocks[0]!r}{more}"


class HostTier(Tier):
    """Holds bytes in an arena, copied there and back by one thread. Any address will do.

    The arena may serve others as well, and is not closed with the tier. What fits no free range of
    it in one piece is put into several. Memory that the arena has not touched before costs the
    thread that writes its page faults, once.
    """

    def __init__(
        self, arena: Arena, *, capacity_bytes: int, recorder: Recorder, name: str = "host"
    ) -> None:
        """Make an empty tier; memory is taken from the arena as it is needed.

        Args:
            arena: Where the bytes rest.
            capacity_bytes: The most to hold. What is written takes whole pages. The arena, and the
                budget that it is under, may be full before.
            recorder: Gets counters and spans.
            name: As in plans, logs and traces.

        Raises:
            ConfigError: The capacity is less than a page, or more than the arena's.
        """
        if not PAGE_BYTES <= capacity_bytes <= arena.capacity_bytes:
            raise ConfigError(
                f"tier {name}: a capacity of {capacity_bytes} bytes is not between one page"
                f" ({PAGE_BYTES} bytes) and its arena's capacity ({arena.capacity_bytes} bytes)"
            )
        spec = TierSpec(
            name=name,
            kind="host",
            capacity_bytes=round_down(capacity_bytes, PAGE_BYTES),
            granule_bytes=1,  # copies need no alignment, so a window is exactly its data
            where="host memory",
        )
        self._copies = CopyEngine(f"penstock-{name}")
        super().__init__(spec, engine=self._copies, recorder=recorder)
        self.arena = arena
        self._space_lock = Lock()
        self._taken_bytes = 0
        self._places: set[HostPlace] = set()

    @property
    def taken_bytes(self) -> int:
        """Bytes of the capacity in use: held bytes, each ticket's rounded up to a page."""
        return self._taken_bytes

    def _discard(self, place: HostPlace) -> None:
        with self._space_lock:
            if place not in self._places:  # close was quicker
                return
            self._places.remove(place)
            self._taken_bytes -= place.nbytes
        for block in place.blocks:
            block.free()

    def _close(self) -> None:
        self._copies.close()
        with self._space_lock:
            places, self._places = self._places, set()
            self._taken_bytes = 0
        for place in places:
            for block in place.blocks:
                block.free()

    def _allocate(self, nbytes: int) -> HostPlace:
        pages = round_up(nbytes, PAGE_BYTES)
        with self._space_lock:
            free = self.spec.capacity_bytes - self._taken_bytes
            if pages > free:
                raise self._no_space(nbytes, free, "of the tier's capacity; raise that")
            self._taken_bytes += pages
        blocks: list[Block] = []
        try:
            self._fill(blocks, pages)
        except BaseException:
            for block in blocks:
                block.free()
            with self._space_lock:
                self._taken_bytes -= pages
            raise
        place = HostPlace(tuple(blocks))
        with self._space_lock:
            self._places.add(place)
        return place

    def _fill(self, blocks: list[Block], nbytes: int) -> None:
        """Allocate ``nbytes``, in as few and as long blocks as halving finds.

        No memory is freed for it: those that free memory write to this tier.
        """
        length = left = nbytes
        while left:
            free = self.arena.capacity_bytes - self.arena.used_bytes
            fits = left <= free
            block = self.arena.allocate(min(length, left), wait=False) if fits else None
            if block is not None:
                blocks.append(block)
                left -= block.nbytes
            elif length <= PAGE_BYTES or not fits:
                raise self._no_space(nbytes, free, "in its arena, or less by the memory budget")
            else:
                length = round_up(length // 2, PAGE_BYTES)

    def _no_space(self, nbytes: int, free: int, of_what: str) -> NoSpaceError:
        return NoSpaceError(
            errno=errno.ENOSPC,
            op="allocate",
            path=self.spec.where,
            offset_bytes=0,
            nbytes=nbytes,
            free_bytes=free,
            advice=f"tier {self.spec.name!r} has {format_bytes(free)} left {of_what}",
        )


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlace:
    """Host memory that belongs to the caller."""

    memory: NDArray[np.uint8]
    """The memory, contiguous."""
    pinned: Any = None
    """The pinned buffer that it is, for who copies to a device from there; None: it is not pinned."""

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.memory.ctypes.data

    def ranges(self, nbytes: int) -> Iterator[tuple[File, int, int]]:
        """Yield memory, address and length of ``nbytes``, or of all that there is."""
        yield MEMORY, self.address, min(nbytes, self.memory.nbytes)

    def __str__(self) -> str:
        return f"address {self.address:#x} of host memory"


class MemoryTier(Tier):
    """Bytes in host memory that belongs to the caller, which writes with ``at=place``.

    One thread copies them. It holds a place as long as a transfer of it is in flight.
    """

    def __init__(self, name: str) -> None:
        """Make a tier that reports its copies to nobody.

        Args:
            name: As in errors and traces.
        """
        self._copies = CopyEngine(f"penstock-{name}")
        spec = TierSpec(
            name=name, kind="host", capacity_bytes=0, granule_bytes=1, where="host memory"
        )
        super().__init__(spec, engine=self._copies, recorder=Recorder(event_bytes=0))

    def _allocate(self, nbytes: int) -> MemoryPlace:
        raise AssertionError(f"{nbytes} bytes were written to {self.spec.name} at no place")

    def _discard(self, place: MemoryPlace) -> None:
        return  # it is the caller's

    def _close(self) -> None:
        self._copies.close()
