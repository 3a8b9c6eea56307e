"""Space on flash for the memory of a suspended job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from penstock.observe.clients import SUSPENDED
from penstock.observe.recorder import Recorder
from penstock.store.base import Tier
from penstock.store.blob import UNIT_BYTES, StrPath
from penstock.store.engine import shared_engine
from penstock.store.flash import FlashTier
from penstock.swap.state import SuspendableStorage


class SwapSpace:
    """Unnamed files, kept while the job lives.

    Overwriting allocated space of a file system is about twice as fast as writing to new space.

    Attributes:
        tier: Tier that checks every byte, since it holds the only copy.
    """

    def __init__(
        self,
        flash: StrPath | Sequence[StrPath],
        *,
        capacity_bytes: int,
        recorder: Recorder,
        wrap_tier: Callable[[Tier], Tier] | None = None,
    ) -> None:
        """Check the directories and their free space.

        Raises:
            NoSpaceError: The file systems do not have the space; the message has the figures.
            ConfigError: A directory cannot be used.
        """
        self._flash = flash
        tier = FlashTier(
            flash,
            capacity_bytes=capacity_bytes,
            engine=shared_engine(),
            recorder=recorder,
            name=SUSPENDED,
            verify="full",
        )
        self.tier: Tier = wrap_tier(tier) if wrap_tier is not None else tier

    @staticmethod
    def needed_bytes(held: Sequence[SuspendableStorage], flash: StrPath | Sequence[StrPath]) -> int:
        """Return the capacity that some storages need."""
        directories = 1 if isinstance(flash, (str, os.PathLike)) else len(flash)
        loose = sum(each.pages is None for each in held)  # these may begin within a unit
        units = sum(-(-each.nbytes // UNIT_BYTES) for each in held)
        return (units + loose + directories) * UNIT_BYTES

    def serves(self, flash: StrPath | Sequence[StrPath], capacity_bytes: int) -> bool:
        """Return whether it has these directories and this size, and is empty (not after Ctrl-C)."""
        enough = self.tier.spec.capacity_bytes >= capacity_bytes
        return self._flash == flash and enough and not self.tier.held_bytes

    def close(self) -> None:
        """Close the files, which discards them. Idempotent."""
        self.tier.close()
