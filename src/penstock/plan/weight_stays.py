"""Weights that stay in memory between their uses, chosen from their order and the memory there is.

[Note: weights that stay]
    Memory for weights is divided into three parts. Some weights are kept: they are never read or written.
    Of the others one stays from a use to the next, if there is room for it in the second part at each
    use meanwhile, beside the weight of that use and those that stay over it: where forward turns to
    backward, where an update comes late, where a block is recomputed before its backward, and where
    several batches pass a block. Those with the fewest bytes used meanwhile come first. The rest is for
    reading ahead.

    How much is kept is found by counting what a step then reads and writes. As order and memory alone
    decide, sessions and ``penstock plan`` choose alike, and the bytes of a step do not depend on how
    long anything takes. Bytes between two uses are counted as in the stack of Mattson, Gecsei, Slutz and
    Traiger, "Evaluation techniques for storage hierarchies" (1970).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.plan.weights import ModuleWeights, share_of

AHEAD_USES: Final = 2
"""Uses of mean length for which there is room to read ahead; none, where not twice as many fit."""
_PARTS: Final = 8
"""Parts of what may be kept that are tried."""


@dataclass(frozen=True, slots=True)
class WeightStays:
    """Weights that stay, of those that a step uses in a known order; see [Note: weights that stay]."""

    kept: frozenset[int]
    """Weights that stay always."""
    until_next: tuple[bool, ...]
    """For each place of the order, whether that weight stays until its next use. After the last place
    comes the first of the next step."""
    read_bytes: int
    """Bytes of weights that a step reads; the next are those it writes."""
    written_bytes: int


def order_of_uses(weights: Sequence[ModuleWeights]) -> list[tuple[int, int]]:
    """Return the uses of a step in order: place of a module's weights in ``weights``, number of its use.

    A gradient that ranks reduce is final when the next module's backward has run. So the update after it
    is a use of its own there, which has the number of the backward once more.
    """
    uses = sorted(
        (use.first, place, number)
        for place, one in enumerate(weights)
        for number, use in enumerate(one.uses)
    )
    order: list[tuple[int, int]] = []
    late: list[tuple[int, int]] = []
    for _, place, number in uses:
        order += [(place, number), *late]
        one = weights[place]
        is_final = one.gradient is not None and one.uses[number].last == one.gradient.last
        late = [(place, number)] if is_final and one.gathered and one.updated else []
    return order + late


def weight_stays(
    order: list[int], sizes: Sequence[int], changed: Sequence[bool], limit_bytes: int
) -> WeightStays:
    """Choose the weights that stay, so that a step moves the fewest bytes. Pure.

    Args:
        order: Weights by number, in the order of their uses in one step.
        sizes: Bytes of each weight.
        changed: Whether a step changes it.
        limit_bytes: Memory for weights.
    """
    used = {index: sizes[index] for index in order}
    if sum(used.values()) <= limit_bytes:
        return WeightStays(frozenset(used), (True,) * len(order), 0, 0)
    # a use in backward and the update after it are one
    uses = [
        index
        for index, before in zip(order, order[-1:] + order[:-1], strict=True)
        if index != before
    ]
    ahead = AHEAD_USES * sum(sizes[index] for index in uses) // max(1, len(uses))
    if limit_bytes < 2 * ahead:  # an update that waits for the next weight would read one again
        return _stays(order, sizes, changed, frozenset(), limit_bytes)
    left = limit_bytes - ahead
    most = max(0, left - max(used.values()))
    able = [(index, nbytes) for index, nbytes in used.items() if nbytes <= most]
    whole = max(1, sum(nbytes for _, nbytes in able))
    choices = {share_of(able, most * part / _PARTS / whole): None for part in range(_PARTS, -1, -1)}
    found = (_stays(order, sizes, changed, kept, left) for kept in choices)
    return min(found, key=lambda one: one.read_bytes + one.written_bytes)


def _stays(
    order: Sequence[int],
    sizes: Sequence[int],
    changed: Sequence[bool],
    kept: frozenset[int],
    left_bytes: int,
) -> WeightStays:
    streamed = [0 if index in kept else nbytes for index, nbytes in enumerate(sizes)]
    near = left_bytes - sum(sizes[index] for index in kept)
    between, next_places = _bytes_between(order, streamed), _next_places(order)
    present = np.array([streamed[index] for index in order])
    until_next = [index in kept for index in order]
    for place in sorted(range(len(order)), key=between.__getitem__):
        if until_next[place]:
            continue
        nbytes = streamed[order[place]]
        spans = _between_places(present, place, next_places[place])
        is_near = not between[place] or between[place] + nbytes <= near  # there is room then
        if is_near or _most(spans) + nbytes <= near:
            until_next[place] = True
            for span in spans:
                span[:] += nbytes
    leaving = [index for index, stays in zip(order, until_next, strict=True) if not stays]
    return WeightStays(
        kept=frozenset(order) - {*leaving},
        until_next=tuple(until_next),
        read_bytes=sum(streamed[index] for index in leaving),
        written_bytes=sum(streamed[index] for index in {*leaving} if changed[index]),
    )


def _next_places(order: Sequence[int]) -> list[int]:
    """Return the place of the next use of each place's weight; the order is taken as endless."""
    found = [0] * len(order)
    latest: dict[int, int] = {}
    for place in reversed(range(2 * len(order))):
        index = order[place % len(order)]
        found[place % len(order)] = latest.get(index, place) % len(order)
        latest[index] = place
    return found


def _between_places(
    values: NDArray[np.int64], place: int, next_place: int
) -> tuple[NDArray[np.int64], ...]:
    """Return the values of the places between one and a later one, which may be in the next round."""
    if place < next_place:
        return (values[place + 1 : next_place],)
    return values[place + 1 :], values[:next_place]


def _most(spans: Sequence[NDArray[np.int64]]) -> int:
    """Return the largest of all values."""
    return max((int(span.max()) for span in spans if span.size), default=0)


def _bytes_between(order: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return, for each place, the bytes of the weights used between it and that weight's next use.

    The order is taken as endless.
    """
    count = len(order)
    found = [0] * count
    latest: dict[int, int] = {}
    sums = [0] * (2 * count + 1)  # a Fenwick tree: of each weight its bytes, at its latest place

    def add(place: int, nbytes: int) -> None:
        place += 1
        while place < len(sums):
            sums[place] += nbytes
            place += place & -place

    def before(place: int) -> int:
        total = 0
        while place:
            total += sums[place]
            place &= place - 1
        return total

    for place in range(2 * count):
        index = order[place % count]
        last = latest.get(index)
        if last is not None:
            if place >= count:
                found[last % count] = before(place) - before(last + 1)
            add(last, -sizes[index])
        add(place, sizes[index])
        latest[index] = place
    return found
