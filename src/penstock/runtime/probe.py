"""How fast this session's tiers are, measured through them before the first step.

[Note: measured at once]
    Ranks on one machine share its SSDs and its memory. What each of them gets is measured if all of them
    write, and read, at the same time: each meets the others before every transfer. Of its rounds the
    slower one counts, because a faster one ran while others had ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from penstock.core.units import MIB
from penstock.io.engine import Priority
from penstock.plan.machine import Machine
from penstock.store.arena import lone_block
from penstock.store.base import Tier

PROBE_BYTES = 16 * MIB
"""Long enough to keep every worker busy; four of these are written in all."""
MEASUREMENT = "bandwidth measurement"
"""Owner of the memory that a measurement takes, in the account of the process."""
ASSUMED_BYTES_PER_S = 1e9
"""For a tier that the session has not got: no plan uses it."""

Lend: TypeAlias = Callable[[int], AbstractContextManager[int]]
"""Lends so many bytes of memory, by their address."""


@contextmanager
def host_memory(nbytes: int) -> Iterator[int]:
    """Lend memory as transfers use it."""
    block = lone_block(nbytes, owner=MEASUREMENT)
    try:
        yield block.address
    finally:
        block.free()


class Meeting:
    """Meets the other ranks on this machine; see [Note: measured at once].

    Attributes:
        ranks: Number of ranks that have met each time; 1 if this rank is, or was left, alone.
    """

    def __init__(self, ranks: int = 1, meet: Callable[[str], bool] | None = None) -> None:
        """Begin.

        Args:
            ranks: Number of ranks on this machine.
            meet: Waits for them at the place that it is told; returns False if they do not come.
        """
        self.ranks = ranks
        self._meet = meet
        self._count = 0

    def meet(self) -> None:
        """Wait for the others, but never again after they have not come."""
        if self._meet is None or self.ranks == 1:
            return
        self._count += 1
        if not self._meet(f"measurement {self._count}"):
            self.ranks = 1


def measure(
    tiers: dict[str, Tier],
    *,
    probe_bytes: int = PROBE_BYTES,
    lend: Lend = host_memory,
    meeting: Meeting | None = None,
) -> Machine:
    """Write and read a little through every tier; the better of two rounds counts, if it was alone.

    Args:
        tiers: By name.
        probe_bytes: How much at a time.
        lend: Memory to write from and to read to, such as the tiers take addresses of.
        meeting: With the other ranks on this machine, which measure at the same time.

    Raises:
        TransferError: A tier cannot be written or read: the session would not get far.
    """
    together = Meeting() if meeting is None else meeting
    speeds = {name: _measure(tier, probe_bytes, lend, together) for name, tier in tiers.items()}
    none = (ASSUMED_BYTES_PER_S, ASSUMED_BYTES_PER_S, 0.0)
    flash, host = speeds.get("flash", none), speeds.get("host", none)
    return Machine(
        name="this machine",
        flash_write_bytes_per_s=flash[0],
        flash_read_bytes_per_s=flash[1],
        flash_latency_s=flash[2],
        host_write_bytes_per_s=host[0],
        host_read_bytes_per_s=host[1],
    )


def _measure(
    tier: Tier, probe_bytes: int, lend: Lend, meeting: Meeting
) -> tuple[float, float, float]:
    nbytes = min(probe_bytes, tier.spec.capacity_bytes)
    with lend(nbytes) as address, tier.measured():
        rounds = [_round(tier, address, nbytes, meeting) for _ in range(2)]
    best = max if meeting.ranks == 1 else min
    return (
        best(w for w, _, _ in rounds),
        best(r for _, r, _ in rounds),
        min(t for _, _, t in rounds),
    )


def _round(tier: Tier, address: int, nbytes: int, meeting: Meeting) -> tuple[float, float, float]:
    """Write and read bandwidth in bytes/s, and the seconds of one small read."""
    write_s, read_s = _seconds(tier, address, nbytes, meeting)
    _, latency_s = _seconds(tier, address, min(nbytes, 4096), Meeting())
    return nbytes / write_s, nbytes / read_s, latency_s


def _seconds(tier: Tier, address: int, nbytes: int, meeting: Meeting) -> tuple[float, float]:
    """Return the time of a write, and of the read that follows."""
    meeting.meet()
    start = time.perf_counter()
    ticket = tier.write(address, nbytes, keep_alive=None, label="speed probe")
    ticket.written.wait()
    write_s = time.perf_counter() - start
    meeting.meet()
    start = time.perf_counter()
    tier.read(ticket, address, keep_alive=None, priority=Priority.DEMAND).wait()
    read_s = time.perf_counter() - start
    tier.discard(ticket)
    return write_s, read_s
