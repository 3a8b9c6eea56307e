"""Transfer times of a drive by size, which one bandwidth does not describe."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from penstock.core.errors import ConfigError


@dataclass(frozen=True)
class Service:
    """Times of single transfers of some sizes, interpolated linearly between them.

    ``penstock ssd machine`` measures one on a simulated drive.
    """

    sizes_bytes: tuple[int, ...]
    """Transfer sizes in ascending order."""
    write_s: tuple[float, ...]
    """Time of a write of each size, from request to end."""
    read_s: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = {len(self.sizes_bytes), len(self.write_s), len(self.read_s)}
        if len(counts) != 1 or len(self.sizes_bytes) < 2:
            raise ConfigError(
                "flash_service: it needs a write and a read of each of two sizes or more"
            )
        rising = [one < other for one, other in pairwise(self.sizes_bytes)]
        if self.sizes_bytes[0] < 1 or not all(rising):
            raise ConfigError(f"flash_service: sizes are {self.sizes_bytes}, they must grow from 1")
        for name in ("write_s", "read_s"):
            times = getattr(self, name)
            grows = all(one <= other for one, other in pairwise(times))
            if not all(map(math.isfinite, times)) or times[0] <= 0 or not grows:
                raise ConfigError(
                    f"flash_service: {name} is {times}, it must be positive and not fall with the size"
                )

    def seconds(self, nbytes: int, *, writing: bool) -> float:
        """Return the time of one transfer: constant below the least size, then extrapolated."""
        sizes, times = self.sizes_bytes, self.write_s if writing else self.read_s
        if nbytes <= sizes[0]:
            return times[0]
        place = min(bisect_left(sizes, nbytes), len(sizes) - 1)
        size, before = sizes[place], sizes[place - 1]
        pace = (times[place] - times[place - 1]) / (size - before)
        return times[place - 1] + (nbytes - before) * pace
