"""Simulation of one step in which all that goes to flash is staged in pinned host memory.

It differs from :mod:`.walk` in the lanes, which are those of :mod:`.staging`: memory is free once a slot
has been copied to a buffer, and a slot that is needed while a buffer holds it is copied from there. What
is left is to cancel writes to flash that nobody needs any more.
"""

from __future__ import annotations

from penstock.plan.replay.walk import Walk


class StagedWalk(Walk):
    """Simulation of one step with staging memory. ``run`` it once, then read the attributes."""

    def run(self) -> None:
        """Simulate the whole step."""
        super().run()
        staged = self._channels.staged
        assert staged is not None
        sizes = self.held.sizes
        self.forwarded_bytes += sum(sizes[i] for i in staged.back.copied)

    def _free(self, i: int, now: int) -> None:
        super()._free(i, now)
        staged = self._channels.staged
        assert staged is not None
        staged.discard(i, now)
