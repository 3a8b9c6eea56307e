"""How fast this session's tiers are, measured through them before the first step."""

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


def measure(
    tiers: dict[str, Tier], *, probe_bytes: int = PROBE_BYTES, lend: Lend = host_memory
) -> Machine:
    """Write and read a little through every tier; the better of two rounds counts.

    Args:
        tiers: By name.
        probe_bytes: How much at a time.
        lend: Memory to write from and to read to, such as the tiers take addresses of.

    Raises:
        TransferError: A tier cannot be written or read: the session would not get far.
    """
    speeds = {name: _measure(tier, probe_bytes, lend) for name, tier in tiers.items()}
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


def _measure(tier: Tier, probe_bytes: int, lend: Lend) -> tuple[float, float, float]:
    nbytes = min(probe_bytes, tier.spec.capacity_bytes)
    with tier.measured(), lend(nbytes) as address:
        rounds = [_round(tier, address, nbytes) for _ in range(2)]
    return max(w for w, _, _ in rounds), max(r for _, r, _ in rounds), min(t for _, _, t in rounds)


def _round(tier: Tier, address: int, nbytes: int) -> tuple[float, float, float]:
    """Write and read bandwidth in bytes/s, and the seconds of one small read."""
    write_s, read_s = _seconds(tier, address, nbytes)
    _, latency_s = _seconds(tier, address, min(nbytes, 4096))
    return nbytes / write_s, nbytes / read_s, latency_s


def _seconds(tier: Tier, address: int, nbytes: int) -> tuple[float, float]:
    """Return the time of a write, and of the read that follows."""
    start = time.perf_counter()
    ticket = tier.write(address, nbytes, keep_alive=None, label="speed probe")
    ticket.written.wait()
    middle = time.perf_counter()
    tier.read(ticket, address, keep_alive=None, priority=Priority.DEMAND).wait()
    end = time.perf_counter()
    tier.discard(ticket)
    return middle - start, end - middle
