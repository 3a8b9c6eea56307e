"""Saved storages that the plan keeps: counted, and made ready to be spilled only if room is needed.

[Note: kept storages]
    A plan says what stays, but it could be wrong: then what stays has to go after all. A storage that is
    ready to go has a record for the profile, a state, and a lock around every look at it; for a tensor
    that stays these would cost more than all else. So it is only charged to the budget and noted down
    here. When somebody needs room, all that is noted down here is *promoted*, at once: each becomes the
    ``SavedStorage`` that it would have been. What a profile says about a slot is not recorded meanwhile,
    so a pass with such storages tells the planner no more than whether it still is as it was planned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.plan.slots import SlotKey
from penstock.runtime.residency import Origin, SavedStorage, SlotRecord, View

if TYPE_CHECKING:
    from penstock.runtime.passes import Pass
    from penstock.runtime.planner import Planner
    from penstock.runtime.traffic import Traffic


@dataclass(slots=True, eq=False)
class KeptStorage:
    """A storage that stays, however many saved tensors view it. Guarded by the runtime's lock."""

    cdata: int
    nbytes: int
    version: int
    source: weakref.ref[torch.UntypedStorage]
    base: weakref.ref[torch.Tensor]
    of_pass: Pass
    index: int
    """Position in its pass, in the order of saving."""
    place: tuple[str, str]
    """Path and type of the module that saved it."""
    ordinal: int
    dtype: torch.dtype
    views: list[weakref.ref[View]]
    """The handles, whose views keep the storage alive."""
    handles: int = 1
    promoted: SavedStorage | None = None
    """What it has become."""

    @property
    def key(self) -> SlotKey:
        """Its name."""
        return SlotKey(self.place[0], self.ordinal, self.nbytes)

    @property
    def label(self) -> str:
        """What to call it in errors."""
        return str(self.key)


class KeptStorages:
    """All of them. Thread-safe, but for ``promote_all``.

    Attributes:
        table: Those whose source is alive, by its address (TRAPS rule 27).
    """

    def __init__(
        self, *, planner: Planner, traffic: Traffic, current_pass: Callable[[], Pass]
    ) -> None:
        """Keep nothing yet.

        Args:
            planner: Says which slots the plan keeps.
            traffic: Has the lock, the charges, and the table of what has been promoted.
            current_pass: The pass that is being saved; called under the lock.
        """
        self.table: dict[int, KeptStorage] = {}
        self._planner = planner
        self._traffic = traffic
        self._lock = traffic.lock
        self._current_pass = current_pass
        self._passes: dict[Pass, None] = {}

    def keep(  # noqa: PLR0911, PLR0917  (hot: keywords cost)
        self,
        storage: torch.UntypedStorage,
        nbytes: int,
        base: torch.Tensor,
        version: int,
        place: tuple[str, str],
        dtype: torch.dtype,
        view: View,
    ) -> KeptStorage | None:
        """Count a storage that the plan keeps; the same one for each handle to it. Never waits.

        Args:
            storage: What autograd saves.
            nbytes: Its size.
            base: The tensor whose version counter guards it.
            version: That counter's value.
            place: Path and type of the module that saves it.
            dtype: Of the saved tensor.
            view: The handle, which has a view of the storage.

        Returns:
            ``None`` if the plan does not say that it stays, or there is no room: then it is to be saved.
        """
        sure = self._planner.sure
        if not sure and not self.table:
            return None
        cdata = storage._cdata
        traffic = self._traffic
        with self._lock:
            kept = self.table.get(cdata)
            if (
                kept is not None
                and kept.version == version
                and kept.source() is storage
                and kept.base() is base
            ):
                kept.handles += 1
                kept.views.append(weakref.ref(view))
                return kept
            if cdata in traffic.table:  # saved, perhaps as this very one
                return None
            current = self._current_pass()
            path = place[0]
            ordinal = current.ordinals.get(path, 0)
            if (path, ordinal, nbytes) not in sure:
                return None
            if traffic.take_spare(nbytes):
                return self._note(
                    current, ordinal, storage, nbytes, base, version, place, dtype, view
                )
        if not traffic.take(nbytes):
            return None
        with self._lock:
            current = self._current_pass()
            ordinal = current.ordinals.get(path, 0)
            return self._note(current, ordinal, storage, nbytes, base, version, place, dtype, view)

    def _note(  # noqa: PLR0917  (hot: keywords cost)
        self,
        current: Pass,
        ordinal: int,
        storage: torch.UntypedStorage,
        nbytes: int,
        base: torch.Tensor,
        version: int,
        place: tuple[str, str],
        dtype: torch.dtype,
        view: View,
    ) -> KeptStorage:
        current.ordinals[place[0]] = ordinal + 1
        index, cdata = current.saved_count, storage._cdata
        if not current.kept:
            self._passes[current] = None
        kept = self.table[cdata] = current.kept[index] = KeptStorage(
            cdata,
            nbytes,
            version,
            weakref.ref(storage),
            weakref.ref(base),
            current,
            index,
            place,
            ordinal,
            dtype,
            [weakref.ref(view)],
        )
        current.saved_count = index + 1
        current.kept_bytes += nbytes
        return kept

    def release(self, kept: KeptStorage) -> SavedStorage | None:
        """A handle has died. Says what has been promoted: then that has to be released."""
        with self._lock:
            if kept.promoted is None:
                kept.handles -= 1
                if not kept.handles:
                    self._forget(kept)
                    self._traffic.give(kept.nbytes)
            return kept.promoted

    def promote_all(self) -> None:
        """From now on all of them can be spilled. Under the lock."""
        for of_pass in tuple(self._passes):
            for kept in tuple(of_pass.kept.values()):
                storage = kept.source()
                if storage is not None:  # else its last handle is dying at this moment
                    self._promote(kept, storage)

    def _promote(self, kept: KeptStorage, storage: torch.UntypedStorage) -> None:
        of_pass = kept.of_pass
        views = [view for ref in kept.views if (view := ref()) is not None]
        origin = Origin(*kept.place, str(kept.dtype).removeprefix("torch."))
        record = SlotRecord(kept.key, origin, of_pass.start_ns, 0, handles=kept.handles)
        saved = kept.promoted = SavedStorage(
            kept.cdata,
            kept.nbytes,
            kept.version,
            kept.source,
            kept.base,
            of_pass,
            kept.index,
            record,
            storage,
            handles=kept.handles,
            views=kept.views,
            pending=sum(not view.unpacked for view in views),
        )
        for view in views:
            view.saved = saved
        if self.table.get(kept.cdata) is kept:
            self._traffic.table[kept.cdata] = saved
        self._forget(kept)
        of_pass.promote(saved)

    def _forget(self, kept: KeptStorage) -> None:
        if self.table.get(kept.cdata) is kept:
            del self.table[kept.cdata]
        of_pass = kept.of_pass
        del of_pass.kept[kept.index]
        if not of_pass.kept:
            del self._passes[of_pass]
