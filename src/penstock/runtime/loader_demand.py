"""Bandwidth of flash that data loaders need beside a session.

[Note: loaders' demand]
    A loader that shares the engine of a session gives way to everything else, but for what the training
    waits for already. So what it needs on average must be left over by the plan: plans are made for a
    flash of which so much less can be read. What it needs is measured; before that, it is what the loader
    was told. When it has come to differ from what the plan in force leaves by a twentieth of what flash
    delivers, there is a new plan.
"""

from __future__ import annotations

import weakref
from typing import Final, Protocol

from penstock.plan.machine import Machine

MOVED_SHARE: Final = 0.05
"""Of flash's bandwidth: a smaller change of the demand makes no new plan."""


class LoaderReads(Protocol):
    """A data loader as the planner sees it."""

    @property
    def read_demand_bytes_per_s(self) -> float:
        """Bytes per second that it reads, or will have to read, from flash; 0: not known yet."""

    def rest(self) -> None:
        """Give its memory back until it is asked for the next batch."""


class Loaders:
    """The loaders of one session. Added to between steps, asked between passes.

    Attributes:
        planned_bytes_per_s: Bandwidth that the plan in force leaves to them.
    """

    def __init__(self) -> None:
        """Start without any."""
        self.planned_bytes_per_s = 0.0
        self._sources: weakref.WeakSet[LoaderReads] = weakref.WeakSet()

    def add(self, loader: LoaderReads) -> None:
        """Add a loader. It is forgotten when it is dropped."""
        self._sources.add(loader)

    def discard(self, loader: LoaderReads) -> None:
        """Forget a loader that reads no more."""
        self._sources.discard(loader)

    def rest(self) -> None:
        """Have all of them give their memory back, between two steps."""
        for each in list(self._sources):
            each.rest()

    @property
    def demand_bytes_per_s(self) -> float:
        """Bytes per second of reads that all of them need now."""
        return sum(each.read_demand_bytes_per_s for each in list(self._sources))

    def changed(self, machine: Machine) -> bool:
        """Return whether they need another part of this machine's flash than the plan leaves to them."""
        change = abs(self.demand_bytes_per_s - self.planned_bytes_per_s)
        return change > MOVED_SHARE * machine.flash_read_bytes_per_s

    def left_of(self, machine: Machine) -> Machine:
        """Return the machine that is left for a plan from now on."""
        self.planned_bytes_per_s = self.demand_bytes_per_s
        return machine.less_read(self.planned_bytes_per_s) if self.planned_bytes_per_s else machine
