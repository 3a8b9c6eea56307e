"""Exact sums over time in bounded memory: busy time, and the level of a memory.

Both use integers only (nanoseconds, bytes, byte-nanoseconds), so that no rounding errors accumulate
over a run of days. Neither is thread-safe: the recorder holds its lock around them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Final

MAX_BURSTS: Final = 1024
"""Maximum number of bursts that one :class:`BusyTime` keeps individually."""


class BusyTime:
    """Length of the union of intervals that arrive in any order.

    Overlapping transfers share a device, so bandwidth is bytes divided by the time during which *any*
    of them was running, which is this union.

    Disjoint bursts are kept as two sorted lists. Beyond :data:`MAX_BURSTS` the older half is folded
    into the total; a later interval that reaches back into the folded time counts only after it. As
    intervals are recorded when they end, such an interval would have to span 512 idle periods.
    """

    __slots__ = ("_ends", "_folded_until_ns", "_starts", "total_ns")

    def __init__(self) -> None:
        self.total_ns = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._folded_until_ns: int | None = None

    def add(self, start_ns: int, end_ns: int) -> None:
        """Count ``[start_ns, end_ns)``; an interval that ends before it starts is empty."""
        if end_ns <= start_ns:
            return
        ends = self._ends
        if not ends or start_ns > ends[-1]:
            self._append(start_ns, end_ns)
        elif start_ns >= self._starts[-1]:
            if end_ns > ends[-1]:
                self.total_ns += end_ns - ends[-1]
                ends[-1] = end_ns
        else:
            self._merge(start_ns, end_ns)

    def _append(self, start_ns: int, end_ns: int) -> None:
        self.total_ns += end_ns - start_ns
        self._starts.append(start_ns)
        self._ends.append(end_ns)
        if len(self._ends) > MAX_BURSTS:
            self._fold()

    def _merge(self, start_ns: int, end_ns: int) -> None:
        if self._folded_until_ns is not None and start_ns < self._folded_until_ns:
            start_ns = self._folded_until_ns
            if end_ns <= start_ns:
                return
        starts, ends = self._starts, self._ends
        first = bisect_left(ends, start_ns)
        last = bisect_right(starts, end_ns)
        if first < last:
            start_ns = min(start_ns, starts[first])
            end_ns = max(end_ns, ends[last - 1])
        known_ns = sum(ends[first:last]) - sum(starts[first:last])
        self.total_ns += end_ns - start_ns - known_ns
        starts[first:last] = [start_ns]
        ends[first:last] = [end_ns]
        if len(ends) > MAX_BURSTS:
            self._fold()

    def _fold(self) -> None:
        half = len(self._ends) // 2
        self._folded_until_ns = self._ends[half - 1]
        del self._starts[:half]
        del self._ends[:half]


class LevelMeter:
    """Level of one memory: present, peak, and average over time.

    Attributes:
        current_bytes: Latest sample.
        peak_bytes: Largest sample.
        window_peak_bytes: Largest level since ``open_window``.
        area_byte_ns: Integral of the level over time, up to ``last_ns``.
        first_ns: Time of the first sample.
        last_ns: Time of the latest sample.
    """

    __slots__ = (
        "area_byte_ns",
        "current_bytes",
        "first_ns",
        "last_ns",
        "peak_bytes",
        "window_peak_bytes",
    )

    def __init__(self, now_ns: int) -> None:
        self.current_bytes = 0
        self.peak_bytes = 0
        self.window_peak_bytes = 0
        self.area_byte_ns = 0
        self.first_ns = now_ns
        self.last_ns = now_ns

    def sample(self, now_ns: int, nbytes: int) -> None:
        """Set the level to ``nbytes`` from ``now_ns`` on; ``now_ns`` never goes back."""
        self.area_byte_ns += self.current_bytes * (now_ns - self.last_ns)
        self.last_ns = now_ns
        self.current_bytes = nbytes
        if nbytes > self.window_peak_bytes:
            self.window_peak_bytes = nbytes
            self.peak_bytes = max(self.peak_bytes, nbytes)

    def area_until(self, now_ns: int) -> int:
        """Return the integral of the level, in byte-nanoseconds, from the first sample to ``now_ns``."""
        return self.area_byte_ns + self.current_bytes * (now_ns - self.last_ns)

    def open_window(self) -> None:
        """Begin a new measurement of ``window_peak_bytes`` at the present level."""
        self.window_peak_bytes = self.current_bytes
