"""Measured times of a simulated drive for transfers of several sizes, for planning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.aging import fill
from penstock.lab.ssd.device import Device
from penstock.lab.ssd.drive import Drive
from penstock.lab.ssd.requests import HostRequest

REQUEST_BYTES: Final = 128 * 1024
"""Size of the requests into which a transfer is cut: the limit of many drives (NVMe's MDTS)."""
DEPTH: Final = 32
SIZES: Final = tuple(4096 << each for each in range(0, 15, 2))
"""Transfer sizes: 4 KiB to 64 MiB."""
_SHARED: Final = 1.2
"""Reads and writes share a drive if both together move less than this many times either alone."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one drive."""

    sizes_bytes: tuple[int, ...]
    write_s: tuple[float, ...]
    """Times of one transfer alone, cut into requests."""
    read_s: tuple[float, ...]
    latency_s: float
    """Time of a read of 4 KiB."""
    write_bytes_per_s: float
    """Rate of the largest transfer."""
    read_bytes_per_s: float
    shared: bool
    """True if simultaneous reads and writes slow each other down."""


def measure(device: Device, *, sizes_bytes: Sequence[int] = SIZES) -> Measured:
    """Measure transfers of each size, each on a new drive; reads follow a write of the same data.

    Args:
        device: Device to simulate event by event.
        sizes_bytes: Two or more sizes, increasing.

    Raises:
        ConfigError: The sizes are invalid, or larger than a quarter of the drive.
    """
    sizes = tuple(sizes_bytes)
    if len(sizes) < 2 or sizes[0] < 1 or sorted(set(sizes)) != list(sizes):
        raise ConfigError(f"sizes are {sizes}; they must be two or more, and increase")
    largest = Drive(device).user_bytes // 4
    if sizes[-1] > largest:
        raise ConfigError(f"a transfer of {sizes[-1]} bytes is more than a quarter of the drive")
    read = tuple(_seconds(device, size, (True,)) for size in sizes)
    write = tuple(_seconds(device, size, (False,)) for size in sizes)
    both = _seconds(device, sizes[-1], (True, False))
    latency_s = _seconds(device, 4096, (True,))
    return Measured(
        sizes_bytes=sizes,
        write_s=_rising(write),
        read_s=_rising(read),
        latency_s=latency_s,
        write_bytes_per_s=sizes[-1] / write[-1],
        read_bytes_per_s=sizes[-1] / read[-1],
        shared=2 * sizes[-1] / both < _SHARED * sizes[-1] / min(read[-1], write[-1]),
    )


def _rising(times: Sequence[float]) -> tuple[float, ...]:
    """Make times increase: a page that is written in part may take longer than whole pages."""
    return tuple(max(times[: place + 1]) for place in range(len(times)))


def _seconds(device: Device, nbytes: int, kinds: tuple[bool, ...]) -> float:
    """Return the time from the first request to the last completion, for a transfer of each kind."""
    drive = Drive(device)
    if True in kinds:
        fill(drive.ftl, -(-nbytes // device.geometry.page_bytes))
    begins = (0, -(-nbytes // REQUEST_BYTES) * REQUEST_BYTES)
    flows = [
        (_pieces(is_read, begin, nbytes), DEPTH)
        for is_read, begin in zip(kinds, begins, strict=False)
    ]
    return drive.serve_flows(flows).time_s


def _pieces(is_read: bool, begin: int, nbytes: int) -> Iterator[HostRequest]:
    for offset in range(0, nbytes, REQUEST_BYTES):
        yield HostRequest(is_read, begin + offset, min(REQUEST_BYTES, nbytes - offset))
