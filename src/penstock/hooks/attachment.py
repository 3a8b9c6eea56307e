"""A session's hold on PyTorch: every hook that it takes, put together, from attaching to detaching."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from penstock.core.errors import PenstockWarning
from penstock.hooks import proofs
from penstock.hooks.aside import StepAside
from penstock.hooks.boundaries import Boundaries
from penstock.hooks.modules import ModuleTracker
from penstock.hooks.observer import Observer
from penstock.hooks.protected import ProtectedStorages
from penstock.hooks.recipe_calls import RecipeCalls
from penstock.hooks.recompute import Recompute, left_alone
from penstock.hooks.saved_tensors import SavedTensorHooks
from penstock.observe.recorder import Recorder
from penstock.plan.plan import Plan
from penstock.runtime import given
from penstock.runtime.devices import Devices
from penstock.runtime.repeats import Repeats

MOST_WARNINGS: Final = 16
"""Threads that are warned of: a program may start another one in each step."""


class Attachment:
    """The hooks of one session, in the thread that attaches them.

    Attributes:
        hooks: Pack and unpack.
        modules: Where in which module the thread is.
        protected: What is never moved.
        thread: The one that attached them.
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
            devices: Have the executors, which hold what is saved, and their planners, which say what else
                is to be done: observe, run modules again.
            recorder: Counts.
            device: Whose tensors are moved.
            floor_bytes: Smaller storages stay.
            prove_signs: Ask modules whether only the signs of what they save are needed.
            given_plan: Followed as it is: roots are checked against it as they become known.
            on_step: Called after each optimizer step.
        """
        executor = devices.main
        self._devices = devices
        self._time = executor.time
        self._planner = executor.planner
        self._given = given_plan
        self._on_step = on_step
        self._observer: Observer | None = None
        self._warnings: list[str] = []
        self.protected = ProtectedStorages()
        self.modules = ModuleTracker(
            on_root=self._met,
            on_missed_thread=self._missed_thread,
            on_watched=self._module_ran,
            completion=executor.completion,
            watch=proofs.KINDS if prove_signs else (),
        )
        self._boundaries = Boundaries(on_backward_end=self._backward_ended, on_step=self._stepped)
        self.hooks = SavedTensorHooks(
            executor=executor,
            protected=self.protected,
            modules=self.modules,
            boundaries=self._boundaries,
            recorder=recorder,
            device_type=device.type,
            floor_bytes=floor_bytes,
            executor_of=None if executor.time.timer is None else devices.of,
        )
        self._recompute = Recompute(
            hooks=self.hooks,
            modules=self.modules,
            repeats=Repeats(executor),
            device=device,
            floor_bytes=floor_bytes,
        )
        self._recipes = RecipeCalls(
            hooks=self.hooks,
            modules=self.modules,
            remakes=executor.remakes,
            device=device,
        )
        self._context = torch.autograd.graph.saved_tensors_hooks(self.hooks.pack, self.hooks.unpack)
        self._aside = StepAside(self.hooks.pack, self.hooks.unpack, on_aside=self._stepped_aside)

    # -- from attaching to detaching ----------------------------------------------------------

    def attach(
        self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Begin, in this thread.

        Args:
            model: Known from the start; others become known when they run.
            optimizer: Its state is protected from the start; others' when they step.
        """
        self.thread = threading.current_thread()
        if model is not None:
            self.modules.register(model)
        if optimizer is not None:
            self.protected.add_optimizer(optimizer)
        self.modules.attach()
        self.follow()
        self._boundaries.attach()
        self._aside.attach()
        self._context.__enter__()

    def detach(self) -> None:
        """End, in the same thread, or in any when that has ended."""
        if self.thread is threading.current_thread():  # else its hooks have gone with it
            self._context.__exit__()
        self._recompute.follow(())
        self._recipes.follow(())
        if self._observer is not None:
            self._observer.detach()
        self._aside.detach()
        self._boundaries.detach()
        self.modules.detach()

    def aside(self) -> AbstractContextManager[None]:
        """Within, this thread saves tensors as if nothing were hooked."""
        return self._aside.aside()

    @property
    def roots(self) -> list[tuple[str, torch.nn.Module]]:
        """The outermost modules that are known, by name."""
        places = [(self.modules.place_of(each), each) for each in self.protected.modules]
        return [("module" if place is None else place.path, each) for place, each in places]

    @property
    def notes(self) -> list[str]:
        """What stayed in memory uncounted, and why; one sentence each."""
        times = self._aside.times
        if not times:
            return self._warnings
        return [
            *self._warnings,
            f"torch.func, which refuses saved-tensor hooks, ran {times} times: what it saved meanwhile"
            " stayed in memory and was not counted",
        ]

    # -- what the hooks report ----------------------------------------------------------------

    def _met(self, root: torch.nn.Module) -> None:
        """A root has been named."""
        self.protected.add_module(root)
        if self._given is None:
            return
        place = self.modules.place_of(root)
        if place is not None:
            given.check_paths(self._given, self.modules.known(), place.path)
        self.follow()

    def follow(self) -> None:
        """Do, from now on, what the planner wants beside moving: observe, and run modules again."""
        plan = self._planner.plan
        observing = self._time.observing = self._devices.observing
        recomputed = () if plan is None else plan.recomputed
        self._recompute.follow(recomputed)
        self._recompute.suspended = observing
        self._recipes.follow(() if observing else recomputed)
        if self._observer is not None:
            self._observer.detach()
            self.hooks.observer = self._observer = None
        if observing:
            self._observer = self.hooks.observer = Observer(
                modules=self.modules,
                compute_ns=self._time.now_ns,
                storage_of=self.hooks.storage_of,
            )
            self._observer.attach()

    def _backward_ended(self) -> None:
        self.modules.forget_watched()
        devices, observer = self._devices, self._observer
        executors = tuple(devices.all.values())
        if observer is not None:
            alone = left_alone(self.modules.known())
            for executor in executors:
                executor.observed(observer.finish)
                executor.planner.unrepeatable |= observer.unrepeatable | alone
        planned = devices.end_backward()
        if observer is not None:
            for executor in executors:
                if executor.planner.plan is None:
                    executor.planner.observing = False  # nothing saved here could be planned
        if planned or observer is not None or devices.observing:
            self.follow()

    def _module_ran(self, kind: str, output: Any, packed: list[Any]) -> None:
        self.hooks.prove(kind, output, packed)

    def _stepped_aside(self) -> None:
        if self._observer is not None:
            self._observer.refuse_running()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.protected.add_optimizer(optimizer)
        self._on_step()

    def _missed_thread(self, thread: str) -> None:
        message = (
            f"thread {thread!r} runs modules outside this session: saved-tensor hooks are per thread,"
            " so what it saves stays in memory and is not counted"
        )
        if message not in self._warnings and len(self._warnings) < MOST_WARNINGS:
            self._warnings.append(message)
            warnings.warn(message, PenstockWarning, stacklevel=2)
