"""Allocator of ranges of bytes: pure integers, for memory and for file space alike."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.core.units import round_up


class ExtentAllocator:
    """Best-fit allocator over ``[0, capacity_bytes)`` that coalesces at every free. Not thread-safe.

    The smallest free extent that is long enough is used, the lowest one among equals, so that a
    repeating sequence of sizes (a training step) gets the same offsets again.

    Attributes:
        capacity_bytes: End of the range.
        free_bytes: Sum of the free extents.
    """

    def __init__(self, capacity_bytes: int = 0) -> None:
        """Make an allocator with everything free."""
        assert capacity_bytes >= 0, f"capacity of {capacity_bytes} bytes"
        self.capacity_bytes = capacity_bytes
        self.free_bytes = 0
        self._starts: list[int] = []  # sorted
        self._end: dict[int, int] = {}  # by start
        self._by_size: list[tuple[int, int]] = []  # (length, start), sorted
        if capacity_bytes:
            self._insert(0, capacity_bytes)

    @property
    def largest_free_bytes(self) -> int:
        """Length of the longest free extent; 0 if nothing is free."""
        return self._by_size[-1][0] if self._by_size else 0

    def extents(self, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int]]:
        """Iterate over (start, end) of free extents that start in ``[low, high)``; do not modify them."""
        first = bisect_left(self._starts, low)
        last = None if high is None else bisect_left(self._starts, high)
        return ((start, self._end[start]) for start in islice(self._starts, first, last))

    def allocate(self, nbytes: int, alignment: int = 1) -> int | None:
        """Allocate ``nbytes`` at a multiple of ``alignment``; return the offset, or None if none fits."""
        assert nbytes > 0, f"allocation of {nbytes} bytes"
        first = bisect_left(self._by_size, (nbytes, 0))
        for length, start in islice(self._by_size, first, None):
            offset = round_up(start, alignment)
            if offset + nbytes <= start + length:
                self._carve(start, offset, nbytes)
                return offset
        return None

    def take(self, offset: int, nbytes: int) -> None:
        """Allocate exactly ``[offset, offset + nbytes)``, all of which must be free."""
        assert nbytes > 0, f"take of {nbytes} bytes"
        index = bisect_right(self._starts, offset) - 1
        assert index >= 0, f"offset {offset} is not free"
        start = self._starts[index]
        assert offset + nbytes <= self._end[start], f"{nbytes} bytes at {offset} are not free"
        self._carve(start, offset, nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Free ``[offset, offset + nbytes)``, none of which may be free already."""
        start, end = offset, offset + nbytes
        assert nbytes > 0, f"free of {nbytes} bytes"
        assert start >= 0, f"free at {start}"
        assert end <= self.capacity_bytes, f"free up to {end} of {self.capacity_bytes} bytes"
        index = bisect_right(self._starts, start)
        before = self._starts[index - 1] if index else None
        after = self._starts[index] if index < len(self._starts) else None
        assert before is None or self._end[before] <= start, f"{nbytes} at {offset}: freed twice"
        assert after is None or end <= after, f"{nbytes} bytes at {offset} are freed twice"
        gone = []
        if after == end:
            gone.append(end)
            end = self._end[end]
        if before is not None and self._end[before] == start:
            gone.append(before)
            start = before
        self._replace(gone, [(start, end)])

    def grow(self, nbytes: int) -> None:
        """Append ``nbytes`` of free space."""
        offset = self.capacity_bytes
        self.capacity_bytes += nbytes
        self.free(offset, nbytes)

    def _carve(self, start: int, offset: int, nbytes: int) -> None:
        end = self._end[start]
        rest = [(start, offset), (offset + nbytes, end)]
        self._replace([start], [(low, high) for low, high in rest if low < high])

    def _replace(self, gone: Sequence[int], new: Sequence[tuple[int, int]]) -> None:
        """Replace free ranges, given by their starts, by others; none if a signal's handler raises."""
        before = [(start, self._end[start]) for start in gone]
        try:
            for each in before:
                self._remove(*each)
            for each in new:
                self._insert(*each)
        except BaseException:
            for start, _ in new:
                self._end.pop(start, None)
            self._end.update(before)
            self._starts[:] = sorted(self._end)
            self._by_size[:] = sorted((end - start, start) for start, end in self._end.items())
            self.free_bytes = sum(nbytes for nbytes, _ in self._by_size)
            raise

    def _insert(self, start: int, end: int) -> None:
        insort(self._starts, start)
        insort(self._by_size, (end - start, start))
        self._end[start] = end
        self.free_bytes += end - start

    def _remove(self, start: int, end: int) -> None:
        del self._end[start]
        del self._starts[bisect_left(self._starts, start)]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
        self.free_bytes -= end - start
