"""vDNN's rule for copies (MICRO 2016, section 3.2): a layer ends when its copy has.

A map is copied to its tier while the layer that reads it computes. Compute and copy are joined at that
layer's end: then the map's memory is free, and the next layer may begin.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from penstock.plan.profile import Profile
from penstock.plan.residency import OFFLOADED

JOIN: Final = 4
"""Event beyond those of profiles: the end of the layer during which a slot is written."""


def with_joins(
    profile: Profile, action: Sequence[int], steps: Sequence[tuple[int, int, int]]
) -> Sequence[tuple[int, int, int]]:
    """Add events at the ends of offloaded slots' layers: the first operator that ends after the save.

    A join precedes all other events of its time.
    """
    ends = sorted(one.end_ns for one in profile.operators if not one.backward)
    joins = []
    for i, slot in enumerate(profile.slots):
        place = bisect_right(ends, slot.saved_at_ns)
        if action[i] == OFFLOADED and place < len(ends):
            joins.append((ends[place], JOIN, i))
    return sorted([*joins, *steps], key=itemgetter(0))
