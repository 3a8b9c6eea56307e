"""The steps of a profile as arrays: what is counted over all of them is counted at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class StepArrays:
    """By step, but where it says by slot. None of them may be written to."""

    at_ns: Integers
    """When it is."""
    slot: Integers
    """Which slot something happens to."""
    save: Flags
    use: Flags
    free: Flags
    nbytes: Integers
    """Of the slot."""
    needed: Flags
    """Whether backward asks for the slot."""
    sizes: Integers
    """By slot, its bytes."""
    small: Integers
    """What is alive beside the slot then, below the floor."""
    small_at_save: Integers
    """By slot, the same at its save."""
    use_place: Integers
    """By slot, the step that uses it; after all steps, where none does."""
    free_place: Integers
    """By slot, the step that frees it."""

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self.slot)

    def most_alive_bytes(self, least: int) -> int:
        """The most that is alive at once if nothing is moved, or ``least`` if that is more."""
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
    """From what happens.

    Args:
        steps: (when in ns, 0 for a save, 1 for a use, 2 for a free, slot), in order.
        sizes: By slot, its bytes.
        needed: By slot, whether backward asks for it.
        small_at_save: By slot, what is alive beside it below the floor when it is saved.
        small_at_need: By slot, the same when it is used.
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
        use_place=_places(slot, use, len(of_slot)),
        free_place=_places(slot, free, len(of_slot)),
    )


def _places(slot: Integers, happens: Flags, slots: int) -> Integers:
    found = np.full(slots, len(slot), np.int64)
    found[slot[happens]] = np.flatnonzero(happens)
    return found
