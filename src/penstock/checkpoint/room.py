"""How much memory a save in the background takes, and for what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.checkpoint.streams import BUFFERS_BYTES, count_within
from penstock.core.errors import ConfigError
from penstock.core.units import MIB, format_bytes

_OWN_BYTES: Final = 6 * MIB
"""Stacks of threads, the manifest, and what Python has of both: 2.6 MiB, of a state of 1.3 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBuffers:
    """The memory of one save, divided.

    Attributes:
        buffers_bytes: For blocks on their way.
        copies_bytes: For copies of what is about to change.
    """

    buffers_bytes: int
    copies_bytes: int

    @classmethod
    def within(cls, memory_bytes: int, block_bytes: int) -> SaveBuffers:
        """Divide what there is: buffers as for any save, three quarters at most, at least three blocks.

        More buffers would keep the device no busier, and copies spare the optimizer a wait.

        Args:
            memory_bytes: All that may be taken.
            block_bytes: How long a block is.

        Raises:
            ConfigError: It is too little.
        """
        rest = memory_bytes - _OWN_BYTES
        buffers = count_within(min(BUFFERS_BYTES, rest * 3 // 4), block_bytes) * block_bytes
        if rest < buffers:
            least = _OWN_BYTES + buffers
            raise ConfigError(
                f"memory={format_bytes(memory_bytes)} does not do for a save: it takes"
                f" {format_bytes(least)} at least"
            )
        return cls(buffers_bytes=buffers, copies_bytes=rest - buffers)
