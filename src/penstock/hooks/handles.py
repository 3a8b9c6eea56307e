"""Handles that autograd holds in place of saved tensors, and that return them.

* ``KeptHandle``: a protected or tiny tensor. It stays resident and is not counted.
* ``ForeignHandle``: a tensor of a kind that is not offloaded. It stays resident and is not counted.
* ``SmallHandle``: a tensor whose storage is below the floor, or certain to stay. It is only counted.
* ``MovedHandle``: a view of a storage that the holder has, resident or offloaded.
* ``CopiedHandle``: a small view of a large storage, copied so that the storage can be freed.
* ``FlattenedHandle``: a DTensor, whose local tensor has one of the handles above.
* ``Reference``: a weight that does not stay in memory (:mod:`penstock.weights`).

Hooks switch off autograd's own check that a saved tensor was not modified in place (TRAPS rule 1), so
every handle repeats it. A stripped ``MovedHandle`` has no tensor whose version it could read, so it keeps
a *probe*: an empty tensor that shares the saved tensor's version counter but none of its memory.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from penstock.core.errors import InPlaceError
from penstock.core.locks import defer
from penstock.homed import Reference
from penstock.hooks.holder import StorageHolder
from penstock.runtime.storage import Residency, SavedStorage, TensorRef

_KEPT: Final = Residency.KEPT
_EMPTY: Final[dict[tuple[torch.dtype, torch.device], torch.Tensor]] = {}


class KeptHandle:
    """A saved tensor that stays resident, uncounted."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output would keep itself alive (rule 9). A leaf is held as autograd holds it: if the
        # program assigns other memory to a parameter through ``.data``, backward uses that memory.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor; raise ``InPlaceError`` if it was modified since."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor, self.tensor.size(), self.version, "")
        return self.tensor


class ForeignHandle(KeptHandle):
    """A tensor of a kind that is not offloaded: a subclass, or one without a storage."""

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = self.tensor._version  # a subclass may not share the original's


class FlattenedHandle:
    """A DTensor whose local tensor is packed; the wrapper is rebuilt around it (TRAPS rule 13)."""

    __slots__ = ("context", "inner", "outer_size", "outer_stride", "source", "type", "version")

    def __init__(self, tensor: Any, inner: dict[str, Any], context: Any) -> None:
        self.type = type(tensor)
        self.source = TensorRef(tensor)  # in-place operations raise its version, not its part's
        self.version = tensor._version
        self.inner = inner
        self.context = context
        self.outer_size = tensor.size()
        self.outer_stride = tensor.stride()

    def unpack(self) -> torch.Tensor:
        """Rebuild the wrapper; raise ``InPlaceError`` if the tensor was modified since."""
        source = self.source()
        if source is not None and source._version != self.version:
            raise _modified(source, source.size(), self.version, "")
        parts = {
            name: part.unpack() if isinstance(part, Packed) else part  # a mesh is not a tensor
            for name, part in self.inner.items()
        }
        wrapped: torch.Tensor = self.type.__tensor_unflatten__(
            parts, self.context, self.outer_size, self.outer_stride
        )
        return wrapped


class SmallHandle(KeptHandle):
    """A view of a storage that stays resident and is counted."""

    __slots__ = ("holder", "saved")

    def __init__(self, tensor: torch.Tensor, holder: StorageHolder, saved: SavedStorage) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.holder = holder
        self.saved = saved

    def __del__(self) -> None:
        self.holder.release(self.saved, True)


class MovedHandle:
    """A view of a storage that the holder has.

    While the storage is resident the view itself is kept, so nothing has to be rebuilt. The holder
    calls ``strip`` before it offloads the storage, which the view would otherwise keep alive.
    """

    __slots__ = (
        "__weakref__",
        "copied",
        "dtype",
        "holder",
        "offset",
        "probe",
        "saved",
        "size",
        "stride",
        "unpacked",
        "version",
        "view",
    )

    def __init__(self, tensor: torch.Tensor, holder: StorageHolder) -> None:
        self.version = tensor._version
        self.holder = holder
        self.saved: SavedStorage | None = None  # None until the holder has it
        self.unpacked = False
        # Autograd wraps what unpack returns in a tensor of its own, unless the tensor needs no gradient:
        # then it uses the returned tensor itself. That must not be ours, as references to the storage
        # are counted.
        self.copied = tensor.requires_grad
        self.view: torch.Tensor | None = tensor.detach()
        self.probe: torch.Tensor = self.view

    def strip(self) -> None:
        """Drop the reference to the storage but remember the view. Once, under the runtime's lock."""
        view = self.view
        assert view is not None
        self.dtype = view.dtype
        self.size = view.size()
        self.stride = view.stride()
        self.offset = view.storage_offset()
        self.view = None
        self.probe = view.detach()  # a new one: another thread may be handing out the view
        self.probe.data = _empty(view.dtype, view.device)

    def unpack(self) -> torch.Tensor:
        """Return the same view of the same bytes, restoring them if needed. May be called repeatedly."""
        saved = self.saved
        assert saved is not None
        if self.probe._version != self.version:
            size = self.size if self.view is None else self.view.size()
            raise _modified(self.probe, size, self.version, saved.label)
        view = self.view
        if view is not None and saved.state is _KEPT:
            of_pass = saved.of_pass
            if of_pass.backward_start_ns is not None and not of_pass.spilled:
                self.unpacked = True
                return view if self.copied else view.detach()
        storage = self.holder.restore(saved, first=not self.unpacked)
        self.unpacked = True
        view = self.view
        if view is not None:
            return view if self.copied else view.detach()
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        view.set_(storage, self.offset, self.size, self.stride)
        handed = self.probe.detach()  # an edit of it counts as an edit of what was saved
        handed.data = view
        return handed

    def prove(self, *, sign_only: bool, tensor: torch.Tensor, place: tuple[str, str]) -> None:
        """Record whether backward needs only to know which elements of this view are above zero.

        If it needs more, and the storage was saved without more, the view is saved again in full.

        Args:
            sign_only: The signs are proven to suffice.
            tensor: The saved tensor.
            place: The module that saved it.
        """
        saved, view = self.saved, self.view
        assert saved is not None
        if self.holder.prove(saved, self, sign_only=sign_only):
            return
        assert view is not None, "a view that may need more than signs is not stripped unproven"
        storage = view.untyped_storage()
        nbytes = storage.nbytes()
        base, version = guard_of(tensor, storage, nbytes)
        self.saved = self.holder.save(storage, nbytes, self, base, version, place, tensor.dtype)
        defer(self.holder.release, saved, self.unpacked)

    def __del__(self) -> None:
        saved = self.saved
        if saved is not None:
            defer(self.holder.release, saved, self.unpacked)


class CopiedHandle:
    """A small view of a large storage, which it does not keep alive.

    It checks the version counter of the tensor that it was copied from, as autograd does.
    """

    __slots__ = ("__weakref__", "copy", "probe", "size", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the view itself, and thus its whole storage, until the ``copy`` is packed."""
        self.version = tensor._version
        self.size = tensor.size()
        self.probe = tensor.detach()
        self.copy: SmallHandle | MovedHandle | None = None

    def replace(self, copy: SmallHandle | MovedHandle) -> None:
        """Hold a packed copy from now on, and only the version counter of the view."""
        self.copy = copy
        probe = self.probe.detach()  # a new one: another thread may be handing out the view
        probe.data = _empty(probe.dtype, probe.device)
        self.probe = probe

    def unpack(self) -> torch.Tensor:
        """Return the view or its copy; raise ``InPlaceError`` if the tensor was modified since."""
        probe, copy = self.probe, self.copy
        if probe._version != self.version:
            raise _modified(probe, self.size, self.version, "")
        return probe.detach() if copy is None else copy.unpack()


Packed = KeptHandle | FlattenedHandle | MovedHandle | CopiedHandle | Reference


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose version counter ``tensor`` shares."""
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    return base


def guard_of(
    tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int
) -> tuple[torch.Tensor | torch.UntypedStorage, int]:
    """Return the object whose version counter guards a whole storage, and the counter's value.

    That is the storage itself, at version 0, if other parts of it may have counters of their own.
    """
    base = base_of(tensor)
    if base.nbytes < nbytes:
        return storage, 0
    return base, tensor._version


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the empty tensor of a type and device; it is made once and shared."""
    key = (dtype, device)
    empty = _EMPTY.get(key)
    if empty is None:
        empty = _EMPTY[key] = torch.empty(0, dtype=dtype, device=device)
    return empty


def _modified(probe: torch.Tensor, size: object, version: int, slot: str) -> InPlaceError:
    where = f" (slot {slot})" if slot else ""
    return InPlaceError(
        "one of the variables needed for gradient computation has been modified by an inplace"
        f" operation: a {probe.dtype} tensor of {size}{where} is at version {probe._version};"
        f" expected version {version} instead. Without Penstock autograd raises here too."
    )
