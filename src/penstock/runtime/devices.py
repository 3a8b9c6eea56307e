"""The executors of a session: one for each device that saved tensors are on.

[Note: several devices]
    A model may be spread over devices, its first layers on one and the others on the next. The memory of
    one cannot stand for that of another: if one is full, only what is on that one makes room. So all that
    decides on device memory is there once for each device: the budget, what a pass saves, the profile,
    the plan, the making of room. ``device_memory`` is what each of them may hold. A device's executor is
    made when the first tensor on it is saved.

    What devices share is the host's: tiers, pinned memory, the lanes' threads, the axis of time. A plan
    is made for one device as if it had them to itself. Where that is too much, a full tier refuses, and
    a read comes late: slower, never wrong.

    Modules and outputs are recomputed only for what is saved on the session's own device, the first one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.core.locks import Lock
from penstock.runtime.executor import Executor
from penstock.runtime.planner import Planner
from penstock.store.account import Account


class Devices:
    """See [Note: several devices]. Thread-safe.

    Attributes:
        main: The executor of the session's own device.
        all: Every executor, by its device.
        planners: The planner of each device.
    """

    def __init__(
        self,
        device: torch.device,
        main: Executor,
        open_other: Callable[[torch.device], tuple[Executor, Planner]],
    ) -> None:
        """Begin with one device, which follows no plan until ``plan_by``.

        Args:
            device: The session's own.
            main: Its executor.
            open_other: Makes the executor and the planner of another device.
        """
        self.main = main
        self.all = {device: main}
        self.planners: dict[torch.device, Planner] = {}
        self._device = device
        self._open_other = open_other
        self._lock = Lock()

    def plan_by(self, planner: Planner) -> None:
        """Let the session's own device follow the orders of ``planner`` from now on."""
        self.planners[self._device] = planner
        self.main.follow(planner.orders)

    def of(self, tensor: torch.Tensor) -> Executor:
        """Return the executor of the tensor's device."""
        found = self.all.get(tensor.device)
        return self._of(tensor.device) if found is None else found

    def budget_of(self, device: torch.device) -> Account:
        """Return the account of a device's memory."""
        found = self.all.get(device)
        return (self._of(device) if found is None else found).budget

    def end_backward(self) -> bool:
        """Let the passes on all devices end; return whether there are new orders for any."""
        end_ns = self.main.compute_ns()  # of all of them, before any plan is made
        followed = False
        for device, executor in tuple(self.all.items()):
            record = executor.end_backward(end_ns)
            orders = None if record is None else self.planners[device].learn(record)
            if orders is not None:
                executor.follow(orders)
                followed = True
        return followed

    def end_step(self) -> bool:
        """End a step; return whether there are new orders for any device."""
        followed = False
        for device, executor in tuple(self.all.items()):
            limit_bytes = executor.end_step()
            orders = None if limit_bytes is None else self.planners[device].limit(limit_bytes)
            if orders is not None:
                executor.follow(orders)
                followed = True
        return followed

    @property
    def observing(self) -> bool:
        """Return whether the passes that run now are observed on any device."""
        return any(executor.active.observing for executor in tuple(self.all.values()))

    def _of(self, device: torch.device) -> Executor:
        with self._lock:
            if device not in self.all:
                executor, planner = self._open_other(device)
                executor.follow(planner.orders)
                self.planners[device] = planner
                self.all = {**self.all, device: executor}
            return self.all[device]
