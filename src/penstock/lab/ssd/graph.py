"""A weight update as a graph: units, their stages, and what each stage occupies.

A unit goes through its stages one after the other on one die. A stage occupies the die, its processing
element (where that may work beside the die), or the channel. Units go round the channels, then round the
dies of a channel; a die has as many units begun as it has sets of page registers, and a set takes every
``sets``-th unit of its die. Whatever is asked for by several serves them in the order in which they ask;
of several at the same time the lower die, then the older unit.

A stage on the channel that goes through the die's only *port* holds the die as well: it asks for the die
first, then, holding it, for the channel. This is so where a die has no registers that the bus can reach
while its array works. A stage that *keeps* the die leaves it to the next of its set, which need not ask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

BUS: Final = 0
DIE: Final = 1
ELEMENT: Final = 2
_LONGEST: Final = 256
"""Units after which a pattern comes again, at most."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One of a unit's."""

    name: str
    resource: int
    """BUS, DIE or ELEMENT."""
    took_ps: int
    pages: int
    """Page operations of flash that it is: reads, programs, or none."""
    port: bool = False
    """Of the bus: whether the die stands still meanwhile."""
    keeps: bool = False
    """Whether the die stays with the set, for its next stage, or its next unit."""
    fills: bool = False
    """Of the die: whether it fills blocks, which are erased when they are full."""


@dataclass(frozen=True, slots=True)
class Phase:
    """All units of a step, or of a part of it."""

    name: str
    kinds: tuple[tuple[Stage, ...], ...]
    """What units may go through."""
    pattern: tuple[int, ...]
    """The kinds of the units of a die, in turn; each die begins elsewhere in it (``kind_of``)."""
    units: int
    channels: int
    dies: int
    """On each channel."""
    sets: int
    """Of page registers: units that a die may have begun at once."""
    release_ps: int
    """From one gradient to the next on the link: a unit begins no sooner than its own."""
    erase_ps: int
    erase_every: int
    """Stages of a die that fill blocks between two erases."""

    def kind_of(self, die: int, number: int) -> int:
        """Of a unit of a die, by its number there: dies are spread over the pattern."""
        period = len(self.pattern)
        return self.pattern[(number + die * period // self.dies) % period]

    @property
    def bus_bound_ps(self) -> float:
        """Of a unit, if the buses never wait."""
        return self._mean_ps(lambda stage: stage.resource == BUS) / self.channels

    @property
    def die_bound_ps(self) -> float:
        """Of a unit, if the dies, or their elements, never wait."""
        die, element, all_of_it = (
            self._mean_ps(among)
            for among in (
                lambda stage: stage.resource == DIE or stage.port,
                lambda stage: stage.resource == ELEMENT,
                lambda stage: True,
            )
        )
        erase = self._mean(lambda stage: float(stage.fills)) * self.erase_ps / self.erase_every
        turn = max(die + erase, element, (all_of_it + erase) / self.sets)
        return turn / self.dies / self.channels

    @property
    def bound_ps(self) -> float:
        """Of a unit, when what is slowest never waits."""
        return max(self.bus_bound_ps, self.die_bound_ps, self.release_ps)

    @property
    def page_operations(self) -> int:
        """Of all units."""
        return round(self.units * self._mean(lambda stage: stage.pages))

    def _mean_ps(self, among: Callable[[Stage], bool]) -> float:
        return self._mean(lambda stage: stage.took_ps if among(stage) else 0)

    def _mean(self, of: Callable[[Stage], float]) -> float:
        """Over the units of a pattern."""
        by_kind = [math.fsum(map(of, stages)) for stages in self.kinds]
        return math.fsum(by_kind[kind] for kind in self.pattern) / len(self.pattern)


def spread(shares: Sequence[float]) -> tuple[int, ...]:
    """A short pattern in which each kind has its share, as evenly as can be.

    Args:
        shares: Of each kind; together 1.
    """
    period = min(range(1, _LONGEST + 1), key=lambda length: (_off(shares, length), length))
    counts = _counts(shares, period)
    pattern: list[int] = []
    had = [0] * len(shares)
    for place in range(period):
        # the kind that lags most behind its share
        lag = [counts[kind] * (place + 1) / period - had[kind] for kind in range(len(shares))]
        kind = max(range(len(shares)), key=lambda each: (lag[each], -each))
        had[kind] += 1
        pattern.append(kind)
    return tuple(pattern)


def _counts(shares: Sequence[float], period: int) -> list[int]:
    """Whole numbers of each kind, together ``period``."""
    counts = [math.floor(share * period) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda kind: counts[kind] - shares[kind] * period)
    for kind in by_rest[: period - sum(counts)]:
        counts[kind] += 1
    return counts


def _off(shares: Sequence[float], period: int) -> float:
    """By how much shares are missed; a thousandth is as good as none."""
    counts = _counts(shares, period)
    off = max(abs(count / period - share) for count, share in zip(counts, shares, strict=True))
    return round(off, 3)
