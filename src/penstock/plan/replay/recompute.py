"""Recomputation in a replay: the segments that a plan recomputes in a profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from penstock.core.errors import PlanError
from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.recompute import RecomputeChoices
from penstock.plan.residency import RECOMPUTED, Mask, Segment

DROP: Final = 3
"""Event beyond those of profiles: the end of a recomputed module's forward."""


def recomputed_segments(profile: Profile, plan: Plan, action: Mask) -> list[Segment]:
    """Return the segments that a plan recomputes, without slots for which it decides otherwise.

    Args:
        profile: The profile, whose operators give the time of a forward.
        plan: The plan with its ``recomputed`` modules.
        action: Action for each slot.

    Raises:
        PlanError: The plan recomputes a slot that nothing in ``recomputed`` makes in this profile.
    """
    if RECOMPUTED not in action:
        return []
    found = RecomputeChoices.of(profile).segments(plan.recomputed)
    segments = [_within(one, action) for one in found]
    dropped = {i for one in segments for _, i, _ in one.drops}
    for i, slot in enumerate(profile.slots):
        if action[i] == RECOMPUTED and i not in dropped:
            raise PlanError(
                f"plan: slot {slot.key} is to be recomputed, but none of 'recomputed',"
                f" {', '.join(plan.recomputed) or 'which is empty'}, recomputes it in this profile (it"
                f" was made by {slot.producer!r}, and the profile has {len(profile.operators)}"
                " operators)"
            )
    return segments


def _within(segment: Segment, action: Mask) -> Segment:
    if all(action[i] == RECOMPUTED for _, i, _ in segment.drops):
        return segment
    return replace(
        segment,
        slots=tuple(i for i in segment.slots if action[i] == RECOMPUTED),
        drops=tuple(drop for drop in segment.drops if action[drop[1]] == RECOMPUTED),
    )


def with_drops(profile: Profile, segments: Iterable[Segment]) -> Sequence[tuple[int, int, int]]:
    """Add events ``DROP`` to the profile's steps where recomputed slots are dropped.

    A drop precedes other events of its time, except the module's own saves.
    """
    steps = profile.steps
    drops = sorted((place, at_ns, i) for one in segments for place, i, at_ns in one.drops)
    found: list[tuple[int, int, int]] = []
    taken = 0
    for place, at_ns, i in drops:
        found += steps[taken:place]
        found.append((at_ns, DROP, i))
        taken = place
    return [*found, *steps[taken:]] if drops else steps
