"""Where a suspended job's memory rests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from penstock.io.aio import default_engine
from penstock.observe.clients import SUSPENDED
from penstock.observe.recorder import Recorder
from penstock.swap.state import Held
from penstock.tier import checksums
from penstock.tier.base import Tier
from penstock.tier.flash import FlashTier, StrPath
from penstock.tier.slabs import UNIT_BYTES


class Space:
    """Files without names, kept while the job lives.

    To overwrite what a file system has given once is about twice as quick as to write anew.

    Attributes:
        tier: Checks every byte, for it holds the only copy.
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
            NoSpaceError: The file systems have not the space; the figures are in it.
            ConfigError: A directory cannot be used.
        """
        self._flash = flash
        self._closing = ExitStack()
        engine = default_engine()
        self._closing.callback(engine.close)
        try:
            tier = FlashTier(
                flash,
                capacity_bytes=capacity_bytes,
                engine=engine,
                recorder=recorder,
                name=SUSPENDED,
                checksum=checksums.full,
            )
        except BaseException:
            self._closing.close()
            raise
        self.tier: Tier = wrap_tier(tier) if wrap_tier is not None else tier
        self._closing.callback(self.tier.close)

    @staticmethod
    def needed_bytes(held: Sequence[Held], flash: StrPath | Sequence[StrPath]) -> int:
        """The capacity that so much takes."""
        directories = 1 if isinstance(flash, (str, os.PathLike)) else len(flash)
        loose = sum(each.pages is None for each in held)  # these may begin within a unit
        units = sum(-(-each.nbytes // UNIT_BYTES) for each in held)
        return (units + loose + directories) * UNIT_BYTES

    def serves(self, flash: StrPath | Sequence[StrPath], capacity_bytes: int) -> bool:
        """Whether it is in these directories, large enough, and empty: after Ctrl-C it may not be."""
        enough = self.tier.spec.capacity_bytes >= capacity_bytes
        return self._flash == flash and enough and not self.tier.held_bytes

    def close(self) -> None:
        """Give the files back. Idempotent."""
        self._closing.close()
