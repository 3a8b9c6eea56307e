"""Map from one time axis to another on which operators take other times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain


class TimeMap:
    """Piecewise linear map of times: gaps keep their length, times in operators their fraction of it."""

    def __init__(self, spans: Iterable[tuple[int, int, int, int]]) -> None:
        """Take each operator's old start and end and new start and end, in order, in ns.

        No two overlap, the first starts when it did, and the gaps between them are as long as they were.
        """
        starts, ends, new_starts, new_ends = zip(*spans, strict=True)
        self._old: list[int] = list(chain.from_iterable(zip(starts, ends, strict=True)))
        self._new: list[int] = list(chain.from_iterable(zip(new_starts, new_ends, strict=True)))

    def __call__(self, at_ns: int) -> int:
        """Return the time on the new axis of a time on the old one."""
        place = bisect_left(self._old, at_ns)
        if place == len(self._old):
            return self._new[-1] + at_ns - self._old[-1]
        if not place % 2 or at_ns == self._old[place]:  # before an operator, or at its end
            return self._new[place] + at_ns - self._old[place]
        begin_ns, took_ns = self._old[place - 1], self._old[place] - self._old[place - 1]
        new_ns = self._new[place] - self._new[place - 1]
        return self._new[place - 1] + (at_ns - begin_ns) * new_ns // took_ns
