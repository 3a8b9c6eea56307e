"""Events of a profile as NumPy arrays, so that sums over all of them are vectorized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """Read-only arrays with one entry per event of the profile, or per slot where the field says so."""

    at_ns: Integers
    """Time of the event."""
    slot: Integers
    """Index of the event's slot."""
    save: Flags
    use: Flags
    free: Flags
    nbytes: Integers
    """Size of the event's slot."""
    needed: Flags
    """True where backward asks for the event's slot."""
    sizes: Integers
    """Size per slot."""
    small: Integers
    """Bytes below the floor that are alive at the event."""
    small_at_save: Integers
    """Bytes below the floor that are alive at the save, per slot."""
    small_at_use: Integers
    """Bytes below the floor that are alive at the use, per slot."""
    save_place: Integers
    """Index of the event that saves the slot, per slot."""
    use_place: Integers
    """Index of the event that uses the slot, per slot; the number of events where none does."""
    free_place: Integers
    """Index of the event that frees the slot, per slot."""

    @property
    def count(self) -> int:
        """Number of events."""
        return len(self.slot)

    def most_alive_bytes(self, least: int) -> int:
        """Return the largest number of bytes alive at once if nothing is moved, at least ``least``."""
        alive = np.cumsum(self.nbytes * self.save - self.nbytes * self.free)
        beside = alive + self.small
        return int(np.max(beside, initial=least, where=~self.free))


def step_arrays(
    steps: Sequence[tuple[int, int, int]],
    sizes: Sequence[int],
    needed: Sequence[bool],
    small_at_save: Sequence[int],
    small_at_need: Sequence[int],
) -> StepArrays:
    """Convert a profile's events to arrays.

    Args:
        steps: (time in ns; 0 for a save, 1 for a use, 2 for a free; slot), in order.
        sizes: Bytes per slot.
        needed: Per slot, true if backward asks for it.
        small_at_save: Per slot, the bytes below the floor that are alive when it is saved.
        small_at_need: Per slot, the bytes below the floor that are alive when it is used.
    """
    at_ns, event, slot = np.array(steps, np.int64).reshape(-1, 3).T.copy()
    of_slot, asked = np.array(sizes, np.int64), np.array(needed, np.bool_)
    beside_save, beside_use = (
        np.array(small, np.int64) for small in (small_at_save, small_at_need)
    )
    save, use, free = (event == kind for kind in range(3))
    return StepArrays(
        at_ns=at_ns,
        slot=slot,
        save=save,
        use=use,
        free=free,
        nbytes=of_slot[slot],
        needed=asked[slot],
        sizes=of_slot,
        small=np.where(save, beside_save[slot], beside_use[slot]),
        small_at_save=beside_save,
        small_at_use=beside_use,
        save_place=_places(slot, save, len(of_slot)),
        use_place=_places(slot, use, len(of_slot)),
        free_place=_places(slot, free, len(of_slot)),
    )


def _places(slot: Integers, happens: Flags, slots: int) -> Integers:
    found = np.full(slots, len(slot), np.int64)
    found[slot[happens]] = np.flatnonzero(happens)
    return found
