"""Repeated sampling of what is stored as it is: sparsity may appear during training.

Of what is encoded each pass tells how long its frames were. Of what goes as it is, nothing is known but
the sample of a pass long ago. So in every ``EVERY`` passes one such slot is sampled again, in turn, the
largest first: four stretches of 256 KiB at most. If a codec now makes much fewer of its bytes than it
did, all slots are sampled once more, and planned anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.plan.plan import Action, Plan
from penstock.plan.profile import CodecSample, Profile
from penstock.plan.slots import MatchKey, SlotKey
from penstock.runtime.residency import SlotRecord

EVERY: Final = 8
"""Passes for each look."""
FELL: Final = 0.15
"""Share of a slot's bytes by which a codec must make it shorter than it did."""


class SecondLooks:
    """Whose turn it is, and what was found. Used under the planner's lock."""

    def __init__(self) -> None:
        """Look at nothing."""
        self._raw: list[SlotKey] = []
        self._known: dict[MatchKey, tuple[CodecSample, ...]] = {}
        self._turn = 0
        self._passes = 0
        self._looked_at: SlotKey | None = None

    def begin(self, profile: Profile, plan: Plan) -> None:
        """Look, from now on, at what this plan has go as it is, though codecs were tried on it."""
        self._known = {slot.key.match_key: slot.codecs for slot in profile.slots if slot.codecs}
        raw = (d.key for d in plan.decisions if d.action is Action.OFFLOAD and not d.codec)
        known = (key for key in raw if key.match_key in self._known)
        self._raw = sorted(known, key=lambda key: -key.nbytes)
        self._looked_at = None

    def next(self) -> SlotKey | None:
        """The slot to look at in the next pass; None: none this time. Called once a pass."""
        self._passes += 1
        self._looked_at = None
        if self._raw and self._passes % EVERY == 0:
            self._looked_at = self._raw[self._turn % len(self._raw)]
            self._turn += 1
        return self._looked_at

    def found(self, records: Sequence[SlotRecord]) -> bool:
        """Return whether a codec makes of the slot that was looked at much less than it did."""
        key = self._looked_at
        if key is None:
            return False
        for record in records:
            if record.key == key and record.codecs:
                before = {one.codec: one.ratio for one in self._known.get(key.match_key, ())}
                return any(one.ratio < before.get(one.codec, 0) - FELL for one in record.codecs)
        return False
