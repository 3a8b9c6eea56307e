"""Penstock's own hooks on fake tensors, which find what a session would save, by the session's rules.

Nothing is offloaded: the policy is ``keep``. Time is that of the operators (:mod:`.operator_recorder`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from penstock.hooks.boundaries import Boundaries
from penstock.hooks.exclusions import ProtectedStorages
from penstock.hooks.modules import ModuleTracker
from penstock.hooks.observer import PassObserver
from penstock.hooks.recompute import not_recomputable
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.lab.dry.ledger import StorageEntry, StorageLedger
from penstock.observe.clock import ManualClock
from penstock.observe.recorder import Recorder
from penstock.plan.profile import PassProfile, Profile
from penstock.runtime.active_orders import record_of
from penstock.runtime.completion import Completion
from penstock.runtime.movers import StreamOrder
from penstock.runtime.profiling import profile_of
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

_NEED_INTERVAL_NS: Final = 1
"""Time between two needs of one autograd node, which happen at once; it preserves their order."""


class DryCapture:
    """Storages that autograd saves in one step, and the order in which it needs them.

    Attributes:
        modules: Tracker of the running module.
        backwards: Number of backward passes that have ended.
    """

    def __init__(self, *, clock: ManualClock, ledger: StorageLedger, floor_bytes: int) -> None:
        """Prepare for one step.

        Args:
            clock: Clock of the step.
            ledger: Account that records which storages are slots.
            floor_bytes: Smallest storage that is a slot.
        """
        self._protected = ProtectedStorages()
        self.modules = ModuleTracker(
            on_root=self._protected.add_module, on_missed_thread=lambda thread: None
        )
        self.backwards = 0
        self._clock = clock
        self._profile: Profile | None = None
        recorder = Recorder(clock=clock, event_bytes=0)
        self._holder = DryHolder(clock, ledger)
        self._boundaries = Boundaries(
            on_backward_end=self._on_backward_end, on_step=lambda *_: None
        )
        self._hooks = _Hooks(
            holder=self._holder,
            completion=Completion(),
            stream_order=StreamOrder(),
            protected=self._protected,
            modules=self.modules,
            boundaries=self._boundaries,
            recorder=recorder,
            device_type="cpu",
            floor_bytes=floor_bytes,
        )
        self._observer = self._hooks.observer = PassObserver(
            modules=self.modules,
            thread=threading.get_ident(),
            compute_ns=clock.now_ns,
            storage_of=self._hooks.storage_of,
        )

    @contextmanager
    def attached(self, module: torch.nn.Module) -> Iterator[None]:
        """Activate the hooks in this thread, with ``module`` as the root of slot names."""
        self.modules.register(module)
        with ExitStack() as stack:
            self.modules.attach()
            stack.callback(self.modules.detach)
            self._observer.attach()
            stack.callback(self._observer.detach)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._hooks.pack, self._hooks.unpack)
            stack.enter_context(hooks)
            yield

    def profile(self, end_ns: int) -> Profile:
        """Return the profile that a session would have measured of the step, which has ended."""
        if self._profile is not None:
            return self._profile
        running = self._holder.running
        passes = (PassProfile(1, 0, end_ns, end_ns),)
        return Profile("cpu", (), passes, running.small_bytes, running.small_count)

    def _on_backward_end(self) -> None:
        self.backwards += 1
        if self.backwards > 1:
            return
        running = self._holder.running
        if not running.records:
            return
        alone = not_recomputable(self.modules.known())
        running.operators = self._observer.finish(running.start_ns)
        running.unrepeatable = frozenset(self._observer.unrepeatable | alone)
        running.observed = True
        running.end_ns = self._clock.now_ns()
        record = record_of(running)
        self._profile = profile_of([record], device="cpu", unrepeatable=record.unrepeatable)


class DryHolder:
    """Notes which storages are slots, and for how long. A ``StorageHolder`` that moves nothing.

    Attributes:
        running: The pass that is being saved or needed.
    """

    moves_nothing = False

    def __init__(self, clock: ManualClock, ledger: StorageLedger) -> None:
        """Note in ``ledger`` at the times of ``clock``."""
        self._clock = clock
        self._ledger = ledger
        self._saved: dict[int, SavedStorage] = {}
        self._slots: dict[SavedStorage, StorageEntry] = {}
        self._small_bytes = 0
        self.running = Pass(1, clock.now_ns(), clock.now_ns())

    def save(  # noqa: PLR0917  (as in the protocol)
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
        """Note a storage that autograd saves, once for all its handles."""
        if self.running.end_ns is not None or self.running.abandoned:
            self.running = Pass(self.running.index + 1, self._clock.now_ns(), self._clock.now_ns())
        running = self.running
        known = self._saved.get(storage._cdata)
        if known is not None and known.source() is storage and known.handles:
            if view is None:
                known.handles += 1
                return known
            if known.recorded and known.version == version and known.base() is base:
                known.handles += 1
                known.record.handles += 1
                return known
        state = Residency.SMALL if view is None else Residency.RESIDENT
        saved = SavedStorage(state, storage._cdata, nbytes, TensorRef(storage), running)
        self._saved[storage._cdata] = saved
        if view is None or base is None:
            running.small_count += 1
            self._small_bytes += nbytes
            running.small_bytes = max(running.small_bytes, self._small_bytes)
            return saved
        saved.version = version
        saved.base = TensorRef(base)
        saved.index = running.saved_count
        key = running.new_key(place[0], nbytes)
        origin = Origin(*place, dtype_name(dtype))
        saved.hold(storage, SlotRecord(key, origin, self._clock.now_ns(), self._small_bytes))
        running.add(saved)
        entry = self._ledger.find(storage)
        if entry is not None:
            self._slots[saved] = entry
            self._ledger.enter_slot(entry)
        return saved

    def restore(self, saved: SavedStorage, *, first: bool) -> torch.UntypedStorage:
        """Return the fake storage, and advance the clock at its first need."""
        record, now_ns = saved.record, self._clock.now_ns()
        if record.needed_at_ns is None:
            record.needed_at_ns = now_ns
            if saved.of_pass.backward_start_ns is None:
                saved.of_pass.begin_backward(now_ns, now_ns)
            self._clock.advance(_NEED_INTERVAL_NS)
        assert saved.storage is not None, f"{saved.label} has been released"
        return saved.storage

    def release(self, saved: SavedStorage, unpacked: bool) -> None:
        """Note that a handle has died."""
        saved.handles -= 1
        if saved.handles:
            return
        if self._saved.get(saved.cdata) is saved:
            del self._saved[saved.cdata]
        if not saved.recorded:
            self._small_bytes -= saved.nbytes
            return
        saved.storage, saved.state = None, Residency.DEAD
        saved.of_pass.remove(saved)
        if saved in self._slots:
            self._ledger.leave_slot(self._slots.pop(saved))

    def prove(self, saved: SavedStorage, view: View, *, sign_only: bool) -> bool:
        """Note whether a handle is only asked for signs; all bytes are there."""
        if saved.recorded:
            saved.record.sign_only_handles += sign_only
        return True

    def holds(
        self,
        storage: torch.UntypedStorage,
        base: torch.Tensor | torch.UntypedStorage,
        version: int,
    ) -> bool:
        """Return whether a storage was saved before, and is alive, at this version of its guard."""
        known = self._saved.get(storage._cdata)
        if known is None or known.source() is not storage:
            return False
        return not known.recorded or (known.version == version and known.base() is base)


class _Hooks(SavedTensorHooks):
    """Hooks that treat fake tensors like the real ones that they stand for."""

    plain_types = (*SavedTensorHooks.plain_types, FakeTensor)

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Return an address that is aligned to cache lines, like every allocation of torch."""
        return 0
