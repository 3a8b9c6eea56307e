"""Order in which weights are used, and which of them stay in memory until their next use.

[Note: order of uses]
    Training uses its weights in the same order in each step, up to small changes, so the order of the
    last step foretells this one's. It is taken as endless: after its end it begins again. Updates run in
    threads of their own, now before and now after a use of another weight, so a use may be that of a
    place a little before the present one. Passes without gradients, as of evaluation, have orders of
    their own.

    Once two passes have used the same weights equally often, those that stay are chosen
    (:mod:`penstock.plan.weight_stays`), and each other one leaves after its use. Where passes differ, as
    those of experts or of several models in turn, and where a weight is used that was not foretold,
    weights stay until there is no room. Then what is needed last leaves first (Belady, "A study of
    replacement algorithms", 1966).
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
"""A use that comes so many places later than foretold still counts as that use."""


class _Pass:
    """Order of one kind of pass, and how far the present one is."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.seen: list[int] = []
        self.last: dict[int, int] = {}
        self.at = 0
        self.expect(expected)

    def expect(self, expected: Sequence[int], *, is_seen: bool = False) -> None:
        self.is_seen = is_seen
        self.is_steady = False
        self.has_strayed = False
        self.expected = list(expected)
        self.places: dict[int, list[int]] = {}
        for place, index in enumerate(self.expected):
            self.places.setdefault(index, []).append(place)
        self.stays = WeightStays(frozenset(self.places), (True,) * len(expected), 0, 0)
        self.chosen_for: tuple[Sequence[int], Sequence[bool], int] | None = None

    def choose(self, sizes: Sequence[int], changed: Sequence[bool], limit_bytes: int) -> None:
        chosen_for = (sizes, changed, limit_bytes)
        if self.is_steady and self.chosen_for != chosen_for:
            self.chosen_for = chosen_for
            self.stays = weight_stays(self.expected, sizes, changed, limit_bytes)

    def note(self, index: int) -> bool:
        self.seen.append(index)
        places = self.places.get(index)
        if not places:
            self.has_strayed = True
            return False
        last = self.last.get(index, -1)
        near = places[bisect_left(places, self.at - LATE) :]
        place = next((each for each in near if each >= self.at or each > last), None)
        if place is None:
            place = self.at = places[0]
            self.has_strayed = True
        self.has_strayed |= place > self.at + LATE
        self.last[index] = place
        self.at = max(self.at, place + 1)
        return not self.stays.until_next[place]

    def stays_now(self, index: int) -> bool:
        places = self.places.get(index)
        return places is not None and self.stays.until_next[self.last.get(index, places[-1])]

    def end(self) -> None:
        if self.seen:
            is_alike = self.is_seen and sorted(self.seen) == sorted(self.expected)
            if self.has_strayed or not is_alike:
                self.expect(self.seen, is_seen=True)
            self.is_steady = is_alike
        self.has_strayed = False
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
    def is_steady(self) -> bool:
        """True if two passes of the present kind were alike; it can be chosen then what stays."""
        return self._now.is_steady

    @property
    def is_training(self) -> bool:
        """True in a pass of training."""
        return self._now is self._training

    def add(self, count: int) -> None:
        """Expect so many more weights, until a step shows their order: one after the other, and back."""
        numbers = range(self._count, self._count + count)
        self._count += count
        self._training.expect([*self._training.expected, *numbers, *reversed(numbers)])

    @property
    def chosen_limit_bytes(self) -> int | None:
        """Memory for which those that stay were chosen; None: they are not yet."""
        chosen_for = self._now.chosen_for
        return None if chosen_for is None else chosen_for[2]

    @property
    def kept(self) -> frozenset[int]:
        """Weights that always stay in passes of the present kind; none before it is chosen."""
        return self._now.stays.kept if self._now.chosen_for is not None else frozenset()

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
        """Choose the weights that stay in this kind of pass, once two were alike.

        Args:
            sizes: Bytes of each weight.
            changed: Whether training changes it.
            limit_bytes: Memory for weights.
        """
        if self._now is not self._training:
            changed = [False] * len(sizes)
        self._now.choose(sizes, changed, limit_bytes)

    def note(self, index: int) -> bool:
        """Note that a weight is used now; return whether it is to leave after that."""
        return self._now.note(index)

    def stays(self, index: int) -> bool:
        """Return whether a weight is to stay from its last use to the next."""
        return self._now.stays_now(index)

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
