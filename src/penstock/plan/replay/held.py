"""What is held on the device and in the tiers, and what was, over the step."""

from __future__ import annotations

from penstock.plan.profile import Profile
from penstock.plan.replay.moves import Moves


class Held:
    """Bytes of slots. Nothing here waits; the walk sees to it that things fit.

    Attributes:
        limit: The device budget.
        sizes: Of the slots.
        used: On the device now.
        read_back: Of these, targets of reads, on their way and in use.
        peak_bytes: The most on the device at once, with what was beside the slots then.
        changes: (when, slot, bytes) of what was added to the device's memory, or taken off; in order
            slot by slot.
        tier_peak: By tier, the most that it held.
        tier_changes: By tier, (when, bytes) of what was added or taken off.
    """

    __slots__ = (
        *("_moves", "_tier_used", "changes", "limit", "peak_bytes"),
        *("read_back", "sizes", "tier_changes", "tier_peak", "used"),
    )

    def __init__(self, profile: Profile, moves: Moves, limit: int) -> None:
        """Nothing but what is below the floor."""
        self._moves = moves
        self.limit = limit
        self.sizes = [slot.key.nbytes for slot in profile.slots]
        self.used = 0
        self.read_back = 0
        self.peak_bytes = profile.small_bytes
        self.changes: list[tuple[int, int, int]] = []
        self.tier_peak = [0, 0]
        self.tier_changes: tuple[list[tuple[int, int]], ...] = ([], [])
        self._tier_used = [0, 0]

    def take(self, i: int, now: int) -> None:
        """A slot comes to the device."""
        self.used += self.sizes[i]
        self.changes.append((now, i, self.sizes[i]))

    def give(self, i: int, now: int) -> None:
        """A slot leaves it."""
        self.used -= self.sizes[i]
        self.changes.append((now, i, -self.sizes[i]))

    def in_tier(self, i: int, sign: int, now: int) -> None:
        """Room in the slot's tier is taken (1), or given back (-1)."""
        tier, nbytes = self._moves.tier[i], sign * self._moves.held_bytes[i]
        self._tier_used[tier] += nbytes
        self.tier_peak[tier] = max(self.tier_peak[tier], self._tier_used[tier])
        self.tier_changes[tier].append((now, nbytes))
