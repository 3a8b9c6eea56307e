"""Sharing of a storage that was saved once with another handle, and what that handle then holds."""

from __future__ import annotations

import weakref

from penstock.codec import registry
from penstock.codec.base import Fidelity
from penstock.runtime.sampling import POSITIVE
from penstock.runtime.storage import Origin, Residency, SavedStorage, View


def is_enough(saved: SavedStorage, origin: Origin, sign_only: bool) -> bool:
    """Return whether what is kept of a storage is enough for another handle.

    Args:
        saved: The storage.
        origin: Who saves it again.
        sign_only: Whether it may turn out that this handle is only asked which elements are above zero.
    """
    encoding = saved.encoding
    if encoding is None:
        return True
    fidelity = registry.get(encoding.codec).fidelity
    if fidelity is Fidelity.POSITIVE:
        return sign_only and origin.dtype == encoding.dtype
    return fidelity is Fidelity.EXACT or origin.dtype == encoding.dtype


def keeps_signs(saved: SavedStorage) -> bool:
    """Return whether no more is kept of it, or will be, than which elements are above zero."""
    return saved.encoding is not None and saved.encoding.codec == POSITIVE


def attach(saved: SavedStorage, view: View) -> None:
    """Have a handle let go of the storage when that is spilled, or now. Under the lock; idempotent."""
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
