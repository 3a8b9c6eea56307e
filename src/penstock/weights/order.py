"""Order in which weights are used, and which of them stay in memory until their next use.

[Note: order of uses]
    Training uses its weights in the same order in each step, up to small changes, so the order of the
    last step foretells this one's. It is taken as endless: after its end it begins again. From it follow
    those that stay (:mod:`penstock.plan.weight_stays`); the others leave after each use. Updates run in
    threads of their own, now before and now after a use of another weight, so a use may be that of a
    place a little before the present one. If there is no room for something that was not foretold, what
    is needed last leaves first (Belady, "A study of replacement algorithms", 1966). Passes without
    gradients, as of evaluation, have orders of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Final

from penstock.plan.weight_stays import WeightStays, weight_stays

NEVER: Final = 1 << 60
"""Distance of a use that is not foretold."""
LATE: Final = 8
"""Uses of others that may come before one that was foretold ahead of them."""


class _Pass:
    """Order of one kind of pass, and how far the present one is."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.seen: list[int] = []
        self.last: dict[int, int] = {}
        self.at = 0
        self.expect(expected)

    def expect(self, expected: Sequence[int], *, is_seen: bool = False) -> None:
        self.is_seen = is_seen
        self.expected = list(expected)
        self.places: dict[int, list[int]] = {}
        for place, index in enumerate(self.expected):
            self.places.setdefault(index, []).append(place)
        self.stays = WeightStays(frozenset(self.places), (True,) * len(expected), 0, 0)
        self.limit_bytes: int | None = None

    def choose(self, sizes: Sequence[int], changed: Sequence[bool], limit_bytes: int) -> None:
        if self.is_seen:
            self.limit_bytes = limit_bytes
            self.stays = weight_stays(self.expected, sizes, changed, limit_bytes)

    def note(self, index: int) -> bool:
        self.seen.append(index)
        places = self.places.get(index)
        if not places:
            return False
        last = self.last.get(index, -1)
        near = places[bisect_left(places, self.at - LATE) :]
        place = next((each for each in near if each >= self.at or each > last), None)
        if place is None:
            place = self.at = places[0]
        self.last[index] = place
        self.at = max(self.at, place + 1)
        return self.stays.until_next[place]

    def end(self) -> None:
        if self.seen and (self.seen != self.expected or not self.is_seen):
            self.expect(self.seen, is_seen=True)
        self.seen = []
        self.last = {}
        self.at = 0


class UseOrder:
    """Uses of weights, by number. Not thread-safe."""

    def __init__(self) -> None:
        """Know of no weight yet."""
        self._training = _Pass([])
        self._others: dict[Hashable, _Pass] = {}
        self._count = 0
        self._now = self._training

    @property
    def is_seen(self) -> bool:
        """True if a pass of the present kind has shown its order; before, all weights are to stay."""
        return self._now.is_seen

    def add(self, count: int) -> None:
        """Expect so many more weights, until a step shows their order: one after the other, and back."""
        numbers = range(self._count, self._count + count)
        self._count += count
        self._training.expect([*self._training.expected, *numbers, *reversed(numbers)])

    @property
    def kept(self) -> frozenset[int]:
        """Weights that stay always in the present kind of pass."""
        return self._now.stays.kept

    @property
    def chosen_limit_bytes(self) -> int | None:
        """Memory for which those that stay were chosen; None: they are not yet."""
        return self._now.limit_bytes

    def begin(self, kind: Hashable) -> bool:
        """Begin a pass of a kind: ``None`` for training, which continues until ``end``.

        Returns:
            Whether the pass before was of another kind.
        """
        before = self._now
        if before is not self._training:
            before.end()
        if kind is None:
            self._now = self._training
        else:
            self._now = self._others.setdefault(kind, _Pass(range(self._count)))
        return self._now is not before

    def choose(self, sizes: Sequence[int], changed: Sequence[bool], limit_bytes: int) -> None:
        """Choose the weights that stay in this kind of pass, once its order was seen.

        Args:
            sizes: Bytes of each weight.
            changed: Whether training changes it.
            limit_bytes: Memory for weights.
        """
        if self._now is not self._training:
            changed = [False] * len(sizes)
        self._now.choose(sizes, changed, limit_bytes)

    def note(self, index: int) -> bool:
        """Note that a weight is used now; return whether it stays until its next use."""
        return self._now.note(index)

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
