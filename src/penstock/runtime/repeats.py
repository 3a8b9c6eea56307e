"""Executor's part in recomputed modules: names, drops, memory, and place in backward.

[Note: names of slots within a module that is run again]
    A slot has the same name whether its module is run again or not, or the plan would not know it. So
    what is dropped counts as saved where ordinals are given. The inputs of such a module are saved before
    it runs, under a name of their own; when what is inside saves them too, as it would have done, they
    get the name that they would have had.
"""

from __future__ import annotations

from functools import partial

import torch

from penstock.observe.recorder import Stage
from penstock.plan.plan import Action
from penstock.runtime.executor import Executor
from penstock.runtime.remade import REMADE, Remaking
from penstock.runtime.storage import Pass, Residency, SavedStorage


class Repeats:
    """The executor's part in running modules again. Thread-safe."""

    def __init__(self, executor: Executor) -> None:
        """For one executor."""
        self._executor = executor

    @property
    def current_pass(self) -> Pass:
        """The pass that what is saved now belongs to."""
        with self._executor._lock:
            return self._executor._current_pass()

    def has(self, holder: object) -> bool:
        """Return whether this is the executor whose storages modules make again."""
        return holder is self._executor

    def drops(self, module: str, nbytes: int) -> bool:
        """Return whether the next storage that ``module`` saves is recomputed; it counts as saved."""
        executor = self._executor
        with executor._lock:
            current = executor._current_pass()
            if (module, current.next_ordinal(module)) not in executor.orders.recomputed:
                return False
            current.new_key(module, nbytes)
            current.dropped += 1
            return True

    def name(self, saved: SavedStorage, module: str) -> None:
        """An input is saved by ``module``, inside: from now on that is its name, and the plan decides."""
        with self._executor._lock:
            saved.record.key = saved.of_pass.new_key(module, saved.nbytes)
        self.settle(saved)

    def settle(self, saved: SavedStorage) -> None:
        """Do with an input what the plan says, or, if nothing inside has saved it, what is guessed."""
        executor = self._executor
        decision = executor.active.decide_input(saved.record)
        if decision.action is Action.OFFLOAD and saved.state is Residency.RESIDENT:
            executor._spill(saved, decision.tier, decision.codec)

    def begin(self, of_pass: Pass, path: str, nbytes: int) -> Remaking:
        """Take the memory of what running the module at ``path`` again will make.

        Raises:
            BudgetError: There can be no room for it.
        """
        executor = self._executor
        take = partial(self._take, of_pass, path)
        return Remaking(nbytes, take=take, budget=executor.budget)

    def made(self, storage: torch.UntypedStorage) -> None:
        """The current stream has just made a storage that a module saves again; see ``Mover.made``."""
        if self._is_behind(storage):
            self._executor._mover.made(storage)

    def free_early(self, storage: torch.UntypedStorage) -> None:
        """Drop what a module saves, to be recomputed; see ``Mover.free_early``."""
        if self._is_behind(storage):
            self._executor._mover.free_early(storage)

    def use(self, storage: torch.UntypedStorage) -> None:
        """The current stream works with such a storage from now on; see ``Mover.use``."""
        if self._is_behind(storage):
            self._executor._mover.use(storage)

    def _is_behind(self, storage: torch.UntypedStorage) -> bool:
        mover = self._executor._mover
        return mover.runs_behind and storage.device.type == mover.device.type

    def reach(self, of_pass: Pass, path: str) -> None:
        """Backward has come to the module at ``path``: what waits for that may be read ahead."""
        place = self._executor.orders.first_ranks.get(path)
        if place is not None:
            of_pass.place = max(of_pass.place, place)

    def note_run(self, path: str, start_ns: int, nbytes: int) -> None:
        """The module at ``path`` has been run again, and made ``nbytes``."""
        recorder = self._executor._recorder
        recorder.span(Stage.RECOMPUTE, start_ns, recorder.clock.now_ns(), nbytes=nbytes, slot=path)

    def now_ns(self) -> int:
        """The recorder's time."""
        return self._executor._recorder.clock.now_ns()

    def _take(self, of_pass: Pass, path: str, nbytes: int) -> None:
        executor = self._executor
        if not executor.budget.try_take(nbytes, REMADE):
            name = f"what {path} makes again"
            executor._eviction.take(nbytes, REMADE, name=name, of_pass=of_pass, saved=None)
