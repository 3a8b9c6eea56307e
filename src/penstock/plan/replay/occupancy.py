"""Bytes held on the device and in the tiers, now and over the step."""

from __future__ import annotations

from penstock.plan.profile import Profile
from penstock.plan.replay.moves import Moves


class HeldBytes:
    """Account of the slots' bytes on the device and in the tiers. The walk makes sure that they fit.

    Attributes:
        limit: The device budget.
        sizes: Bytes of each slot.
        used: Bytes on the device now.
        read_back: Bytes of these in targets of reads, in flight and in use.
        peak_bytes: Most bytes on the device at once, with those beside the slots then.
        changes: (time, slot, bytes) added to the device's memory, or removed if negative; in order for
            each slot.
        tier_peak: Most bytes held, by tier.
        tier_changes: (time, bytes) added or removed, by tier.
    """

    __slots__ = (
        *("_moves", "_tier_used", "changes", "limit", "peak_bytes"),
        *("read_back", "sizes", "tier_changes", "tier_peak", "used"),
    )

    def __init__(self, profile: Profile, moves: Moves, limit: int) -> None:
        """Start with only the bytes below the floor."""
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

    def allocate(self, i: int, now: int) -> None:
        """Add a slot to the device."""
        self.used += self.sizes[i]
        self.changes.append((now, i, self.sizes[i]))

    def free(self, i: int, now: int) -> None:
        """Remove a slot from the device."""
        self.used -= self.sizes[i]
        self.changes.append((now, i, -self.sizes[i]))

    def in_tier(self, i: int, sign: int, now: int) -> None:
        """Take (1) or discard (-1) the slot's bytes in its tier."""
        tier, nbytes = self._moves.tier[i], sign * self._moves.held_bytes[i]
        self._tier_used[tier] += nbytes
        self.tier_peak[tier] = max(self.tier_peak[tier], self._tier_used[tier])
        self.tier_changes[tier].append((now, nbytes))
