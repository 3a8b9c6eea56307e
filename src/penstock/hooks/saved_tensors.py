"""The pack and unpack hooks: what autograd hands over when it saves a tensor, and gets back.

Five kinds of handle stand for a saved tensor until autograd is done with it:

* ``Kept``: a protected, tiny or foreign tensor. It stays, re-wrapped, and is not counted.
* ``Small``: a tensor whose storage is below the floor, or sure to stay. It only counts.
* ``Moved``: a view of a storage that the executor holds, wherever that is now.
* ``CopiedOut``: a small view of a large storage, copied to let the storage go; then one of the above.
* ``Flattened``: a DTensor, whose local tensor is one of the above.

Hooks switch off autograd's own check that a saved tensor was not modified in place (TRAPS rule 1), so
every handle makes it. A stripped ``Moved`` has no tensor to ask, so it keeps a *probe*: an empty tensor
that shares the saved one's version counter and none of its memory.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final

import torch

from penstock.core.errors import InPlaceError
from penstock.core.locks import defer
from penstock.hooks import proofs
from penstock.hooks.boundaries import Boundaries
from penstock.hooks.modules import ModuleTracker
from penstock.hooks.observer import Observer
from penstock.hooks.protected import ProtectedStorages, is_dtensor, leaf_of
from penstock.observe.recorder import Recorder
from penstock.runtime.executor import Executor
from penstock.runtime.kept import KeptStorage
from penstock.runtime.residency import Origin, SavedStorage
from penstock.runtime.small import SmallStorage, SmallStorages
from penstock.runtime.weak import TensorRef

TINY_BYTES: Final = 4096
"""Storages up to this size are not even counted: the handle would cost more than the tensor."""
COMPACT_SHARE: Final = 8
"""A view whose span is less than this part of its storage is copied out, to let the storage go."""
CACHE_LINE_BYTES: Final = 64
"""BLAS rounds otherwise where a vector begins elsewhere modulo this; allocations of torch begin at 0."""
_STRIDED: Final = torch.strided
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
"""Types whose tensors are neither quantized nor conjugated: to look one up is quicker than to ask."""
_EMPTY: Final[dict[tuple[torch.dtype, torch.device], torch.Tensor]] = {}


class Kept:
    """A saved tensor that stays where it is, uncounted."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output would keep itself alive (rule 9). A leaf is held as autograd holds it: where the
        # program gives a parameter other memory by ``.data``, backward uses that.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor, if nobody has modified it since."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor, self.tensor.size(), self.version, "")
        return self.tensor


class Foreign:
    """A tensor of a kind that Penstock does not know: a subclass, or one without a storage."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = self.tensor._version  # its own, should a subclass not share the original's

    def unpack(self) -> torch.Tensor:
        """The tensor, if nobody has modified it since."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor, self.tensor.size(), self.version, "")
        return self.tensor


class Flattened:
    """A DTensor: what it wraps is packed, the wrapper is made again (TRAPS rule 13)."""

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
        """The wrapper around its unpacked parts, if nobody has modified it since."""
        source = self.source()
        if source is not None and source._version != self.version:
            raise _modified(source, source.size(), self.version, "")
        parts = {
            name: part.unpack() if isinstance(part, Packed) else part  # a mesh is no tensor
            for name, part in self.inner.items()
        }
        wrapped: torch.Tensor = self.type.__tensor_unflatten__(
            parts, self.context, self.outer_size, self.outer_stride
        )
        return wrapped


class Small:
    """A view of a storage that stays and counts."""

    __slots__ = ("small", "storages", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, storages: SmallStorages, small: SmallStorage) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.storages = storages
        self.small = small

    def unpack(self) -> torch.Tensor:
        """The tensor, if nobody has modified it since."""
        if self.tensor._version != self.version:
            raise _modified(self.tensor, self.tensor.size(), self.version, "")
        return self.tensor

    def __del__(self) -> None:
        defer(self.storages.release, self.small)


class Moved:
    """A view of a storage that the executor holds.

    While the storage is where it was, the view itself is kept: nothing to take apart or rebuild. The
    executor says ``strip`` before it spills the storage, which the view would otherwise keep alive.
    """

    __slots__ = (
        "__weakref__",
        "copied",
        "dtype",
        "executor",
        "offset",
        "probe",
        "saved",
        "size",
        "stride",
        "unpacked",
        "version",
        "view",
    )

    def __init__(self, tensor: torch.Tensor, executor: Executor) -> None:
        self.version = tensor._version
        self.executor = executor
        self.saved: SavedStorage | KeptStorage | None = None  # until the executor has taken charge
        self.unpacked = False
        # Autograd makes a tensor of its own of what it gets back, unless the tensor needs no gradient:
        # then it uses that one, which must not be ours, for who else holds the storage is counted.
        self.copied = tensor.requires_grad
        self.view: torch.Tensor | None = tensor.detach()
        self.probe: torch.Tensor = self.view

    def strip(self) -> None:
        """Let go of the storage, remembering the view. Once; under the runtime's lock."""
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
        """The same view of the same bytes, wherever they are now. May be called again and again."""
        saved = self.saved
        assert saved is not None
        if self.probe._version != self.version:
            size = self.size if self.view is None else self.view.size()
            raise _modified(self.probe, size, self.version, saved.label)
        if type(saved) is KeptStorage:
            of_pass = saved.of_pass
            if of_pass.spilled or of_pass.backward_start_ns is None:
                self.executor.need_kept(saved)
            view = self.view
            if view is not None:
                self.unpacked = True
                return view if self.copied else view.detach()
            saved = saved.promoted  # another thread needed room
        assert type(saved) is SavedStorage
        storage = self.executor.restore(saved, first=not self.unpacked)
        self.unpacked = True
        view = self.view
        if view is not None:
            return view if self.copied else view.detach()
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        view.set_(storage, self.offset, self.size, self.stride)
        handed = self.probe.detach()  # an edit of it counts as an edit of what was saved
        handed.data = view
        return handed

    def prove(self, *, sign_only: bool, tensor: torch.Tensor, origin: Origin) -> None:
        """Say whether backward asks of this view only which elements are above zero.

        If not, and the storage keeps no more than that, the view is saved once more, as it is.

        Args:
            sign_only: Whether that is proven.
            tensor: What this is the handle of.
            origin: Who saved it.
        """
        saved, view = self.saved, self.view
        if type(saved) is KeptStorage:
            return  # it is not encoded: everything is kept of it
        assert type(saved) is SavedStorage
        if self.executor.prove(saved, self, sign_only=sign_only):
            return
        assert view is not None, "a view that may need more than signs is not stripped unproven"
        storage = view.untyped_storage()
        base, version = _guard_of(tensor, storage, storage.nbytes())
        self.saved = self.executor.save(storage, base, version, origin, self)
        self.executor.release(saved, unpacked=self.unpacked)

    def __del__(self) -> None:
        saved = self.saved
        if type(saved) is KeptStorage:
            defer(self.executor.kept.release, saved, self.unpacked)
        elif saved is not None:
            defer(self.executor.release, saved, self.unpacked)


class CopiedOut:
    """A small view of a large storage, which it does not keep alive.

    It keeps watching the version counter of what it was copied from, as autograd does.
    """

    __slots__ = ("__weakref__", "copy", "probe", "size", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the view itself, and so its whole storage, until the ``copy`` is packed."""
        self.version = tensor._version
        self.size = tensor.size()
        self.probe = tensor.detach()
        self.copy: Small | Moved | None = None

    def replace(self, copy: Small | Moved) -> None:
        """Hold a packed copy from now on, and of the view its version counter only."""
        self.copy = copy
        probe = self.probe.detach()  # a new one: another thread may be handing out the view
        probe.data = _empty(probe.dtype, probe.device)
        self.probe = probe

    def unpack(self) -> torch.Tensor:
        """Return the view or its copy, if nobody has modified what was saved."""
        probe, copy = self.probe, self.copy
        if probe._version != self.version:
            raise _modified(probe, self.size, self.version, "")
        return probe.detach() if copy is None else copy.unpack()


Packed = Kept | Foreign | Flattened | Small | Moved | CopiedOut


class SavedTensorHooks:
    """Packs and unpacks for one executor, in every thread that it is entered in.

    Attributes:
        observer: Is told of slots and needs, in a pass that is observed.
        active: Whether tensors that are saved are held at all.
        plain_types: Those whose values are what their storage holds.
    """

    plain_types: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)

    def __init__(
        self,
        *,
        executor: Executor,
        protected: ProtectedStorages,
        modules: ModuleTracker,
        boundaries: Boundaries,
        recorder: Recorder,
        device_type: str,
        floor_bytes: int,
    ) -> None:
        """Hook nothing yet; see ``torch.autograd.graph.saved_tensors_hooks``."""
        self._executor = executor
        self._small = executor.small
        self._completion = executor.completion
        self._protected = protected
        self._modules = modules
        self._boundaries = boundaries
        self._recorder = recorder
        self._is_here = _is_on(device_type)
        self._floor_bytes = floor_bytes
        self._inquiry = proofs.Inquiry()
        self.observer: Observer | None = None
        self.active = True

    def pack(self, tensor: torch.Tensor) -> Packed:
        """What autograd is to hold in place of ``tensor``. Waits while the budget is full."""
        if not self.active:
            return Foreign(tensor)
        if self._completion.waiting:
            self._completion.check()
        if self._boundaries.tasks:
            self._boundaries.note_pack()
        watched = self._modules.watched
        if watched is None and self.observer is None:
            return self._pack(tensor)
        packed = self._pack(tensor)
        if watched is not None:
            watched.append((packed, tensor))
        if self.observer is not None and type(packed) is Moved:
            saved = packed.saved
            if type(saved) is SavedStorage:
                self.observer.packed(saved.record, tensor)
        return packed

    def prove(self, kind: str, output: Any, watched: list[Any]) -> None:
        """A watched module has run, and ``watched`` was packed meanwhile: see :mod:`.proofs`."""
        self.operators_returned()
        moved = [(packed, tensor) for packed, tensor in watched if isinstance(packed, Moved)]
        proven = self._inquiry.sign_only(kind, output) if moved else None
        for packed, tensor in moved:
            packed.prove(sign_only=packed is proven, tensor=tensor, origin=self._origin(tensor))

    def _pack(self, tensor: torch.Tensor) -> Packed:
        storage = strided_storage(tensor) if type(tensor) in self.plain_types else None
        if storage is None:
            return self._pack_foreign(tensor)
        nbytes = storage.nbytes()
        if (
            nbytes <= TINY_BYTES
            or not tensor.nbytes
            or not self._is_here(tensor)  # rule 14: it returns to where it came from
            or self._protected.holds(storage)
        ):
            return Kept(tensor)
        stays = nbytes < self._floor_bytes
        if not stays:
            if leaf_of(tensor) is not None:
                self._recorder.count("kept.weights")
                return Kept(tensor)
            stays = self._executor.planner.moves_nothing
        if stays:
            return Small(tensor, self._small, self._small.save(storage))
        return self._pack_storage(tensor, storage, nbytes)

    def unpack(self, packed: Packed) -> torch.Tensor:
        """The tensor again."""
        if self._inquiry.open:
            return self._inquiry.note(packed)
        if self._completion.waiting:
            self._completion.returned()
        if self.active:
            self._boundaries.note_unpack()
        if self.observer is not None:
            self.observer.unpacked()
        return packed.unpack()

    def operators_returned(self) -> None:
        """No operator is running in this thread: what it has saved is complete."""
        if self._completion.waiting:
            self._completion.returned()

    def when_complete(self, tensor: torch.Tensor, action: Callable[[], None]) -> None:
        """Call ``action`` when a tensor that is being saved is complete: at once, or later."""
        completion = self._completion
        if completion.waiting:
            completion.check()
        if tensor.requires_grad:
            action()
            return

        def act(last: bool) -> bool:
            action()
            return True

        completion.wait(act)

    @property
    def inquiring(self) -> bool:
        """Whether this thread asks a node for its handle: then ``unpack`` takes note, and no more."""
        return self._inquiry.open

    def slot_bytes(self, tensor: torch.Tensor) -> int:
        """The size of the slot that saving ``tensor`` makes; 0: none, because it stays, uncounted."""
        storage = self.storage_of(tensor)
        if (
            storage is None
            or storage.nbytes() <= TINY_BYTES
            or tensor.numel() == 0
            or not self._is_here(tensor)
            or self._protected.holds(storage)
            or leaf_of(tensor) is not None
        ):
            return 0
        _, nbytes = _span(tensor)
        return nbytes if nbytes * COMPACT_SHARE < storage.nbytes() else storage.nbytes()

    def holds(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether the storage of ``tensor`` is saved already, as it is now."""
        base, version = _guard_of(tensor, storage, storage.nbytes())
        return self._executor.holds(storage, base, version)

    def _pack_storage(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, whole_bytes: int
    ) -> Packed:
        nbytes = tensor.nbytes
        if nbytes * COMPACT_SHARE < whole_bytes or not tensor.is_contiguous():
            _, span_bytes = _span(tensor)
            if span_bytes * COMPACT_SHARE < whole_bytes:
                return self._pack_span(tensor)
        executor = self._executor
        moved = Moved(tensor, executor)
        base: torch.Tensor | torch.UntypedStorage = _base_of(tensor)
        version = moved.version
        if nbytes < whole_bytes:
            base, version = _guard_of(tensor, storage, whole_bytes)
        complete = moved.copied  # it requires a gradient
        kept = moved.saved = executor.kept.keep(
            storage, whole_bytes, base, version, self._modules.here, tensor.dtype, moved
        )
        if kept is not None:
            if not complete or base is storage:
                kept.complete = False
                self._completion.wait(partial(executor.complete_kept, kept))
            return moved
        origin = self._origin(tensor)
        watched = self._modules.watched is not None
        moved.saved = executor.find(
            storage, base, version, origin, moved, sign_only=watched
        ) or executor.save(
            storage, base, version, origin, moved, sign_only=watched, complete=complete
        )
        return moved

    def _pack_span(self, tensor: torch.Tensor) -> Packed:
        """Have a small view copied out, when it is complete."""
        packed = CopiedOut(tensor)
        if tensor.requires_grad:
            self._copy_out(packed, tensor.detach(), self._origin(tensor))
        else:
            action = partial(self._copy_out_later, weakref.ref(packed), self._origin(tensor))
            self._completion.wait(action)
        return packed

    def _copy_out_later(self, ref: weakref.ref[CopiedOut], origin: Origin, last: bool) -> bool:
        packed = ref()
        if packed is not None:
            self._copy_out(packed, packed.probe, origin)
        return True

    def _copy_out(self, packed: CopiedOut, tensor: torch.Tensor, origin: Origin) -> None:
        """Copy the bytes that a small view spans; strides, alignment and thus kernels stay the same."""
        storage = tensor.untyped_storage()
        first, nbytes = _span(tensor)
        skew = (self.address_of(storage) + first) % CACHE_LINE_BYTES
        skew -= skew % tensor.element_size()
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        copy = torch.empty(skew + nbytes, dtype=torch.uint8, device=tensor.device)
        copy[skew:].copy_(whole[first : first + nbytes])
        view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        offset = skew // tensor.element_size()
        view.set_(copy.untyped_storage(), offset, tensor.size(), tensor.stride())
        if nbytes < self._floor_bytes:
            small = self._small.save(copy.untyped_storage())
            packed.replace(Small(view, self._small, small))
            return
        moved = Moved(view, self._executor)
        moved.saved = self._executor.save(
            copy.untyped_storage(), copy, moved.version, origin, moved
        )
        packed.replace(moved)

    def storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Its storage, if its values are just strided bytes of one."""
        return strided_storage(tensor) if type(tensor) in self.plain_types else None

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Where it begins in memory."""
        return storage.data_ptr()

    def _origin(self, tensor: torch.Tensor) -> Origin:
        path, kind = self._modules.here
        return Origin(path, kind, _dtype_name(tensor.dtype))

    def _pack_foreign(self, tensor: torch.Tensor) -> Packed:
        if not is_dtensor(tensor) or leaf_of(tensor) is not None:
            return Foreign(tensor)
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: getattr(tensor, name) for name in names}
        inner = {
            name: self.pack(part) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        return Flattened(tensor, inner, context)


def _leave_untraced(*functions: Callable[..., Any]) -> None:
    """Have ``torch.compile`` run these, and what they call, as they are.

    Where it breaks a graph it goes on to trace whatever Python runs meanwhile, our hooks too.
    """
    try:
        from torch._C._dynamo.eval_frame import (  # noqa: PLC0415  (newer than torch 2.8, perhaps)
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return
    for function in functions:
        strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, strategy)


_leave_untraced(SavedTensorHooks.pack, SavedTensorHooks.unpack)


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counter it shares."""
    base = tensor._base if tensor._is_view() else tensor
    assert base is not None
    return base


def _guard_of(
    tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int
) -> tuple[torch.Tensor | torch.UntypedStorage, int]:
    """Return whose version counter guards a whole storage of ``nbytes``, and that counter's value.

    It is the storage itself, at version 0, if other parts of it may have counters of their own.
    """
    base = _base_of(tensor)
    if base.nbytes < nbytes:
        return storage, 0
    return base, tensor._version


def strided_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Its storage, if its values are just strided bytes of one."""
    if tensor.layout is not _STRIDED or tensor.is_nested:
        return None
    if tensor.dtype not in _PLAIN and (tensor.is_quantized or tensor.is_conj()):
        return None
    if tensor.is_neg() or tensor._is_zerotensor():
        return None
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # functorch wrappers have none
        return None


def _is_on(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is on a device of a type. The attributes are quicker than ``device.type``."""
    if device_type in ("cpu", "cuda"):
        return operator.attrgetter(f"is_{device_type}")
    return lambda tensor: tensor.device.type == device_type


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the number of bytes up to the last."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return first, tensor.numel() * size
    reach = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return first, (reach + 1) * size


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor, the same one for every call with the same arguments."""
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
