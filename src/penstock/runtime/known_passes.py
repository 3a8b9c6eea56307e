"""The passes that plans are made from, and how one that has just finished differs from them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.plan.profile import Profile
from penstock.plan.slots import MatchKey
from penstock.runtime.in_force import InForce
from penstock.runtime.profiles import profile_of
from penstock.runtime.storage import Pass, SlotRecord

DRIFT: Final = 0.05
"""Share of a pass's bytes that may be unknown to the plan before it is made anew."""
MAX_KINDS: Final = 8
"""Kinds of passes remembered: an iteration of a GAN has two; more are dynamic shapes."""


class KnownPasses:
    """One pass of each kind, the last of it that told the most. Used under the planner's lock.

    Attributes:
        kinds: These.
    """

    def __init__(self, device: str) -> None:
        """Know none yet; they will run on ``device``."""
        self.kinds: list[Pass] = []
        self._device = device
        self._held: set[MatchKey] = set()

    def profile(self, unrepeatable: Collection[str]) -> Profile:
        """Of a step that has one pass of each kind; ``unrepeatable`` modules cannot be run again."""
        return profile_of(
            self.kinds, device=self._device, held=self._held, unrepeatable=unrepeatable
        )

    def difference(self, finished: Pass, in_force: InForce) -> str:
        """How a pass differs from what the plan was made from; empty: not so much as to matter.

        Slots that something else keeps alive are noted for the next profile.
        """
        unknown, total = 0, finished.kept_bytes
        newly_held = False
        for record in finished.records:
            total += record.key.nbytes
            if not is_known(record, in_force):
                unknown += record.key.nbytes
            if record.held_elsewhere and record.key.match_key not in self._held:
                newly_held = True
                if not finished.kept_bytes:  # else no plan is made of this pass, but of a later one
                    self._held.add(record.key.match_key)
        if in_force.plan is None:
            return "first" if finished.records else ""
        if newly_held:
            return "held"
        return "drift" if unknown > DRIFT * total else ""

    def like(self, finished: Pass) -> Pass | None:
        """The known pass that is most like this one, if any is."""
        place = self._place_of(finished)
        return None if place is None else self.kinds[place]

    def remember(self, finished: Pass, in_force: InForce) -> None:
        """Replace the known pass that is most like this one, or add it as another kind."""
        place = self._place_of(finished)
        if place is None:
            self.kinds = [*self.kinds, finished][-MAX_KINDS:]
            return
        as_planned = all(is_known(record, in_force) for record in finished.records)
        if self.kinds[place].observed and not finished.observed and as_planned:
            return  # what is new, if anything, is who is held elsewhere
        known = {record.key.match_key: record for record in self.kinds[place].records}
        for record in finished.records:
            if not record.codecs and record.key.match_key in known:
                record.codecs = known[record.key.match_key].codecs
        self.kinds[place] = finished

    def _place_of(self, finished: Pass) -> int | None:
        mine = {record.key.match_key for record in finished.records}
        for place, known in enumerate(self.kinds):
            theirs = {record.key.match_key for record in known.records}
            if 2 * len(mine & theirs) >= len(mine | theirs):
                return place
        return None


def is_known(record: SlotRecord, in_force: InForce) -> bool:
    """Return whether the plan says what becomes of a slot."""
    key = record.key
    return record.planned or (key.module, key.ordinal) in in_force.made_again


def was_sampled(known: Pass) -> bool:
    """Return whether codecs were measured on all but a few of its bytes."""
    missing = sum(record.key.nbytes for record in known.records if not record.codecs)
    return missing <= DRIFT * sum(record.key.nbytes for record in known.records)
