"""What a saved tensor is called: by where it was saved, never by an address or a global counter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from penstock.core.units import format_bytes

MatchKey = tuple[str, int, int]
"""(module path, ordinal, size bucket): by this a slot of one step is found again in the next."""


@dataclass(frozen=True, slots=True)
class SlotKey:
    """One saved storage of a step, as the module that saved it sees it."""

    module: str
    """Path of the module whose forward saved it first; ``""`` is the root."""
    ordinal: int
    """The how-manieth storage that this module saved in this pass, from 0."""
    nbytes: int
    """Size of the storage. It is exact; matching goes by ``bucket``."""

    @property
    def bucket(self) -> int:
        """The size in eighths of an octave, so that neighbouring dynamic shapes match."""
        return _bucket(self.nbytes)

    @property
    def match_key(self) -> MatchKey:
        """What plans are looked up by."""
        return (self.module, self.ordinal, _bucket(self.nbytes))

    def __str__(self) -> str:
        return f"{self.module or '<root>'}#{self.ordinal} ({format_bytes(self.nbytes)})"


@lru_cache(maxsize=4096)
def _bucket(nbytes: int) -> int:
    return round(8 * math.log2(nbytes)) if nbytes > 0 else -1
