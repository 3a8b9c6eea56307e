"""vDNN's rule for copies (MICRO 2016, section 3.2): a layer ends when its copy has.

A map is copied to its tier while the layer that reads it computes. Compute and copy are joined at that
layer's end: the map's memory is free then, and the next layer begins no sooner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from penstock.plan.profile import Profile
from penstock.plan.replay.moves import OFFLOADED

JOIN: Final = 4
"""An event beside those of profiles: the layer is over under which a slot is written."""


def with_joins(
    profile: Profile, action: Sequence[int], steps: Sequence[tuple[int, int, int]]
) -> Sequence[tuple[int, int, int]]:
    """The steps, and where each offloaded slot's layer ends: the first operator that ends after its save.

    What is joined at a time comes first of all that happens then.
    """
    ends = sorted(one.end_ns for one in profile.operators if not one.backward)
    joins = []
    for i, slot in enumerate(profile.slots):
        place = bisect_right(ends, slot.saved_at_ns)
        if action[i] == OFFLOADED and place < len(ends):
            joins.append((ends[place], JOIN, i))
    return sorted([*joins, *steps], key=itemgetter(0))
