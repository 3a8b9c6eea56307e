"""The pack and unpack hooks, which choose the handle (:mod:`.handles`) of each saved tensor."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from penstock.homed import Reference, is_sharded, local_of
from penstock.hooks import proofs
from penstock.hooks.boundaries import Boundaries, task_id
from penstock.hooks.exclusions import ProtectedStorages, leaf_of
from penstock.hooks.handles import (
    CopiedHandle,
    FlattenedHandle,
    ForeignHandle,
    KeptHandle,
    MovedHandle,
    Packed,
    SmallHandle,
    guard_of,
)
from penstock.hooks.holder import StorageHolder, WeightReferences
from penstock.hooks.modules import ModuleTracker, SavingPlace
from penstock.hooks.observer import PassObserver
from penstock.observe.recorder import Recorder
from penstock.runtime.completion import Completion
from penstock.runtime.movers import StreamOrder
from penstock.staging import bytes_of
from penstock.untraced import leave_untraced

TINY_BYTES: Final = 4096
"""Maximum size of storages that are not even counted: the handle would cost more than the tensor."""
COMPACT_SHARE: Final = 8
"""Views that span less than 1/8 of their storage are copied out, so that the storage can be freed."""
CACHE_LINE_BYTES: Final = 64
"""Alignment of which a copied view keeps its offset: BLAS results depend on it."""
_PLAIN: Final = frozenset(
    {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)
"""Types whose tensors are neither quantized nor conjugated: a lookup is quicker than the two checks."""


class SavedTensorHooks:
    """Pack and unpack hooks of one session, for every thread that enters them.

    Attributes:
        observer: Notified of saves and unpacks in an observed pass.
        active: Saved tensors are handled at all.
        plain_types: Types of tensors whose values are what their storage holds.
        weights: Makes references to weights that do not stay in memory, if there are any.
    """

    plain_types: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
    weights: WeightReferences | None = None

    def __init__(
        self,
        *,
        holder: StorageHolder,
        completion: Completion,
        stream_order: StreamOrder,
        protected: ProtectedStorages,
        modules: ModuleTracker,
        boundaries: Boundaries,
        recorder: Recorder,
        device_type: str,
        floor_bytes: int,
        holder_of: Callable[[torch.Tensor], StorageHolder] | None = None,
    ) -> None:
        """Hook nothing yet; see ``torch.autograd.graph.saved_tensors_hooks``.

        ``holder`` holds what is saved on the session's device; ``holder_of`` returns the holder of a
        tensor, if there may be several.
        """
        self._holder = holder
        self._holder_of = holder_of
        self._completion = completion
        self._stream_order = stream_order
        self._protected = protected
        self._running = modules.running
        self._boundaries = boundaries
        self._recorder = recorder
        self._is_here = _is_on(device_type)
        self._floor_bytes = floor_bytes
        self._inquiry = proofs.Inquiry()
        self.observer: PassObserver | None = None
        self.active = True

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Return the handle for autograd in place of ``tensor``; wait while the budget is full."""
        if not self.active:
            return ForeignHandle(tensor)
        if self.observer is None:
            return self._handle_of(tensor)
        with self.observer.left_out():
            return self._handle_of(tensor)

    def _handle_of(self, tensor: torch.Tensor) -> Packed:
        storage = strided_storage(tensor) if type(tensor) in self.plain_types else None
        if self.weights is not None:
            reference = self._reference(tensor, storage, self.weights)
            if reference is not None:
                return reference
        if self._completion.waiting:
            self._completion.check()
        if self._boundaries.tasks:
            self._boundaries.note_pack()
        watched = self._running.watched
        packed = self._pack(tensor, storage, sign_only=watched is not None)
        if watched is not None:
            watched.append((packed, tensor))
        if self.observer is not None and type(packed) is MovedHandle:
            saved = packed.saved
            if saved is not None and saved.recorded:
                self.observer.packed(saved.record, tensor)
        return packed

    def _reference(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage | None,
        weights: WeightReferences,
    ) -> Reference | None:
        """Return a reference to the weight of which a tensor is; ``storage`` is its own, if plain."""
        with torch._C.DisableTorchFunctionSubclass():
            if storage is None and isinstance(tensor, self.plain_types):
                storage = strided_storage(tensor)
            if storage is None:
                return None
            reference = weights.reference(tensor, storage)
            if reference is None and (leaf := leaf_of(tensor)) is not None:
                reference = weights.cast_reference(tensor, leaf)
            return reference

    def prove(self, kind: str, output: Any, watched: list[Any]) -> None:
        """Prove what backward needs of the tensors that a watched module saved; see :mod:`.proofs`."""
        self.operators_returned()
        moved = [(packed, tensor) for packed, tensor in watched if isinstance(packed, MovedHandle)]
        proven = self._inquiry.sign_only(kind, output) if moved else None
        for packed, tensor in moved:
            packed.prove(sign_only=packed is proven, tensor=tensor, place=self._running.here)

    def _pack(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage | None, *, sign_only: bool
    ) -> Packed:
        if storage is None:
            return self._pack_foreign(tensor)
        nbytes = storage.nbytes()
        if (
            nbytes <= TINY_BYTES
            or not (used := tensor.nbytes)
            or not self._is_here(tensor)  # rule 14: it must return to its own device
            or ((known := self._protected.storages.get(storage._cdata)) and known() is storage)
        ):
            return KeptHandle(tensor)
        holder = self._holder if self._holder_of is None else self._holder_of(tensor)
        stays = nbytes < self._floor_bytes
        if not stays:
            if leaf_of(tensor) is not None:
                self._recorder.count("kept.weights")
                return KeptHandle(tensor)
            stays = holder.moves_nothing
        if stays:
            return SmallHandle(tensor, holder, holder.save(storage, nbytes))
        if used * COMPACT_SHARE < nbytes or not tensor.is_contiguous():
            _, span_bytes = _span(tensor)
            if span_bytes * COMPACT_SHARE < nbytes:
                return self._pack_span(tensor)
        moved = MovedHandle(tensor, holder)
        base: torch.Tensor | torch.UntypedStorage | None = tensor
        version = moved.version
        if used < nbytes:
            base, version = guard_of(tensor, storage, nbytes)
        elif tensor._is_view():
            base = tensor._base
        moved.saved = holder.save(
            storage,
            nbytes,
            moved,
            base,
            version,
            self._running.here,
            tensor.dtype,
            moved.copied,  # it is complete if it requires a gradient
            sign_only,
        )
        return moved

    def unpack(self, packed: Packed) -> torch.Tensor:
        """Return the tensor of a handle."""
        if self._inquiry.open:
            return self._inquiry.note(packed)
        if self._completion.waiting:
            self._completion.returned()
        if self.active and task_id() not in self._boundaries.tasks:
            self._boundaries.note_unpack()
        if self.observer is None:
            return packed.unpack()
        with self.observer.left_out():
            self.observer.unpacked()
            return packed.unpack()

    def operators_returned(self) -> None:
        """Note that no operator runs in this thread, so what it has saved is complete."""
        if self._completion.waiting:
            self._completion.returned()

    def when_complete(self, tensor: torch.Tensor, action: Callable[[], None]) -> None:
        """Call ``action`` when a tensor that is being saved is complete: now or later."""
        completion = self._completion
        if completion.waiting:
            completion.check()
        if tensor.requires_grad:
            action()
            return

        def act(last: bool) -> bool:
            action()
            return True

        completion.wait(act, tensor.device)

    @property
    def inquiring(self) -> bool:
        """True while this thread reads the handle of a node, which ``unpack`` then only notes."""
        return self._inquiry.open

    def slot_bytes(self, tensor: torch.Tensor) -> int:
        """Return the size of the slot that saving ``tensor`` makes on the session's device, or 0."""
        storage = self.storage_of(tensor)
        if (
            storage is None
            or storage.nbytes() <= TINY_BYTES
            or tensor.numel() == 0
            or not self._is_here(tensor)
            or self._protected.holds(storage)
            or leaf_of(tensor) is not None
            or (self.weights is not None and self.weights.reference(tensor, storage) is not None)
            or self._whose(tensor) is not self._holder
        ):
            return 0
        _, nbytes = _span(tensor)
        return nbytes if nbytes * COMPACT_SHARE < storage.nbytes() else storage.nbytes()

    def holds(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether the storage of ``tensor`` is already saved at its present version."""
        base, version = guard_of(tensor, storage, storage.nbytes())
        return self._whose(tensor).holds(storage, base, version)

    def _whose(self, tensor: torch.Tensor) -> StorageHolder:
        """Return the holder of the tensor's device."""
        return self._holder if self._holder_of is None else self._holder_of(tensor)

    def _pack_span(self, tensor: torch.Tensor) -> Packed:
        """Copy out a small view when it is complete."""
        packed = CopiedHandle(tensor)
        if tensor.requires_grad:
            self._copy_out(packed, tensor.detach(), self._running.here)
        else:
            action = partial(self._copy_out_later, weakref.ref(packed), self._running.here)
            self._completion.wait(action, tensor.device)
        return packed

    def _copy_out_later(
        self, ref: weakref.ref[CopiedHandle], place: SavingPlace, last: bool
    ) -> bool:
        packed = ref()
        if packed is not None:
            self._copy_out(packed, packed.probe, place)
        return True

    def _copy_out(self, packed: CopiedHandle, tensor: torch.Tensor, place: SavingPlace) -> None:
        """Copy the span of a small view, keeping its strides and alignment, and thus the kernels."""
        storage = tensor.untyped_storage()
        first, nbytes = _span(tensor)
        skew = (self.address_of(storage) + first) % CACHE_LINE_BYTES
        skew -= skew % tensor.element_size()
        whole = bytes_of(storage)
        copy = torch.empty(skew + nbytes, dtype=torch.uint8, device=tensor.device)
        copy[skew:].copy_(whole[first : first + nbytes])
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = skew // tensor.element_size()
        view.set_(copy.untyped_storage(), offset, tensor.size(), tensor.stride())
        holder = self._whose(tensor)
        self._stream_order.free_early(storage)
        if nbytes < self._floor_bytes:
            small = holder.save(copy.untyped_storage(), copy.nbytes)
            packed.replace(SmallHandle(view, holder, small))
            return
        moved = MovedHandle(view, holder)
        moved.saved = holder.save(
            copy.untyped_storage(), copy.nbytes, moved, copy, moved.version, place, view.dtype
        )
        packed.replace(moved)

    def storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Return the tensor's storage if its values are just strided bytes of one, else ``None``."""
        return strided_storage(tensor) if type(tensor) in self.plain_types else None

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Return the address of the storage."""
        return storage.data_ptr()

    def _pack_foreign(self, tensor: torch.Tensor) -> Packed:
        if not is_sharded(tensor):
            return ForeignHandle(tensor)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(tensor, name) for name in names}
        if leaf_of(tensor) is not None:
            return self._pack_shard(tensor, parts, context)
        inner = {
            name: self.pack(part) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        return FlattenedHandle(tensor, inner, context)

    def _pack_shard(self, tensor: torch.Tensor, parts: dict[str, Any], context: Any) -> Packed:
        """Refer to the shard of a weight; let any other stay."""
        reference, local = None, local_of(tensor)
        if self.weights is not None and (storage := strided_storage(local)) is not None:
            reference = self.weights.reference(local, storage)
        if reference is None:
            return ForeignHandle(tensor)
        inner = {name: reference if part is local else part for name, part in parts.items()}
        return FlattenedHandle(tensor, inner, context)


leave_untraced(SavedTensorHooks.pack, SavedTensorHooks.unpack)


def strided_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the tensor's storage if its values are just strided bytes of one, else ``None``."""
    try:
        storage = tensor.untyped_storage()
    except RuntimeError:  # sparse and opaque tensors and functorch wrappers have none
        return None
    if tensor.is_nested or tensor.is_neg() or tensor._is_zerotensor():
        return None
    if tensor.dtype not in _PLAIN and (tensor.is_quantized or tensor.is_conj()):
        return None
    return storage


def _is_on(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Return a test for tensors on a type of device; attributes are quicker than ``device.type``."""
    if device_type in ("cpu", "cuda"):
        return operator.attrgetter(f"is_{device_type}")
    return lambda tensor: tensor.device.type == device_type


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offset of the first byte that a tensor uses, and the number of bytes up to the last."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return first, tensor.numel() * size
    reach = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first, (reach + 1) * size
