"""The hooks through which a session is attached to PyTorch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

from penstock.core.errors import PenstockWarning
from penstock.hooks import proofs
from penstock.hooks.boundaries import Boundaries
from penstock.hooks.exclusions import ProtectedStorages
from penstock.hooks.functorch_compat import FunctorchGuard
from penstock.hooks.holder import WeightReferences
from penstock.hooks.modules import ModuleTracker, WeightUser
from penstock.hooks.observer import PassObserver
from penstock.hooks.recipe_calls import RecipeCalls
from penstock.hooks.recompute import Recompute, not_recomputable
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.observe.recorder import Recorder
from penstock.plan.plan import Plan
from penstock.runtime import user_plan
from penstock.runtime.devices import Devices


class StreamedWeights(WeightUser, WeightReferences, Protocol):
    """Weights that do not stay in memory."""


MOST_WARNINGS: Final = 16
"""Maximum number of threads to warn about: a program may start another one in each step."""


class Attachment:
    """The hooks of one session, in the thread that attaches them.

    Attributes:
        hooks: The pack and unpack hooks.
        modules: Tracker of the module that each thread runs.
        protected: Storages that are never moved.
        thread: The thread that attached the hooks.
    """

    def __init__(
        self,
        *,
        devices: Devices,
        recorder: Recorder,
        device: torch.device,
        floor_bytes: int,
        prove_signs: bool,
        given_plan: Plan | None,
        on_step: Callable[[], None],
    ) -> None:
        """Hook nothing yet.

        Args:
            devices: Executors, which hold saved storages, and whose orders say whether to observe a pass
                and which modules to recompute.
            recorder: Receives the counts.
            device: Device whose tensors are offloaded.
            floor_bytes: Storages smaller than this stay resident.
            prove_signs: Check whether backward needs only the signs of what a module saves.
            given_plan: User plan; each root module is checked against it when it is first seen.
            on_step: Called after each optimizer step.
        """
        executor = devices.main
        self._devices = devices
        self._time = executor.time
        self._main = executor
        self._given = given_plan
        self._on_step = on_step
        self._observer: PassObserver | None = None
        self._warnings: list[str] = []
        self.protected = ProtectedStorages()
        self.modules = ModuleTracker(
            on_root=self._root_registered,
            on_missed_thread=self._missed_thread,
            on_watched=self._module_ran,
            completion=executor.completion,
            watch=proofs.KINDS if prove_signs else (),
        )
        self._boundaries = Boundaries(on_backward_end=self._backward_ended, on_step=self._stepped)
        self.hooks = SavedTensorHooks(
            holder=executor,
            completion=executor.completion,
            stream_order=executor.stream_order,
            protected=self.protected,
            modules=self.modules,
            boundaries=self._boundaries,
            recorder=recorder,
            device_type=device.type,
            floor_bytes=floor_bytes,
            holder_of=None if executor.time.timer is None else devices.of,
        )
        self._recompute = Recompute(
            hooks=self.hooks,
            modules=self.modules,
            recomputer=executor.recomputer,
            holder=executor,
            device=device,
            floor_bytes=floor_bytes,
        )
        self._recipes = RecipeCalls(
            hooks=self.hooks,
            modules=self.modules,
            recomputer=executor.recomputer,
            device=device,
        )
        self._context = torch.autograd.graph.saved_tensors_hooks(self.hooks.pack, self.hooks.unpack)
        self._functorch = FunctorchGuard(
            self.hooks.pack, self.hooks.unpack, on_unhook=self._unhooked
        )

    # -- attach and detach --------------------------------------------------------------------

    def stream(self, weights: StreamedWeights) -> None:
        """Bring weights from where they rest when modules and backward need them. Before ``attach``."""
        self.modules.weights = self.hooks.weights = weights

    def attach(
        self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Attach all hooks in this thread; if that is interrupted, none.

        Args:
            model: Registered now; other models are registered when they first run.
            optimizer: Its state is protected now; that of other optimizers when they first step.
        """
        self.thread = threading.current_thread()
        if model is not None:
            self.modules.register(model)
        if optimizer is not None:
            self.protected.add_optimizer(optimizer)
        try:
            self.modules.attach()
            self.follow()
            self._boundaries.attach()
            self._functorch.attach()
            self._context.__enter__()
        except BaseException:  # as Ctrl-C: what stayed would handle the modules of later sessions
            self._unhook()
            raise

    def detach(self) -> None:
        """Detach all hooks, in the same thread, or in any other once that thread has ended."""
        if self.thread is threading.current_thread():  # hooks of an ended thread no longer exist
            self._context.__exit__()
        self._unhook()

    def _unhook(self) -> None:
        """Remove the hooks that are there, but for those of saved tensors."""
        self._recompute.follow(())
        self._recipes.follow(())
        if self._observer is not None:
            self._observer.detach()
        self._functorch.detach()
        self._boundaries.detach()
        self.modules.detach()

    def unhooked(self) -> AbstractContextManager[None]:
        """Remove the hooks from this thread inside the block."""
        return self._functorch.unhooked()

    @property
    def roots(self) -> list[tuple[str, torch.nn.Module]]:
        """The known outermost modules, each with its name."""
        places = [(self.modules.place_of(each), each) for each in self.protected.modules]
        return [("module" if place is None else place.path, each) for place, each in places]

    @property
    def notes(self) -> list[str]:
        """One sentence for each kind of tensor that stayed in memory uncounted, with the reason."""
        times = self._functorch.times
        if not times:
            return self._warnings
        return [
            *self._warnings,
            f"torch.func, which refuses saved-tensor hooks, ran {times} times: the tensors that it saved"
            " stayed in memory and were not counted",
        ]

    # -- callbacks of the hooks ---------------------------------------------------------------

    def _root_registered(self, root: torch.nn.Module) -> None:
        """Handle a newly registered root module."""
        self.protected.add_module(root)
        if self.hooks.weights is not None:
            self.hooks.weights.add(root)
        if self._given is None:
            return
        place = self.modules.place_of(root)
        if place is not None:
            user_plan.check_paths(self._given, self.modules.known(), place.path)
        self.follow()

    def follow(self) -> None:
        """Follow the orders beside offloading: observation and recomputation."""
        plan = self._main.orders.plan
        observing = self._time.observing = self._devices.observing
        recomputed = () if plan is None else plan.recomputed
        self._recompute.follow(recomputed)
        self._recompute.suspended = observing
        if self._observer is not None:
            self._observer.detach()
            self.hooks.observer = self._observer = None
        self._recipes.follow(() if observing else recomputed)
        if observing:
            self._observer = self.hooks.observer = PassObserver(
                modules=self.modules,
                thread=self.thread.ident or 0,  # backward ends in a device's own thread
                compute_ns=self._time.now_ns,
                storage_of=self.hooks.storage_of,
                left_out=self._time.left_out,
            )
            self._observer.attach()

    def _backward_ended(self) -> None:
        self.modules.forget_watched()
        devices, observer = self._devices, self._observer
        if observer is not None:
            alone = not_recomputable(self.modules.known())
            for executor in tuple(devices.all.values()):
                executor.observed(observer.finish, observer.unrepeatable | alone)
        planned = devices.end_backward()
        if planned or observer is not None or devices.observing:
            self.follow()

    def _module_ran(self, kind: str, output: Any, packed: list[Any]) -> None:
        self.hooks.prove(kind, output, packed)

    def _unhooked(self) -> None:
        if self._observer is not None:
            self._observer.refuse_running()

    def _stepped(self, optimizer: torch.optim.Optimizer, is_within_another: bool) -> None:
        self.protected.add_optimizer(optimizer)
        if not is_within_another:
            self._on_step()

    def _missed_thread(self, thread: str) -> None:
        message = (
            f"thread {thread!r} runs modules outside this session: saved-tensor hooks are per thread,"
            " so the tensors that it saves stay in memory and are not counted"
        )
        if message not in self._warnings and len(self._warnings) < MOST_WARNINGS:
            self._warnings.append(message)
            warnings.warn(message, PenstockWarning, stacklevel=2)
