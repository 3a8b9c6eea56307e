"""Table of saved storages, by address, and what is charged to the device budget for them.

[Note: the runtime's lock]
    One lock guards every ``SavedStorage``, ``Pass`` and table of the runtime. Under it there is
    bookkeeping only. Transfers are waited for, cancelled and given callbacks outside it, because a
    transfer that settles runs its callbacks in the caller's thread, and those take the lock.

    SMALL storages are the exception: to take the lock would cost more than everything else. Their counts
    change in statements without a call, between which no thread of the interpreter is switched and no
    finalizer runs, and single operations on the table are atomic. So the table may change at any time,
    also under the lock: take a list of its values before going through them. Two threads that save the
    same SMALL storage at once may count it twice.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Final

import torch

from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.core.config import UNLIMITED
from penstock.core.locks import Lock, condition, defer
from penstock.core.units import KIB, MIB
from penstock.homed import use_count
from penstock.runtime.sampling import POSITIVE
from penstock.runtime.storage import (
    Origin,
    Pass,
    Residency,
    SavedStorage,
    SlotRecord,
    TensorRef,
    View,
    dtype_name,
)
from penstock.store.account import Account

SAVED: Final = "saved"
"""Owner, in the device budget, of storages that are kept or await their write."""
SMALL: Final = "small"
"""Owner, in the device budget, of storages below the floor, which always stay."""
CREDIT_SHARE: Final = 256
"""Part of a large budget that is taken at a time for storages that are small beside it."""
LEAST_CREDIT_BYTES: Final = 1 * MIB
MOST_CREDIT_BYTES: Final = 4 * MIB
SMALL_CREDIT_BYTES: Final = 256 * KIB
"""Taken from the budget at a time for SMALL storages; the charge is never below what they hold."""


class StorageTable:
    """Saved storages by address, with their charges.

    Methods are called under ``lock``, but for ``take`` and ``end_small``.

    Attributes:
        lock: The runtime's lock.
        changed: Notified when a write or a read has ended, or a storage has died.
        entries: The last storage saved at each address whose source is alive: an entry goes before its
            address can be used again (TRAPS rule 27).
        passes: Passes that still hold anything, and the running one.
        spare_bytes: Charged to the budget for storages to come; see ``take``.
        small_bytes: Bytes of SMALL storages.
        small_taken_bytes: Bytes charged to the budget for them.
    """

    def __init__(self, budget: Account) -> None:
        """Make an empty table; the device budget is charged for what is in it."""
        self.lock = Lock()
        self.changed = condition(self.lock)
        self.entries: dict[int, SavedStorage] = {}
        self.passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self.spare_bytes = 0
        self.small_bytes = 0
        self.small_taken_bytes = 0
        self._budget = budget
        self._credit_bytes = _credit_bytes(budget.limit_bytes)

    # -- charges ----------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bool:
        """Charge a storage to the budget, and a few more in advance if there is room. Not under the lock.

        The budget is an account shared with other threads, with a timeline. To turn to it twice for
        every tensor would cost more than everything else, so it is charged for some at once, where
        they are small beside it. The charge is never below what they hold.
        """
        if 4 * nbytes <= self._credit_bytes and self._budget.try_take(self._credit_bytes, SAVED):
            with self.lock:
                self.spare_bytes += self._credit_bytes - nbytes
            return True
        return self._budget.try_take(nbytes, SAVED)

    def take_spare(self, nbytes: int) -> bool:
        """Charge a storage to what was taken in advance, if that is enough."""
        if nbytes > self.spare_bytes:
            return False
        self.spare_bytes -= nbytes
        return True

    def free(self, nbytes: int) -> None:
        """Free the charge of a storage."""
        if 4 * nbytes > self._credit_bytes:
            self._budget.free(nbytes, SAVED)
            nbytes = 0
        self.spare_bytes += nbytes
        spare = self.spare_bytes
        if spare > 2 * self._credit_bytes or spare == self._budget.used_by(SAVED):
            self.free_spare()

    def free_spare(self) -> int:
        """Free what was taken in advance; return how much that was."""
        spare, self.spare_bytes = self.spare_bytes, 0
        if spare:
            self._budget.free(spare, SAVED)
        return spare

    # -- entries ----------------------------------------------------------------------------------

    def find(
        self,
        storage: torch.UntypedStorage,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
    ) -> SavedStorage | None:
        """Return the entry of a storage that was saved before, at this version of this tensor.

        An address may be used again after a storage's death (TRAPS rules 5 and 27), so an entry counts
        only if its weak reference leads to this very storage. A SMALL entry is of any version.
        """
        saved = self.entries.get(storage._cdata)
        if saved is None or saved.source() is not storage or saved.state is Residency.DEAD:
            return None
        if saved.state is Residency.SMALL:
            return saved
        return saved if saved.version == version and saved.base() is base else None

    def forget(self, saved: SavedStorage) -> None:
        """Remove a storage's entry, if another has not taken its place."""
        if self.entries.get(saved.cdata) is saved:
            del self.entries[saved.cdata]

    def withdraw(self, saved: SavedStorage, storage: torch.UntypedStorage) -> None:
        """Have the handles drop their views; from here on the source may die before its handles do."""
        strip(saved)
        saved.source = TensorRef(storage, partial(_forget_key, self.entries, saved.cdata))

    def drop_source(self, saved: SavedStorage) -> None:
        """Drop the strong reference to a source, and free its charge."""
        saved.storage = None
        self.free(saved.nbytes)

    # -- storages that are only counted -----------------------------------------------------------

    def promote_all(self) -> None:
        """Make all that are KEPT RESIDENT, so that they can be spilled; see [Note: kept storages]."""
        for of_pass in self.passes:
            for saved in of_pass.live.values() if of_pass.kept_count else ():
                if saved.state is Residency.KEPT:
                    storage = saved.source()
                    if storage is not None:  # else its last handle is dying at this moment
                        _promote(saved, storage)
                        of_pass.kept_count -= 1
                        of_pass.promoted = True

    def end_small(self, small: SavedStorage) -> None:
        """Count a SMALL storage no more; its last handle has died. Without the lock, in any finalizer."""
        small.state = Residency.DEAD
        entry = self.entries.pop(small.cdata, None)
        if entry is not small and entry is not None:  # a later storage at this address
            self.entries.setdefault(small.cdata, entry)
        held = self.small_bytes = self.small_bytes - small.nbytes
        spare = self.small_taken_bytes - held
        if spare > 4 * SMALL_CREDIT_BYTES or not held:
            self.small_taken_bytes -= spare
            defer(self._budget.free, spare, SMALL)


def _promote(saved: SavedStorage, storage: torch.UntypedStorage) -> None:
    views = [view for ref in saved.views or () if (view := ref()) is not None]
    origin = Origin(*saved.place, dtype_name(saved.dtype))
    record = SlotRecord(saved.key, origin, saved.of_pass.start_ns, 0, handles=saved.handles)
    saved.hold(storage, record)
    saved.pending = sum(not view.unpacked for view in views)


def _credit_bytes(limit_bytes: int) -> int:
    """Return how much to take at a time: nothing of a small budget, of which each byte counts."""
    if limit_bytes >= UNLIMITED or limit_bytes < CREDIT_SHARE * LEAST_CREDIT_BYTES:
        return 0
    return min(limit_bytes // CREDIT_SHARE, MOST_CREDIT_BYTES)


def _forget_key(
    entries: dict[int, SavedStorage], cdata: int, dead: weakref.ref[torch.UntypedStorage]
) -> None:
    saved = entries.get(cdata)
    if saved is not None and saved.source is dead:
        del entries[cdata]


# -- questions about one storage, under the lock ------------------------------------------------------


def strip(saved: SavedStorage) -> None:
    """Have every handle drop its view of the storage."""
    views, saved.views = saved.views, None
    for ref in views or ():
        view = ref()
        if view is not None:
            view.strip()


def attach(saved: SavedStorage, view: View) -> None:
    """Have a handle drop its view when the storage is spilled, or now if it has been. Idempotent."""
    if view.view is None:
        return
    if saved.state is not Residency.RESIDENT:
        view.strip()
        return
    ref = weakref.ref(view)
    if saved.views is None:
        saved.views = [ref]
    elif ref not in saved.views:
        saved.views.append(ref)


def in_memory(saved: SavedStorage) -> torch.UntypedStorage | None:
    """Return a live copy of its bytes, whoever holds it."""
    storage = saved.storage
    if storage is None:
        storage = saved.source()
    if storage is None and saved.restored is not None:
        storage = saved.restored()
    return storage


def is_settled(saved: SavedStorage) -> bool:
    """Return whether a RESIDENT storage's bytes are final; see [Note: complete storages]."""
    return saved.complete or not is_in_use(saved)


def is_in_use(saved: SavedStorage) -> bool:
    """Return whether anybody but us holds a RESIDENT storage, so that spilling it frees nothing."""
    storage = saved.storage
    if storage is None:
        return True
    ours = 1 + sum(view() is not None for view in saved.views or ())
    return use_count(storage) > ours


def is_edited(saved: SavedStorage) -> bool:
    """Return whether autograd knows that a storage was changed in place: its backward will raise."""
    base = saved.base()
    return isinstance(base, torch.Tensor) and base._version != saved.version


def is_enough(saved: SavedStorage, dtype: str, sign_only: bool) -> bool:
    """Return whether what is kept of a storage is enough for another handle.

    Args:
        saved: The storage.
        dtype: Type of the other handle's elements.
        sign_only: Whether the other handle may prove to ask only which elements are above zero.
    """
    encoding = saved.encoding
    if encoding is None:
        return True
    fidelity = registry.get(encoding.codec).fidelity
    if fidelity is Fidelity.POSITIVE:
        return sign_only and dtype == encoding.dtype
    return fidelity is Fidelity.EXACT or dtype == encoding.dtype


def keeps_signs(saved: SavedStorage) -> bool:
    """Return whether no more is kept of it, or will be, than which elements are above zero."""
    return saved.encoding is not None and saved.encoding.codec == POSITIVE
