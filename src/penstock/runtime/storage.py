"""Saved storages, the passes that they belong to, and facts about slots.

Data only, guarded by the runtime's lock. Modules that move storages or plan for them import this one, and
not the reverse.

[Note: residency]
    The memory that exists for a storage that can be spilled::

                    save                        written                    read begins
            (new) ────────▶ RESIDENT ──▶ WRITING ────────▶ SPILLED ──────────────────▶ READING
                               ▲            │                 ▲  ▲                        │
                               └────────────┘                 │  └── dropped, or the ─────┤ done
                          needed before it was written,       │      last user took it    ▼
                          or the write failed                 └────────────────────── RESTORED

    Every state can also end in DEAD, when the last handle that autograd holds has died. A storage below
    the floor is SMALL from its save to its end. One that the plan keeps is KEPT, and becomes RESIDENT if
    room is needed.

[Note: kept storages]
    A plan says what stays, but it could be wrong: then what stays has to go after all. A storage that is
    ready to go has a record for the profile, a reference that holds it, and a lock around every look at
    it; for a tensor that stays these would cost more than all else. So a KEPT storage is only charged to
    the budget and noted in the table. When somebody needs room, all that are KEPT are *promoted*, at
    once: each becomes RESIDENT. A KEPT storage leaves no facts about its slot, so a pass with such
    storages tells the planner no more than whether it still is as it was planned.

[Note: passes]
    A pass is a forward graph and its backward: the unit that is profiled, planned and prefetched. It
    begins with the first tensor saved after a backward, and ends with the next backward. So an iteration
    with gradient accumulation has several passes alike, one with two losses may have two different ones,
    and interleaved micro-batches share one. Within a pass a slot is known by the path of its module, how
    many storages that module has saved before it in the pass, and its size; never by an address or by a
    global counter, so that the next iteration finds it again.

[Note: preserved objects]
    When the last reference in Python to a tensor or a storage is dropped, and torch has others, torch
    keeps the Python object for later, and owns it. Before torch 2.11, code that gets that object back by
    a weak reference must call ``_fix_weakref``: else torch may free the memory while the object is held.
    ``torch.utils.weak`` does the same.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from penstock.plan.operators import Operator
from penstock.plan.slots import MatchKey, SlotKey

if TYPE_CHECKING:
    from penstock.plan.plan import Decision
    from penstock.plan.profile import CodecSample
    from penstock.runtime.digests import Digest

MAX_RECORDS: Final = 100_000
"""A forward that has saved so much without a backward is an evaluation without ``no_grad``."""
INPUT: Final = "<input>"
"""Suffix of slot names for inputs of a recomputed module, until something inside saves them."""

_TORCH_TRACKS_WEAKREFS: Final = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (
    2,
    11,
)
"""True if torch itself notices that a weak reference has returned a preserved object."""

_slot_key = lru_cache(maxsize=65536)(SlotKey)
_label = lru_cache(maxsize=65536)(str)


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a type, as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


class OwningWeakRef(weakref.ref[Any]):
    """Weak reference that owns what it returns. See [Note: preserved objects]."""

    __slots__ = ()

    def __call__(self) -> Any:
        """Return the tensor or storage; ``None`` if it is gone."""
        found = super().__call__()
        if found is not None:
            found._fix_weakref()
        return found


if TYPE_CHECKING:
    TensorRef = weakref.ref
else:
    TensorRef = weakref.ref if _TORCH_TRACKS_WEAKREFS else OwningWeakRef


class Residency(enum.Enum):
    """Which memory exists for a saved storage."""

    SMALL = "small"
    """Below the floor, or saved under a plan that moves nothing: its handles hold it, it is counted, and
    it stays."""
    KEPT = "kept"
    """Kept by the plan: its handles hold it, and it is counted; see [Note: kept storages]."""
    RESIDENT = "resident"
    """The storage itself is held, and charged. If ``ticket`` is set, a tier has its bytes too."""
    WRITING = "writing"
    """The storage is held and charged; a tier is being filled from it."""
    SPILLED = "spilled"
    """Only the tier has the bytes, or nothing has them and ``recipe`` recomputes them. The program itself
    may still hold the storage (``source``)."""
    READING = "reading"
    """The tier has the bytes; device memory is charged and being filled from it."""
    RESTORED = "restored"
    """The tier has the bytes, and so does device memory held for a coming unpack, and charged."""
    DEAD = "dead"
    """No handle is left: nothing is held."""


class Origin(NamedTuple):
    """Module and thread that saved a storage."""

    module: str
    """Path of the innermost running module."""
    kind: str
    """Name of the module's type."""
    dtype: str
    """As ``"float32"``."""


class Encoding(NamedTuple):
    """Codec by which a storage is written."""

    codec: str
    """Name of the codec, as in plans: ``"zero-value"``."""
    dtype: str
    """Type of the elements, by torch's name: ``"float32"``."""


class View(Protocol):
    """Handle that keeps a view of a saved storage until that is spilled."""

    view: torch.Tensor | None
    """The view; ``None`` once it is stripped."""
    unpacked: bool
    """True if backward has asked for it."""

    def strip(self) -> None:
        """Drop the reference to the storage; remember the view."""


@dataclass(slots=True)
class SlotRecord:
    """Facts of one pass about one slot, for the profile. Times are compute time."""

    key: SlotKey
    origin: Origin
    saved_at_ns: int
    small_bytes: int
    """Bytes below the floor that were alive then."""
    needed_at_ns: int | None = None
    held_elsewhere: bool = False
    handles: int = 1
    """Saved tensors that are views of it."""
    sign_only_handles: int = 0
    """Number of those for which backward is proven to ask only which elements are above zero."""
    codecs: tuple[CodecSample, ...] = ()
    """Results of codecs on a sample of it, if one was taken."""
    frame_bytes: int | None = None
    """Bytes that it took in a tier, if it was encoded."""
    waited_ns: int = 0
    """Time that backward waited for it to be read."""
    producer: str | None = None
    """As in ``SlotProfile``; known once an observed pass is over."""
    recipe: tuple[str, ...] = ()
    """As in ``SlotProfile``; known in an observed pass."""
    source: SlotRecord | None = None
    """Record of the recipe's input."""


class Recipe:
    """Recomputation of one storage.

    Attributes:
        name: Modules that are called, for errors; a name that is proven once counts as proven.
        compute: Returns a tensor that is all there is in its storage.
        lock: Held while it is computed.
        digest: Digest of what was dropped, where it is to be proven.
    """

    __slots__ = ("compute", "digest", "lock", "name")

    def __init__(self, name: str, compute: Callable[[], torch.Tensor]) -> None:
        """Describe the recomputation of a storage that is not dropped yet."""
        self.name = name
        self.compute = compute
        self.lock = threading.RLock()
        self.digest: Digest | None = None


class SavedStorage:
    """One storage that autograd saved, however many saved tensors are views of it.

    Guarded by the runtime's lock. The references that keep memory alive:

    * ``storage`` is the only strong reference that Penstock holds to memory: to the source while RESIDENT
      or WRITING, to the restored copy while RESTORED, else ``None``. What is KEPT or SMALL is held by the
      views of its handles.
    * ``source`` and ``restored`` are weak: they lead to a live copy that somebody else (the user's frame,
      a node that has unpacked but not finished) holds, and that can be used again.

    Fields below ``dtype`` have values once it is ``movable``: what is only counted does not pay for them.

    Attributes:
        state: Which memory exists for it.
        cdata: Key in the table. Addresses are used again: ``source`` tells whose it is.
        nbytes: Bytes of the storage.
        source: The storage itself.
        of_pass: The pass that saved it.
        handles: Handles that are alive.
        version: Version counter when it was saved; saves at another version are another SavedStorage.
            A SMALL storage has none, and neither of the next two.
        base: The tensor whose version counter ``version`` belongs to, which guards the whole storage; or
            the storage itself, if its parts have counters of their own.
        index: Position in its pass, in the order of saving.
        slot: Module path, ordinal and bytes, if it was KEPT at first; else ``None``.
        place: Path and type of the module that saved it, if it was KEPT at first.
        dtype: Type of the first saved tensor, if it was KEPT at first.
        record: Facts for the profile. Neither a KEPT nor a SMALL storage has any.
    """

    __slots__ = (
        "__weakref__",
        "awaits_recipe",
        "base",
        "cdata",
        "complete",
        "deferred",
        "dtype",
        "encoding",
        "handles",
        "index",
        "nbytes",
        "of_pass",
        "pending",
        "place",
        "read",
        "recipe",
        "record",
        "refused_at_bytes",
        "restored",
        "slot",
        "source",
        "state",
        "storage",
        "stuck",
        "target",
        "ticket",
        "tier",
        "version",
        "views",
        "writing",
    )

    state: Residency
    cdata: int
    nbytes: int
    source: weakref.ref[torch.UntypedStorage]
    of_pass: Pass
    handles: int
    version: int
    base: weakref.ref[torch.Tensor | torch.UntypedStorage]
    index: int
    storage: torch.UntypedStorage | None
    slot: tuple[str, int, int] | None
    place: tuple[str, str]
    dtype: torch.dtype
    record: SlotRecord
    complete: bool
    """Only an in-place operation could change it, and a version counter would tell; see
    [Note: complete storages]."""
    views: list[weakref.ref[View]] | None
    """Handles with a view of the storage, which they drop before it is spilled."""
    pending: int
    """Handles that were never unpacked: while there are any, RESTORED memory is held for them."""
    restored: weakref.ref[torch.UntypedStorage] | None
    ticket: Any
    """Claim on the bytes in ``tier``; kept until DEAD, because a graph may be walked again."""
    tier: Any
    writing: bool
    """True if a write is under way, also after it was needed or has died: its charge stays."""
    target: Any
    """Device memory being filled, while READING."""
    read: Any
    """The transfer that fills it."""
    deferred: Decision | None
    """Offloading postponed until it is known whether signs are enough. RESIDENT meanwhile."""
    encoding: Encoding | None
    """Encoding of its bytes in ``tier``; ``None`` if they are not encoded."""
    stuck: bool
    """Writing it has failed: it stays where it is."""
    refused_at_bytes: int
    """Bytes that tiers held when they had no room for it: once they hold less, it is not ``stuck``."""
    recipe: Recipe | None
    """Recomputation of its bytes, when it is SPILLED and no tier has them."""
    awaits_recipe: bool
    """True if it is dropped when the call that makes it ends. RESIDENT meanwhile."""

    def __init__(
        self,
        state: Residency,
        cdata: int,
        nbytes: int,
        source: weakref.ref[torch.UntypedStorage],
        of_pass: Pass,
    ) -> None:
        """Describe a storage that has just been saved, with one handle."""
        self.state = state
        self.cdata = cdata
        self.nbytes = nbytes
        self.source = source
        self.of_pass = of_pass
        self.handles = 1

    def hold(self, storage: torch.UntypedStorage, record: SlotRecord) -> None:
        """Hold the storage, which can be moved from now on: it is RESIDENT."""
        self.record = record
        self.storage = storage
        self.pending = 1
        self.restored = None
        self.ticket = None
        self.tier = None
        self.writing = False
        self.target = None
        self.read = None
        self.deferred = None
        self.encoding = None
        self.stuck = False
        self.refused_at_bytes = -1
        self.recipe = None
        self.awaits_recipe = False
        self.state = Residency.RESIDENT

    @property
    def recorded(self) -> bool:
        """True if it has a record; False while it is only counted."""
        return self.state is not Residency.KEPT and self.state is not Residency.SMALL

    @property
    def key(self) -> SlotKey:
        """Name of the slot."""
        if self.state is Residency.KEPT and self.slot is not None:
            return _slot_key(*self.slot)
        return self.record.key

    @property
    def label(self) -> str:
        """Name in errors, logs and traces."""
        return _label(self.key)


class Pass:
    """Storages saved between two backwards. Guarded by the runtime's lock.

    Attributes:
        index: Number of the pass in its session, from 1.
        start_ns: When it began, in compute time.
        backward_start_ns: When the first of its storages was needed.
        end_ns: When its backward was over.
        began_ns: When it began, by the recorder's clock.
        backward_began_ns: When the first of its storages was needed, by the recorder's clock.
        took_ns: How long it took by that clock, once it has ended.
        records: Facts about each slot that is not kept, in the order of saving.
        live: Storages that are not dead and not SMALL, by their position in the pass.
        saved_count: Storages above the floor that it has saved.
        ordinals: Number of them that each module has saved, by its path.
        kept_count: KEPT storages that are alive.
        kept_bytes: The sum of all that ever were KEPT.
        promoted: True if any of them was promoted; see [Note: kept storages].
        small_bytes: The most bytes below the floor that were alive at once.
        small_count: Storages saved below the floor.
        spilled: True if any of its storages has been, or is being, written to a tier.
        dropped: Storages that were not held, because they will be recomputed.
        place: The furthest place of the plan's order of need that backward has come to; -1 before it.
        window_full: True if a read had to wait because the window was full.
        observed: True if its operators were recorded, so that recomputation can be planned.
        operators: Operators that ran in it, if it was observed.
        unrepeatable: Paths of modules that it showed to be unfit for recomputation.
    """

    def __init__(self, index: int, start_ns: int, began_ns: int) -> None:
        """Begin a pass at ``start_ns`` of compute time, and ``began_ns`` of the clock's."""
        self.index = index
        self.start_ns = start_ns
        self.backward_start_ns: int | None = None
        self.end_ns: int | None = None
        self.began_ns = began_ns
        self.backward_began_ns = 0
        self.took_ns = 0
        self.records: list[SlotRecord] = []
        self.small_bytes = 0
        self.small_count = 0
        self.live: dict[int, SavedStorage] = {}
        self.saved_count = 0
        self.ordinals: dict[str, int] = {}
        self.kept_count = 0
        self.kept_bytes = 0
        self.promoted = False
        self.spilled = False
        self.dropped = 0
        self.place = -1
        self.window_full = False
        self.observed = False
        self.operators: tuple[Operator, ...] = ()
        self.unrepeatable: frozenset[str] = frozenset()
        self._need: list[int] | None = None
        self._here = 0
        self._ahead = 0
        self._position: dict[int, int] = {}

    def begin_backward(self, at_ns: int, clock_ns: int) -> None:
        """Begin backward, at these times of compute and of the clock: the first storage is needed."""
        self.backward_start_ns = at_ns
        self.backward_began_ns = clock_ns

    def retime(self, times: Mapping[int, int]) -> None:
        """Replace its times; their order stays.

        Args:
            times: New times by the present ones, both in ns.
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
        """Return the key of the next storage that ``module`` saves, and count that."""
        ordinal = self.ordinals.get(module, 0)
        self.ordinals[module] = ordinal + 1
        return _slot_key(module, ordinal, nbytes)

    def next_ordinal(self, module: str) -> int:
        """Return the ordinal of the next storage that ``module`` saves."""
        return self.ordinals.get(module, 0)

    def add(self, saved: SavedStorage) -> None:
        """Remember a storage until it is dead, and its record until the pass has been profiled."""
        self.live[saved.index] = saved
        self.saved_count += 1
        self.records.append(saved.record)
        self._need = None  # saved during backward: the order of need changes

    def remove(self, saved: SavedStorage) -> None:
        """Forget a storage that is dead."""
        self.live.pop(saved.index, None)

    @property
    def abandoned(self) -> bool:
        """Return whether its graph was dropped without backward (TRAPS rule 7), or grows without end."""
        if self.backward_start_ns is not None:
            return False
        if self.live:
            return self.saved_count > MAX_RECORDS
        return self.saved_count > 0

    def arrive(self, saved: SavedStorage, ranks: Mapping[MatchKey, int]) -> None:
        """Move the place of backward to ``saved``, which is needed now.

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
        """Return the next storage in the order of need that only a tier has, or ``None``.

        Args:
            again: Include storages of which every handle has been unpacked before.
        """
        need = self._need or ()
        while self._ahead < len(need):
            following = self.live.get(need[self._ahead])
            if following is not None:
                if following.state is Residency.WRITING:
                    return None  # its turn comes when it has been written, or it is needed first
                if (
                    following.state is Residency.SPILLED
                    and following.recipe is None
                    and (again or following.pending > 0)
                    and in_tier_only(following)
                ):
                    return following
            self._ahead += 1
        return None

    def needed_last(self) -> Iterator[SavedStorage]:
        """Yield live storages, the one that will be needed last first."""
        if self._need is None:
            yield from list(self.live.values())  # in the order of saving
            return
        for index in reversed(self._need):
            saved = self.live.get(index)
            if saved is not None:
                yield saved

    def _order(self, ranks: Mapping[MatchKey, int]) -> None:
        alive = sorted(self.live.values(), key=_index, reverse=True)
        known = {saved.index: ranks.get(saved.key.match_key) for saved in alive}
        if None not in known.values():
            alive.sort(key=lambda saved: known[saved.index] or 0)
        order = [saved.index for saved in alive]
        self._need = order
        self._position = {index: place for place, index in enumerate(order)}
        self._here = self._ahead = 0


def _index(saved: SavedStorage) -> int:
    return saved.index


def in_tier_only(saved: SavedStorage) -> bool:
    """Return whether no live copy of its bytes is left, in whosever hands."""
    return saved.source() is None and (saved.restored is None or saved.restored() is None)
