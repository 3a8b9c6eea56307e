"""Seam between the hooks and whatever holds the storages that autograd saves.

The runtime's executor holds them within a budget; a dry run only notes them (:mod:`penstock.lab.dry`).
"""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.homed import Reference
from penstock.runtime.storage import SavedStorage, View


class WeightReferences(Protocol):
    """Makes references to weights that do not stay in memory."""

    def reference(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Reference | None:
        """Return a reference for a saved tensor; ``None`` if its storage is that of no such weight."""

    def add(self, model: torch.nn.Module) -> None:
        """Let the weights of an outermost module rest, before it runs for the first time."""

    def cast_reference(self, tensor: torch.Tensor, leaf: torch.Tensor) -> Reference | None:
        """Return the same for a cast of a leaf; ``None`` if that is no such weight."""


class StorageHolder(Protocol):
    """Holds saved storages between the pack and the unpack of their handles. Thread-safe.

    Attributes:
        moves_nothing: True if every storage stays, so that none needs a handle that can be stripped.
    """

    moves_nothing: bool

    def save(  # noqa: PLR0917  (hot: keywords cost)
        self,
        storage: torch.UntypedStorage,
        nbytes: int,
        view: View | None = None,
        base: torch.Tensor | torch.UntypedStorage | None = None,
        version: int = 0,
        place: tuple[str, str] = ("", ""),
        dtype: torch.dtype = torch.uint8,
        complete: bool = True,
        sign_only: bool = False,
    ) -> SavedStorage:
        """Take charge of a storage that autograd saves, or give one that was saved before a handle more.

        Args:
            storage: The storage.
            nbytes: Its size.
            view: The handle, which has a view of the storage and drops it before that is spilled. Without
                one the storage stays, and is only counted; the other arguments mean nothing then.
            base: The tensor whose version counter guards all of the storage: the saved one, or the one
                that it is a view of. The storage itself, if its parts have counters of their own.
            version: That counter's value; 0 for a storage.
            place: Path and type of the module that saves it.
            dtype: Type of the saved tensor.
            complete: Whether its bytes may be read at once. If not, they are when the running operator
                has returned; see [Note: complete storages].
            sign_only: Whether ``prove`` will be called soon, to say if backward asks only for signs.
        """

    def restore(self, saved: SavedStorage, *, first: bool) -> torch.UntypedStorage:
        """Return the bytes of a saved storage, in device memory; wait only if they are not there yet.

        Args:
            saved: The result of ``save``.
            first: Whether the calling handle is unpacked for the first time.
        """

    def release(self, saved: SavedStorage, unpacked: bool) -> None:
        """Release a handle that has died, unpacked or not. Never wait.

        Called through ``locks.defer``; directly, if the storage was saved without a view.
        """

    def prove(self, saved: SavedStorage, view: View, *, sign_only: bool) -> bool:
        """Note whether backward asks a handle only which elements are above zero.

        Returns:
            Whether the bytes that are kept are enough for the handle. If not, it has to be saved again.
        """

    def holds(
        self,
        storage: torch.UntypedStorage,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
    ) -> bool:
        """Return whether a storage was saved before, and is alive, at this version of its guard."""
