"""Decisions for slots that no plan knows: in the first pass, all of them.

[Note: guesses]
    The first pass has no plan, and nobody knows what it will save. Under ``all``, or once half of the
    device budget is used, its slots are spilled, as they are: codecs cost a core. But bytes as they are
    may be more than tier and device can hold where encoded ones are not. So from when half of the tier
    was given away, the pass is sampled, and what is spilled is encoded by the codec that was just
    measured to make it shortest. The first plan then can count on codecs as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.plan.machine import Budgets
from penstock.plan.plan import Action, Decision
from penstock.plan.profile import CodecSample
from penstock.plan.slots import SlotKey
from penstock.runtime.sampling import POSITIVE
from penstock.store.account import Account

SHORTER: Final = 0.9
"""A guess is encoded if that leaves at most so much of its bytes."""


class Guesses:
    """Decides upon slots that no plan knows. Not thread-safe where it counts: by some bytes it may err.

    Attributes:
        tier: Where they go.
        crowded: Whether half of that tier was given away in this pass.
    """

    def __init__(self, policy: str, budgets: Budgets, budget: Account) -> None:
        """For one planner; ``budget`` is the device's, as it is used."""
        self.tier = "flash" if budgets.flash_bytes else "host"
        self._room_bytes = budgets.flash_bytes or budgets.host_bytes
        self._policy = policy
        self._budget = budget
        self._given_bytes = 0
        self.crowded = False

    def end_pass(self) -> None:
        """The tier is empty again."""
        self._given_bytes = 0
        self.crowded = False

    def decide(self, key: SlotKey, codecs: Sequence[CodecSample]) -> Decision:
        """Decide what to do with a slot.

        Args:
            key: Its name.
            codecs: What they made of it, if codecs may be used. That of signs counts for nothing: it is
                not proven yet that they are enough.
        """
        if self._policy == "keep" or not self._room_bytes:
            return Decision(key, Action.KEEP, "", "not in the plan")
        half_free = self._budget.free_bytes >= self._budget.limit_bytes // 2
        if self._policy != "all" and half_free:
            return Decision(key, Action.KEEP, "", "not in the plan, and half the budget is free")
        found = shortest(codecs)
        self._given_bytes += key.nbytes
        self.crowded |= 2 * self._given_bytes > self._room_bytes
        if found is None or not self.crowded:
            return Decision(key, Action.OFFLOAD, self.tier, "not in the plan")
        why = "not in the plan, and half of the tier is given away"
        return Decision(key, Action.OFFLOAD, self.tier, why, found.codec, found.ratio)


def shortest(codecs: Sequence[CodecSample]) -> CodecSample | None:
    """Return the codec that leaves the fewest bytes; None: none makes them fewer."""
    return min(
        (sample for sample in codecs if sample.codec != POSITIVE and sample.ratio <= SHORTER),
        key=lambda sample: (sample.ratio, sample.codec),
        default=None,
    )
