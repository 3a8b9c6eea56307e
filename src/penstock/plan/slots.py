"""Names of saved tensors: by the place where they were saved, never by address or a global counter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from penstock.core.units import format_bytes

MatchKey = tuple[str, int, int]
"""(module path, ordinal, size bucket), by which a slot of one step is matched in the next."""


@dataclass(frozen=True, slots=True)
class SlotKey:
    """One saved storage of a step, as the module that saved it sees it."""

    module: str
    """Path of the module whose forward saved it first; ``""`` is the root."""
    ordinal: int
    """0-based index of the storage among those that this module saved in this pass."""
    nbytes: int
    """Exact size of the storage; matching uses ``bucket``."""

    @property
    def bucket(self) -> int:
        """Size in eighths of an octave, so that similar dynamic shapes match."""
        return _bucket(self.nbytes)

    @property
    def match_key(self) -> MatchKey:
        """Key by which a plan is looked up."""
        return (self.module, self.ordinal, _bucket(self.nbytes))

    def __str__(self) -> str:
        return f"{self.module or '<root>'}#{self.ordinal} ({format_bytes(self.nbytes)})"


@lru_cache(maxsize=4096)
def _bucket(nbytes: int) -> int:
    return round(8 * math.log2(nbytes)) if nbytes > 0 else -1
