"""Tiers that turn out to be too small for what a plan has promised them.

[Note: shortage]
    Where bytes as they are have no room, a plan counts on what codecs left of samples, and encodes no
    more than it must (:mod:`penstock.plan.placement`). Should frames come out longer than they were
    counted, or a tier be full, there is *shortage* until the pass is over: whatever else would go to a
    tier as it is, is encoded by what made it shortest, and so is what tiers have refused. The next pass
    then is sampled, and planned for what was found.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.codec import registry
from penstock.plan.placement import SPACE_MARGIN
from penstock.plan.plan import Action, Decision, Plan
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.slots import MatchKey, SlotKey
from penstock.runtime.guesses import shortest


class Shortage:
    """State of a shortage, and the remedies. Changed under the planner's lock, except ``active``.

    Attributes:
        active: Whether there is one in this pass. Set in whichever thread sees it.
    """

    def __init__(self) -> None:
        """Nothing is planned yet."""
        self.active = False
        self._shortest: dict[MatchKey, CodecSample] = {}
        self._tight: frozenset[str] = frozenset()

    def follow(self, plan: Plan, profile: Profile) -> None:
        """From now on ``plan``, made from ``profile``, says how long frames may be."""
        found = ((slot.key.match_key, shortest(slot.codecs)) for slot in profile.slots)
        self._shortest = {match: sample for match, sample in found if sample is not None}
        rooms = {"host": plan.budgets.host_bytes, "flash": plan.budgets.flash_bytes}
        for decision in plan.decisions:
            if decision.action is Action.OFFLOAD:
                rooms[decision.tier] -= decision.key.nbytes
        self._tight = frozenset(tier for tier, left in rooms.items() if left < 0)

    def shown_by(self, decision: Decision, frame_bytes: int) -> bool:
        """Return whether a slot's frames are longer than the plan has counted for its tier."""
        counted_on = (decision.ratio + SPACE_MARGIN) * decision.key.nbytes
        return decision.tier in self._tight and bool(decision.codec) and frame_bytes > counted_on

    def way_out(
        self, key: SlotKey, dtype: str, codecs: Sequence[CodecSample]
    ) -> CodecSample | None:
        """Return a codec that makes a slot shorter; ``codecs`` are those tried on it in this pass."""
        found = shortest(codecs) or self._shortest.get(key.match_key)
        if found is None or not registry.get(found.codec).accepts(dtype):
            return None
        return found
