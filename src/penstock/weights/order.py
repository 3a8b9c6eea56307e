"""Order in which weights are used, and which of those in memory is needed last.

[Note: order of uses]
    Training uses its weights in the same order in each step, up to small changes, so the order of the
    last step foretells this one's. It is taken as endless: after its end it begins again. What is needed
    last leaves memory first (Belady, "A study of replacement algorithms", 1966), which is the best that
    can be done where the order is known: for forward and backward, one the reverse of the
    other, it keeps what LRU would, and for forward alone, where LRU keeps nothing that helps, it keeps as
    many weights as fit. Passes without gradients, as of evaluation, have orders of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Final

NEVER: Final = 1 << 60
"""Distance of a use that is not foretold."""


class _Pass:
    """Order of one kind of pass, and how far the present one is."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.seen: list[int] = []
        self.at = 0
        self.expect(expected)

    def expect(self, expected: Sequence[int]) -> None:
        self.expected = list(expected)
        self.places: dict[int, list[int]] = {}
        for place, index in enumerate(self.expected):
            self.places.setdefault(index, []).append(place)

    def note(self, index: int) -> None:
        self.seen.append(index)
        places = self.places.get(index)
        if places:
            place = bisect_left(places, self.at)
            self.at = places[place % len(places)] + 1

    def end(self) -> None:
        if self.seen and self.seen != self.expected:
            self.expect(self.seen)
        self.seen = []
        self.at = 0


class UseOrder:
    """Uses of weights, by number. Not thread-safe."""

    def __init__(self) -> None:
        """Know of no weight yet."""
        self._training = _Pass([])
        self._others: dict[Hashable, _Pass] = {}
        self._count = 0
        self._now = self._training

    def add(self, count: int) -> None:
        """Expect so many more weights, until a step shows their order: one after the other, and back."""
        numbers = range(self._count, self._count + count)
        self._count += count
        self._training.expect([*self._training.expected, *numbers, *reversed(numbers)])

    def begin(self, kind: Hashable) -> None:
        """Begin a pass of a kind: ``None`` for training, which continues until ``end``."""
        if self._now is not self._training:
            self._now.end()
        if kind is None:
            self._now = self._training
        else:
            self._now = self._others.setdefault(kind, _Pass(range(self._count)))

    def note(self, index: int) -> None:
        """Note that a weight is used now."""
        self._now.note(index)

    def end(self) -> None:
        """End a step of training: the next is expected to be like it."""
        self._training.end()

    def next_use(self, index: int) -> int:
        """Return the number of uses of others before the next use of a weight, or ``NEVER``."""
        now = self._now
        places = now.places.get(index)
        if not places:
            return NEVER
        place = bisect_left(places, now.at)
        if place < len(places):
            return places[place] - now.at
        return places[0] + len(now.expected) - now.at

    def upcoming(self) -> Iterator[int]:
        """Yield the next uses in their order, as many as a whole pass has."""
        now = self._now
        yield from islice(now.expected, now.at, None)
        yield from islice(now.expected, now.at)
