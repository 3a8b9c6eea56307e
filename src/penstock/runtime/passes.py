"""Passes: a forward graph and its backward. The unit that is profiled, planned and prefetched.

A pass begins with the first tensor saved after a backward, and ends with the next backward. So an
iteration with gradient accumulation has several passes alike, one with two losses may have two
different ones, and interleaved micro-batches share one. Within a pass a slot is known by the path of
its module, how many storages that module has saved before it in the pass, and its size; never by an
address or by a global counter, so that the next iteration finds it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.plan.slots import MatchKey, SlotKey

if TYPE_CHECKING:
    from penstock.runtime.residency import SavedStorage, SlotRecord

MAX_RECORDS: Final = 100_000
"""A forward that has saved so much without a backward is an evaluation without ``no_grad``."""


class Pass:
    """What is saved between two backwards. Guarded by the executor's lock."""

    def __init__(self, index: int, start_ns: int) -> None:
        """Begin a pass at ``start_ns`` of compute time."""
        self.index = index
        self.start_ns = start_ns
        self.backward_start_ns: int | None = None
        self.end_ns: int | None = None
        self.records: list[SlotRecord] = []
        self.small_bytes = 0
        self.small_count = 0
        self.saved_bytes = 0
        self._live: dict[int, SavedStorage] = {}
        self._ordinals: dict[str, int] = {}
        self._need: list[int] | None = None
        self._position: dict[int, int] = {}

    def new_key(self, module: str, nbytes: int) -> SlotKey:
        """The identity of the next storage that ``module`` saves."""
        ordinal = self._ordinals.get(module, 0)
        self._ordinals[module] = ordinal + 1
        return SlotKey(module, ordinal, nbytes)

    def add(self, saved: SavedStorage) -> None:
        """Remember a storage until it is dead, and its record until the pass has been profiled."""
        self._live[saved.index] = saved
        self.records.append(saved.record)
        self.saved_bytes += saved.nbytes
        self._need = None  # saved during backward: the order of need changes

    def remove(self, saved: SavedStorage) -> None:
        """The storage is dead."""
        self._live.pop(saved.index, None)

    @property
    def abandoned(self) -> bool:
        """Whether its graph was dropped without a backward (TRAPS rule 7), or never stops growing."""
        if not self.records or self.backward_start_ns is not None:
            return False
        return not self._live or len(self.records) > MAX_RECORDS

    @property
    def live(self) -> Iterator[SavedStorage]:
        """Storages that are not dead, in the order of saving."""
        return iter(tuple(self._live.values()))

    def needs_after(
        self, saved: SavedStorage, ranks: dict[MatchKey, int]
    ) -> Iterator[SavedStorage]:
        """Storages expected to be needed after ``saved``, soonest first.

        Args:
            saved: What is being needed now.
            ranks: The plan's order of need, by ``SlotKey.match_key``. Storages that it does not know
                are expected in the reverse of the order of saving.
        """
        if self._need is None:
            self._order(ranks)
        assert self._need is not None
        here = self._position.get(saved.index, -1) + 1
        for index in self._need[here:]:
            following = self._live.get(index)
            if following is not None:
                yield following

    def needed_last(self) -> Iterator[SavedStorage]:
        """Live storages, the one that will be needed last first."""
        if self._need is None:
            yield from self.live
            return
        for index in reversed(self._need):
            saved = self._live.get(index)
            if saved is not None:
                yield saved

    def _order(self, ranks: dict[MatchKey, int]) -> None:
        alive = list(reversed(self._live.values()))
        known = {saved.index: ranks.get(saved.record.key.match_key) for saved in alive}
        if None not in known.values():
            alive.sort(key=lambda saved: known[saved.index] or 0)
        order = [saved.index for saved in alive]
        self._need = order
        self._position = {index: place for place, index in enumerate(order)}
