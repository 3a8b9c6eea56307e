"""Penstock's own hooks on fake tensors, which find what a session would save, by the session's rules.

Nothing is offloaded: the policy is ``keep``. Time is that of the operators (:mod:`.operator_recorder`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from penstock.core.config import UNLIMITED
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
from penstock.runtime.executor import Executor
from penstock.runtime.movers import CpuMover
from penstock.runtime.profiling import profile_of
from penstock.runtime.storage import SavedStorage
from penstock.store.account import Account

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
        self._profile: Profile | None = None
        recorder = Recorder(clock=clock, event_bytes=0)
        budget = Account(UNLIMITED, name="dry profile")
        self._mover = CpuMover(budget=budget)
        self._executor = _Executor(budget=budget, tiers={}, mover=self._mover, recorder=recorder)
        self._executor.record_into(clock, ledger)
        self._boundaries = Boundaries(
            on_backward_end=self._on_backward_end, on_step=lambda optimizer: None
        )
        self._hooks = _Hooks(
            executor=self._executor,
            protected=self._protected,
            modules=self.modules,
            boundaries=self._boundaries,
            recorder=recorder,
            device_type="cpu",
            floor_bytes=floor_bytes,
        )
        self._observer = self._hooks.observer = PassObserver(
            modules=self.modules,
            compute_ns=self._executor.compute_ns,
            storage_of=self._hooks.storage_of,
        )

    @contextmanager
    def attached(self, module: torch.nn.Module) -> Iterator[None]:
        """Activate the hooks in this thread, with ``module`` as the root of slot names."""
        self.modules.register(module)
        with ExitStack() as stack:
            stack.callback(self._mover.close)
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
        small = self._executor.small_only
        return Profile("cpu", (), (PassProfile(1, 0, end_ns, end_ns),), *small)

    def _on_backward_end(self) -> None:
        self.backwards += 1
        if self.backwards > 1:
            return
        alone = not_recomputable(self.modules.known())
        self._executor.observed(self._observer.finish, self._observer.unrepeatable | alone)
        record = self._executor.end_backward()
        if record is not None and record.slots:
            self._profile = profile_of([record], device="cpu", unrepeatable=record.unrepeatable)


class _Executor(Executor):
    """Executor that records in the ledger which storages are slots, and for how long."""

    def record_into(self, clock: ManualClock, ledger: StorageLedger) -> None:
        """Start to record in ``ledger`` at the times of ``clock``."""
        self._clock = clock
        self._ledger = ledger
        self._entries: dict[SavedStorage, StorageEntry] = {}

    @property
    def small_only(self) -> tuple[int, int]:
        """Most bytes below the floor at once, and their count, in a pass that saved nothing else."""
        return self._pass.small_bytes, self._pass.small_count

    def save(self, storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> SavedStorage:
        """Register a storage that autograd saves."""
        saved = super().save(storage, *args, **kwargs)
        entry = self._ledger.find(storage)
        if entry is not None:
            self._entries[saved] = entry
            self._ledger.enter_slot(entry)
        return saved

    def restore(self, saved: SavedStorage, *, first: bool) -> torch.UntypedStorage:
        """Return the fake storage, and advance the clock at its first need."""
        asked = saved.record.needed_at_ns is not None
        storage = super().restore(saved, first=first)
        if not asked:
            self._clock.advance(_NEED_INTERVAL_NS)
        return storage

    def release(self, saved: SavedStorage, unpacked: bool) -> None:
        """Register that a handle has died."""
        super().release(saved, unpacked)
        if saved.handles <= 0 and saved in self._entries:
            self._ledger.leave_slot(self._entries.pop(saved))


class _Hooks(SavedTensorHooks):
    """Hooks that treat fake tensors like the real ones that they stand for."""

    plain_types = (*SavedTensorHooks.plain_types, FakeTensor)

    def address_of(self, storage: torch.UntypedStorage) -> int:
        """Return an address that is aligned to cache lines, like every allocation of torch."""
        return 0
