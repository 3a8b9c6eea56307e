"""Order in which offloaded slots are read back, and the earliest time for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.plan.plan import Plan
from penstock.plan.profile import Profile
from penstock.plan.replay.moves import Moves
from penstock.plan.residency import OFFLOADED


class NeedOrder:
    """Progress of a step in the plan's order of need.

    Attributes:
        slots: Offloaded slots that will be needed, in the order of reading, by pass.
        place: Number of these that have been read, by pass.
    """

    def __init__(self, profile: Profile, plan: Plan, moves: Moves) -> None:
        """Use the plan's order; slots that it does not know come last."""
        ranks = {key.match_key: rank for rank, key in enumerate(plan.need_order)}
        last = len(ranks)
        self._rank = [ranks.get(match, last) for match in profile.match_keys]
        self._pass = [slot.pass_index for slot in profile.slots]
        self._not_before = moves.not_before
        self._small = profile.small_at_need
        self._asked: dict[int, int] = {}
        self._most: deque[int] = deque()
        self.slots: dict[int, list[int]] = {}
        for i in profile.needs:
            if moves.action[i] == OFFLOADED:
                self.slots.setdefault(self._pass[i], []).append(i)
        for one in self.slots.values():
            one.sort(key=self._rank.__getitem__)
        self.place = dict.fromkeys(self.slots, 0)

    def ask(self, i: int) -> None:
        """Note that backward asks for a slot, kept ones included."""
        if self._not_before:
            index = self._pass[i]
            self._asked[index] = max(self._asked.get(index, -1), self._rank[i])

    def due(self, i: int) -> bool:
        """Return True if the slot's ``prefetch_at`` allows its read to begin."""
        if not self._not_before:
            return True
        return self._not_before.get(i, -1) <= self._asked.get(self._pass[i], -1)

    def begin(self, i: int) -> None:
        """Note that a prefetch begins: the slot stays until its use, with the bytes beside it then."""
        most, small = self._most, self._small
        while most and small[most[-1]] <= small[i]:
            most.pop()
        most.append(i)

    def beside(self, coming: int, state: Sequence[int]) -> int:
        """Return the most bytes beside the use of any prefetched slot, whose state is ``coming``."""
        most = self._most
        while most and state[most[0]] != coming:
            most.popleft()
        return self._small[most[0]] if most else 0
