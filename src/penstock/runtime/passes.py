"""Passes: a forward graph and its backward. The unit that is profiled, planned and prefetched.

A pass begins with the first tensor saved after a backward, and ends with the next backward. So an
iteration with gradient accumulation has several passes alike, one with two losses may have two
different ones, and interleaved micro-batches share one. Within a pass a slot is known by the path of
its module, how many storages that module has saved before it in the pass, and its size; never by an
address or by a global counter, so that the next iteration finds it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from penstock.plan.operators import Operator
from penstock.plan.slots import MatchKey, SlotKey
from penstock.runtime.residency import Residency, SavedStorage, SlotRecord

if TYPE_CHECKING:
    from penstock.runtime.kept import KeptStorage

MAX_RECORDS: Final = 100_000
"""A forward that has saved so much without a backward is an evaluation without ``no_grad``."""


INPUT: Final = "<input>"
"""Ends the names of what a module that is run again was called with, until something inside saves it."""


_slot_key = lru_cache(maxsize=65536)(SlotKey)


class Pass:
    """Storages saved between two backwards. Guarded by the runtime's lock.

    Attributes:
        index: Number of the pass in its session, from 1.
        start_ns: When it began, in compute time.
        backward_start_ns: When the first of its storages was needed.
        end_ns: When its backward was over.
        began_ns: When it began, by the recorder's clock.
        backward_began_ns: When the first of its storages was needed, by the recorder's clock.
        records: What was learnt about each slot, in the order of saving; not about those kept.
        saved_count: Storages above the floor that it has saved.
        ordinals: How many of them each module has saved, by its path.
        kept: Those that only count, by their position in the pass. See :mod:`.kept`.
        kept_bytes: The sum of all that ever were in ``kept``.
        promoted: Whether any of them had to be made ready to be spilled.
        small_bytes: The most bytes below the floor that were alive at once.
        small_count: Storages saved below the floor.
        spilled: Whether any of its storages has been, or is being, written to a tier.
        dropped: Storages that were not held, because they will be made again.
        place: The furthest place of the plan's order of need that backward has come to; -1 before it.
        window_full: Whether a read had to wait because the window was full.
        observed: Whether it was watched closely enough to plan what to make again.
        operators: What ran in it, if it was observed.
    """

    def __init__(self, index: int, start_ns: int, began_ns: int) -> None:
        """Begin a pass at ``start_ns`` of compute time, and ``began_ns`` of the clock's."""
        self.index = index
        self.start_ns = start_ns
        self.backward_start_ns: int | None = None
        self.end_ns: int | None = None
        self.began_ns = began_ns
        self.backward_began_ns = 0
        self.records: list[SlotRecord] = []
        self.small_bytes = 0
        self.small_count = 0
        self._live: dict[int, SavedStorage] = {}
        self.saved_count = 0
        self.ordinals: dict[str, int] = {}
        self.kept: dict[int, KeptStorage] = {}
        self.kept_bytes = 0
        self.promoted = False
        self.spilled = False
        self.dropped = 0
        self.place = -1
        self.window_full = False
        self.observed = False
        self.operators: tuple[Operator, ...] = ()
        self._need: list[int] | None = None
        self._here = 0
        self._ahead = 0
        self._position: dict[int, int] = {}

    def begin_backward(self, at_ns: int, clock_ns: int) -> None:
        """The first of its storages is needed, at these times of compute and of the clock."""
        self.backward_start_ns = at_ns
        self.backward_began_ns = clock_ns

    def retime(self, times: Mapping[int, int]) -> None:
        """Put what is in ``times`` in the place of its moments; the order of them stays.

        Args:
            times: By the times that it has now, both in ns.
        """
        self.start_ns = times.get(self.start_ns, self.start_ns)
        if self.backward_start_ns is not None:
            self.backward_start_ns = times.get(self.backward_start_ns, self.backward_start_ns)
        if self.end_ns is not None:
            self.end_ns = times.get(self.end_ns, self.end_ns)
        for record in self.records:
            record.saved_at_ns = times.get(record.saved_at_ns, record.saved_at_ns)
            if record.needed_at_ns is not None:
                record.needed_at_ns = times.get(record.needed_at_ns, record.needed_at_ns)
        moved = (
            each.moved(times.get(each.start_ns, each.start_ns), times.get(each.end_ns, each.end_ns))
            for each in self.operators
        )
        self.operators = tuple(each for each in moved if each.took_ns)

    def new_key(self, module: str, nbytes: int) -> SlotKey:
        """The identity of the next storage that ``module`` saves."""
        ordinal = self.ordinals.get(module, 0)
        self.ordinals[module] = ordinal + 1
        return _slot_key(module, ordinal, nbytes)

    def next_ordinal(self, module: str) -> int:
        """Of the next storage that ``module`` saves."""
        return self.ordinals.get(module, 0)

    def add(self, saved: SavedStorage) -> None:
        """Remember a storage until it is dead, and its record until the pass has been profiled."""
        self._live[saved.index] = saved
        self.saved_count += 1
        self.records.append(saved.record)
        self._need = None  # saved during backward: the order of need changes

    def promote(self, saved: SavedStorage) -> None:
        """Note that a storage added as only kept can be spilled from now on."""
        self._live[saved.index] = saved
        self.promoted = True

    def remove(self, saved: SavedStorage) -> None:
        """The storage is dead."""
        self._live.pop(saved.index, None)

    @property
    def abandoned(self) -> bool:
        """Return whether its graph was dropped without backward (TRAPS rule 7), or grows without end."""
        if self.backward_start_ns is not None:
            return False
        if self.kept or self._live:
            return self.saved_count > MAX_RECORDS
        return self.saved_count > 0

    @property
    def live(self) -> Iterator[SavedStorage]:
        """Storages that are not dead and could be spilled, in the order of saving."""
        return iter(sorted(self._live.values(), key=_index))

    def arrive(self, saved: SavedStorage | KeptStorage, ranks: dict[MatchKey, int]) -> None:
        """``saved`` is being needed now: what follows it is expected next.

        Args:
            saved: A storage of this pass.
            ranks: The plan's order of need, by ``SlotKey.match_key``. If it does not know every live
                storage, the reverse of the order of saving is expected.
        """
        if self._need is None:
            self._order(ranks)
        here = self._position.get(saved.index, 0)
        if here < self._here:  # the graph is walked again, or not in the order foreseen
            self._ahead = here
        self._here = here
        self._ahead = max(self._ahead, here + 1)

    def next_spilled(self, *, again: bool) -> SavedStorage | None:
        """The next storage in the order of need that only a tier has; ``None`` if there is none.

        Args:
            again: Also those of which every handle has been unpacked before.
        """
        need = self._need or ()
        while self._ahead < len(need):
            following = self._live.get(need[self._ahead])
            if following is not None:
                if following.state is Residency.WRITING:
                    return None  # its turn comes when it has been written, or it is needed first
                if (
                    following.state is Residency.SPILLED
                    and following.remake is None
                    and (again or following.pending > 0)
                    and in_tier_only(following)
                ):
                    return following
            self._ahead += 1
        return None

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
        alive: list[SavedStorage | KeptStorage] = [*self._live.values(), *self.kept.values()]
        alive.sort(key=_index, reverse=True)
        known = {saved.index: ranks.get(saved.key.match_key) for saved in alive}
        if None not in known.values():
            alive.sort(key=lambda saved: known[saved.index] or 0)
        order = [saved.index for saved in alive]
        self._need = order
        self._position = {index: place for place, index in enumerate(order)}
        self._here = self._ahead = 0


def _index(saved: SavedStorage | KeptStorage) -> int:
    return saved.index


def in_tier_only(saved: SavedStorage) -> bool:
    """Return whether no live copy of its bytes is left, in whosever hands."""
    return saved.source() is None and (saved.restored is None or saved.restored() is None)
