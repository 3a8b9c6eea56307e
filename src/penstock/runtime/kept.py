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
from typing import TYPE_CHECKING

import torch

from penstock.core.process import fork_guard
from penstock.runtime.storage import (
    KeptStorage,
    Origin,
    Pass,
    SavedStorage,
    SlotRecord,
    TensorRef,
    View,
)

if TYPE_CHECKING:
    from penstock.runtime.active_orders import ActiveOrders
    from penstock.runtime.traffic import Traffic


class KeptStorages:
    """All of them. Thread-safe, but for ``promote_all``.

    Its two methods run for every tensor that is saved, and a call of a Python function costs as much as
    most of what they do: so what they call elsewhere stands written out in them.

    Attributes:
        table: Those whose source is alive, by its address (TRAPS rule 27).
    """

    def __init__(
        self,
        *,
        active: ActiveOrders,
        traffic: Traffic,
        current_pass: Callable[[], Pass],
        release_promoted: Callable[[SavedStorage, bool], None],
    ) -> None:
        """Keep nothing yet.

        Args:
            active: Has the slots that the plan keeps.
            traffic: Has the lock, the charges, and the table of what has been promoted.
            current_pass: The pass that is being saved; called under the lock.
            release_promoted: Is told when a handle dies of what can be spilled by now, and whether that
                had been unpacked.
        """
        self.table: dict[int, KeptStorage] = {}
        self._active = active
        self._traffic = traffic
        self._lock = traffic.lock
        self._use = traffic.mover.use if traffic.mover.runs_behind else None
        self._current_pass = current_pass
        self._release_promoted = release_promoted
        self._passes: dict[Pass, None] = {}
        self._guard = fork_guard()

    def keep(  # noqa: PLR0912, PLR0917  (hot: calls and keywords cost)
        self,
        storage: torch.UntypedStorage,
        nbytes: int,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
        place: tuple[str, str],
        dtype: torch.dtype,
        view: View,
    ) -> KeptStorage | None:
        """Count a storage that the plan keeps; the same one for each handle to it. Never waits.

        Args:
            storage: What autograd saves.
            nbytes: Its size.
            base: The tensor whose version counter guards all of it; or the storage itself, if its
                parts have counters of their own.
            version: That counter's value; 0 for a storage.
            place: Path and type of the module that saves it.
            dtype: Of the saved tensor.
            view: The handle, which has a view of the storage.

        Returns:
            ``None`` if the plan does not say that it stays, or there is no room: then it is to be saved.
        """
        sure = self._active.kept
        if not sure and not self.table:
            return None
        if self._use is not None:  # first: as soon as it is noted down another thread may spill it
            self._use(storage)
        cdata = storage._cdata
        traffic = self._traffic
        charged = False
        while True:
            with self._lock:
                kept = self.table.get(cdata)
                if (
                    kept is not None
                    and kept.version == version
                    and kept.source() is storage
                    and kept.base() is base
                ):
                    kept.handles += 1
                    kept.more_views += (weakref.ref(view),)
                    if charged:  # another thread has saved it meanwhile
                        traffic.give(nbytes)
                    return kept
                if cdata in traffic.table:  # saved, perhaps as this very one
                    if charged:
                        traffic.give(nbytes)
                    return None
                current = self._current_pass()
                path = place[0]
                ordinal = current.ordinals.get(path, 0)
                if (path, ordinal, nbytes) not in sure:
                    if charged:
                        traffic.give(nbytes)
                    return None
                if charged or nbytes <= traffic.spare_bytes:
                    if not charged:
                        traffic.spare_bytes -= nbytes
                    current.ordinals[path] = ordinal + 1
                    index = current.saved_count
                    current.saved_count = index + 1
                    current.kept_bytes += nbytes
                    if not current.kept:
                        self._passes[current] = None
                    kept = self.table[cdata] = current.kept[index] = KeptStorage(
                        cdata,
                        nbytes,
                        version,
                        TensorRef(storage),
                        TensorRef(base),
                        current,
                        index,
                        place,
                        ordinal,
                        dtype,
                        weakref.ref(view),
                    )
                    return kept
            charged = traffic.take(nbytes)
            if not charged:
                return None

    def release(self, kept: KeptStorage, unpacked: bool) -> None:
        """A handle has died. Call it through ``locks.defer``."""
        if self._guard.in_child:
            return
        with self._lock.bare:
            promoted = kept.promoted
            if promoted is None:
                kept.handles -= 1
                if not kept.handles:
                    self._forget(kept)
                    self._traffic.give(kept.nbytes)
        if promoted is not None:
            self._release_promoted(promoted, unpacked)

    def promote_all(self) -> None:
        """From now on all of them can be spilled. Under the lock."""
        for of_pass in tuple(self._passes):
            for kept in tuple(of_pass.kept.values()):
                storage = kept.source()
                if storage is not None:  # else its last handle is dying at this moment
                    self._promote(kept, storage)

    def _promote(self, kept: KeptStorage, storage: torch.UntypedStorage) -> None:
        of_pass = kept.of_pass
        refs = [kept.view, *kept.more_views]
        views = [view for ref in refs if (view := ref()) is not None]
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
            complete=kept.complete,
            views=refs,
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
