"""A weight update as a graph: units, their stages, and the resources that each stage occupies.

A unit goes through its stages one after the other on one die. A stage occupies the die, its processing
element (if that may work beside the die), or the channel. Units go round the channels, then round the
dies of a channel; a die has as many units in progress as it has sets of page registers, and a set takes
every ``sets``-th unit of its die. A resource serves claims in the order in which they are made; of claims
at the same time, first the lower die, then the older unit.

A stage on the channel that goes through the die's only *port* occupies the die as well: it claims the
die first, then, holding it, the channel. This is so if a die has no registers that the bus can reach
while its array works. A stage that *keeps* the die passes it to the next stage of its set without a new
claim.
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
"""Longest period of a pattern, in units."""


@dataclass(frozen=True, slots=True)
class UnitStage:
    """One stage of a unit."""

    name: str
    resource: int
    """Resource of the stage: BUS, DIE or ELEMENT."""
    took_ps: int
    pages: int
    """Number of page operations of flash in the stage: reads, programs, or none."""
    port: bool = False
    """True for a stage of the bus during which the die stands still."""
    keeps: bool = False
    """True if the set keeps the die, for its next stage or its next unit."""
    fills: bool = False
    """True for a stage of the die that fills blocks, which are erased when they are full."""


@dataclass(frozen=True, slots=True)
class UpdatePhase:
    """All units of a step, or of a part of it."""

    name: str
    kinds: tuple[tuple[UnitStage, ...], ...]
    """Sequences of stages that units may go through."""
    pattern: tuple[int, ...]
    """Kinds of the units of a die, in turn; each die begins elsewhere in it (``kind_of``)."""
    units: int
    channels: int
    dies: int
    """Dies on each channel."""
    sets: int
    """Sets of page registers: units that a die may have in progress."""
    release_ps: int
    """Interval of gradients on the link: no unit begins before its own gradient."""
    erase_ps: int
    erase_every: int
    """Number of stages of a die that fill blocks between two erases."""

    def kind_of(self, die: int, number: int) -> int:
        """Return the kind of a die's unit, by its number there; dies are spread over the pattern."""
        period = len(self.pattern)
        return self.pattern[(number + die * period // self.dies) % period]

    @property
    def bus_bound_ps(self) -> float:
        """Time of a unit if the buses never wait."""
        return self._mean_ps(lambda stage: stage.resource == BUS) / self.channels

    @property
    def die_bound_ps(self) -> float:
        """Time of a unit if the dies, or their elements, never wait."""
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
        """Time of a unit if the slowest resource never waits."""
        return max(self.bus_bound_ps, self.die_bound_ps, self.release_ps)

    @property
    def page_operations(self) -> int:
        """Page operations of all units."""
        return round(self.units * self._mean(lambda stage: stage.pages))

    def _mean_ps(self, among: Callable[[UnitStage], bool]) -> float:
        return self._mean(lambda stage: stage.took_ps if among(stage) else 0)

    def _mean(self, of: Callable[[UnitStage], float]) -> float:
        """Return the mean over the units of a pattern."""
        by_kind = [math.fsum(map(of, stages)) for stages in self.kinds]
        return math.fsum(by_kind[kind] for kind in self.pattern) / len(self.pattern)


def spread(shares: Sequence[float]) -> tuple[int, ...]:
    """Return a short pattern in which each kind has its share, spread as evenly as possible.

    Args:
        shares: Share of each kind; their sum is 1.
    """
    period = min(range(1, _LONGEST + 1), key=lambda length: (_off(shares, length), length))
    counts = _counts(shares, period)
    pattern: list[int] = []
    had = [0] * len(shares)
    for place in range(period):
        # the kind that is furthest behind its share
        lag = [counts[kind] * (place + 1) / period - had[kind] for kind in range(len(shares))]
        kind = max(range(len(shares)), key=lambda each: (lag[each], -each))
        had[kind] += 1
        pattern.append(kind)
    return tuple(pattern)


def _counts(shares: Sequence[float], period: int) -> list[int]:
    """Return whole numbers of each kind, with the sum ``period``."""
    counts = [math.floor(share * period) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda kind: counts[kind] - shares[kind] * period)
    for kind in by_rest[: period - sum(counts)]:
        counts[kind] += 1
    return counts


def _off(shares: Sequence[float], period: int) -> float:
    """Return the error of the shares; a thousandth counts as none."""
    counts = _counts(shares, period)
    off = max(abs(count / period - share) for count, share in zip(counts, shares, strict=True))
    return round(off, 3)
