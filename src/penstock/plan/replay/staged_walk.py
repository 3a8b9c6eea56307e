"""Simulation of one step in which all that goes to flash is staged in pinned host memory.

It differs from :mod:`.walk` in the lanes, which are those of :mod:`.staging`: memory is free once a slot
has been copied to a buffer, and a slot that is needed while a buffer holds it is copied from there. What
is left is to cancel writes to flash that nobody needs any more, and to count what flash holds: a slot
from the end of its copy on, though its room there is promised from its save on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from penstock.plan.replay.moves import FLASH
from penstock.plan.replay.walk import Walk


class StagedWalk(Walk):
    """Simulation of one step with staging memory. ``run`` it once, then read the attributes."""

    def run(self) -> None:
        """Simulate the whole step."""
        self._freed_ns: dict[int, int] = {}
        super().run()
        self._promised = [*self.held.tier_peak]
        staged = self._channels.staged
        assert staged is not None
        sizes = self.held.sizes
        self.forwarded_bytes += sum(sizes[i] for i in staged.back.copied)
        changes = sorted(self._on_flash())
        self.held.tier_changes[FLASH][:] = changes
        self.held.tier_peak[FLASH] = max(accumulate(nbytes for _, nbytes in changes), default=0)

    @property
    def promised_bytes(self) -> Sequence[int]:
        """Most bytes, by tier, for which there must be room."""
        return self._promised

    def _on_flash(self) -> Iterator[tuple[int, int]]:
        """Yield (time, bytes) of slots that flash takes or discards."""
        staged, held = self._channels.staged, self._moves.held_bytes
        assert staged is not None
        for _, i in staged.out.log:
            freed_ns = self._freed_ns.get(i, self.now_ns)
            if staged.written[i] < freed_ns:
                yield staged.written[i], held[i]
                yield freed_ns, -held[i]

    def _free(self, i: int, now: int) -> None:
        super()._free(i, now)
        staged = self._channels.staged
        assert staged is not None
        staged.discard(i, now)
        self._freed_ns[i] = now
