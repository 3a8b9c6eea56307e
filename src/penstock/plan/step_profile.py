"""Parts of a profile of a step, for plans with weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.plan.profile import Profile
from penstock.plan.weights import ModuleWeights


def without_weights(profile: Profile, weights: Sequence[ModuleWeights]) -> Profile:
    """Return a profile of all device memory without parameters and gradients, which are planned apart.

    A profile of saved tensors only has none of them, and is returned as it is.
    """
    if not profile.fixed_bytes:
        return profile
    less = sum(one.nbytes + one.small_bytes + one.trained_bytes * one.updated for one in weights)
    return replace(
        profile,
        fixed_bytes=max(0, profile.fixed_bytes - less),
        small_bytes=max(0, profile.small_bytes - less),
        slots=tuple(
            replace(
                slot,
                small_bytes=None if slot.small_bytes is None else max(0, slot.small_bytes - less),
                small_bytes_at_need=None
                if slot.small_bytes_at_need is None
                else max(0, slot.small_bytes_at_need - less),
            )
            for slot in profile.slots
        ),
    )


def forward_part(profile: Profile) -> Profile:
    """Return the forward of a profile alone, as inference runs it: nothing is saved.

    The operators keep their indices, so weights can refer to them (``weights.forward_only``).
    """
    operators = tuple(one for one in profile.operators if not one.backward)
    end_ns = operators[-1].end_ns if operators else 0
    return replace(
        profile,
        slots=(),
        operators=operators,
        passes=tuple(
            replace(one, backward_start_ns=end_ns, end_ns=end_ns) for one in profile.passes[:1]
        ),
        transients=tuple(one for one in profile.transients if one.at_ns <= end_ns),
    )
