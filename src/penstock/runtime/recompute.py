"""Recomputation in place of holding: of whole modules, and of single storages by a recipe.

[Note: names of slots within a recomputed module]
    A slot has the same name whether its module is recomputed or not, or the plan would not know it. So
    dropped storages count as saved where ordinals are given. The inputs of such a module are saved before
    it runs, under a name of their own; when what is inside saves them too, as it would have done, they
    get the name that they would have had.

[Note: storages with a recipe]
    To the executor they are SPILLED storages whose bytes no tier has: their ``recipe`` recomputes them,
    in the thread that needs them. The first time, the result is compared with what was dropped, bit for
    bit. See [Note: recipes] for what has one.

Recomputed memory is never moved: autograd holds what a module recomputes, through
``torch.utils.checkpoint``. But it is resident, so it is charged to the budget like everything else:
before the module or recipe runs, until each storage dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import torch

from penstock.core.errors import HookError
from penstock.core.locks import defer
from penstock.observe.recorder import Recorder, Stage
from penstock.plan.plan import Action
from penstock.runtime.active_orders import ActiveOrders
from penstock.runtime.digests import Comparison, digest_of_storage
from penstock.runtime.eviction import Eviction
from penstock.runtime.storage import Pass, Recipe, Residency, SavedStorage, TensorRef
from penstock.runtime.table import in_memory
from penstock.runtime.transfers import Transfers
from penstock.store.account import Account

RECOMPUTED: Final = "recomputed"
"""Owner, in the device budget, of recomputed storages."""
_ADVICE: Final = "give recompute=False, or a plan that does not recompute it"


class RecomputedMemory:
    """Device memory of one recomputation: taken before it, and charged until its storages die."""

    def __init__(self, nbytes: int, *, take: Callable[[int], None], budget: Account) -> None:
        """Take ``nbytes`` by ``take``, which waits for room. Raises BudgetError if there can be none."""
        self._take = take
        self._budget = budget
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        take(nbytes)
        self._left_bytes = nbytes

    def made(self, storage: torch.UntypedStorage) -> bool:
        """Charge a recomputed storage until it dies, once; return whether it was not charged before."""
        known = self._made.get(storage._cdata)
        if known is not None and known() is storage:
            return False
        nbytes = storage.nbytes()
        missing = nbytes - self._left_bytes
        if missing > 0:  # more than the first time
            self._take(missing)
            self._left_bytes += missing
        self._left_bytes -= nbytes
        self._made[storage._cdata] = TensorRef(storage)
        weakref.finalize(storage, defer, self._budget.free, nbytes, RECOMPUTED).atexit = False
        return True

    def close(self) -> None:
        """Free what was taken and not used: the recomputation has ended. Idempotent."""
        left, self._left_bytes = self._left_bytes, 0
        if left:
            self._budget.free(left, RECOMPUTED)


class RecipeSource(Protocol):
    """Tracker of the calls that storages can be recomputed by."""

    def recipe_of(self, storage: torch.UntypedStorage, version: int) -> Recipe | None:
        """Return how to recompute this storage at this version, or ``None`` if that is not known."""
        ...

    def is_making(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the running call of this thread is making the storage."""
        ...


class Recomputer:
    """Recomputation for one executor. Thread-safe.

    Attributes:
        recipes: Knows the recipes of storages; without it none is recomputed by one.
    """

    def __init__(
        self,
        *,
        active: ActiveOrders,
        transfers: Transfers,
        eviction: Eviction,
        budget: Account,
        recorder: Recorder,
        current_pass: Callable[[], Pass],
        spill: Callable[[SavedStorage, str, str], None],
    ) -> None:
        """Recompute nothing yet.

        Args:
            active: Orders in force.
            transfers: Has the table of storages and the mover.
            eviction: Finds room for what is recomputed.
            budget: Device memory that it is charged to.
            recorder: Receives spans.
            current_pass: Returns the pass that is being saved; called under the runtime's lock.
            spill: Begins to write a storage to a tier, by a codec.
        """
        self.recipes: RecipeSource | None = None
        self._active = active
        self._transfers = transfers
        self._lock = transfers.table.lock
        self._eviction = eviction
        self._budget = budget
        self._recorder = recorder
        self._pass_now = current_pass
        self._spill = spill
        self._proven: set[str] = set()

    # -- modules ----------------------------------------------------------------------------------

    @property
    def current_pass(self) -> Pass:
        """The pass that is being saved."""
        with self._lock:
            return self._pass_now()

    def drops(self, module: str, nbytes: int) -> bool:
        """Return whether the next storage that ``module`` saves is recomputed; it counts as saved."""
        with self._lock:
            current = self._pass_now()
            if (module, current.next_ordinal(module)) not in self._active.orders.recomputed:
                return False
            current.new_key(module, nbytes)
            current.dropped += 1
            return True

    def name(self, saved: SavedStorage, module: str) -> None:
        """Rename an input that ``module``, inside, saves too; do with it what the plan says."""
        with self._lock:
            saved.record.key = saved.of_pass.new_key(module, saved.nbytes)
        self.settle(saved)

    def settle(self, saved: SavedStorage) -> None:
        """Do with an input what the plan says, or the default rule if nothing inside has saved it."""
        decision = self._active.decide_input(saved.record)
        if decision.action is Action.OFFLOAD and saved.state is Residency.RESIDENT:
            self._spill(saved, decision.tier, decision.codec)

    def begin(self, of_pass: Pass, path: str, nbytes: int) -> RecomputedMemory:
        """Take the memory of what the module at ``path`` recomputes.

        Raises:
            BudgetError: There can be no room for it.
        """
        name = f"what {path} recomputes"
        return self._memory(nbytes, name=name, of_pass=of_pass, saved=None)

    def made(self, storage: torch.UntypedStorage) -> None:
        """Note that the current stream has just recomputed a storage; see ``Mover.made``."""
        if self._is_behind(storage):
            self._transfers.mover.made(storage)

    def free_early(self, storage: torch.UntypedStorage) -> None:
        """Note the drop of a storage that a module saves; see ``Mover.free_early``."""
        if self._is_behind(storage):
            self._transfers.mover.free_early(storage)

    def use(self, storage: torch.UntypedStorage) -> None:
        """Note that the current stream works with a recomputed storage; see ``Mover.use``."""
        if self._is_behind(storage):
            self._transfers.mover.use(storage)

    def _is_behind(self, storage: torch.UntypedStorage) -> bool:
        mover = self._transfers.mover
        return mover.runs_behind and storage.device.type == mover.device.type

    def reach(self, of_pass: Pass, path: str) -> None:
        """Note that backward has come to the module at ``path``: reads that wait for it may begin."""
        place = self._active.orders.first_ranks.get(path)
        if place is not None:
            of_pass.place = max(of_pass.place, place)

    def note_run(self, path: str, start_ns: int, nbytes: int) -> None:
        """Record that the module at ``path`` has recomputed ``nbytes`` since ``start_ns``."""
        end_ns = self._recorder.clock.now_ns()
        self._recorder.span(Stage.RECOMPUTE, start_ns, end_ns, nbytes=nbytes, slot=path)

    def now_ns(self) -> int:
        """Return the recorder's time."""
        return self._recorder.clock.now_ns()

    # -- recipes ----------------------------------------------------------------------------------

    def drop_saved(self, saved: SavedStorage) -> bool:
        """Drop a storage that has just been saved, now or at the end of the call that makes it.

        Returns:
            Whether that is possible; else it is to be held like any other.
        """
        source, storage = self.recipes, saved.storage
        if source is None or storage is None:
            return False
        recipe = source.recipe_of(storage, saved.version)
        if recipe is None:
            saved.awaits_recipe = source.is_making(storage)
            return saved.awaits_recipe
        self._drop(saved, storage, recipe)
        return True

    def drop_made(self, storage: torch.UntypedStorage, version: int, recipe: Recipe) -> None:
        """Drop the saved storage that a call has made, if it awaits that; the call has ended.

        Args:
            storage: As it is now.
            version: Of its tensor.
            recipe: How to recompute it.
        """
        saved = self._transfers.table.entries.get(storage._cdata)
        if saved is None or not saved.recorded or saved.source() is not storage:
            return
        if saved.awaits_recipe:
            saved.awaits_recipe = False
            if saved.version == version:
                self._drop(saved, storage, recipe)

    def _drop(self, saved: SavedStorage, storage: torch.UntypedStorage, recipe: Recipe) -> None:
        """Hold a RESIDENT storage no longer; other holders may keep it."""
        self._transfers.mover.free_early(storage)
        if recipe.name not in self._proven:
            recipe.digest = digest_of_storage(storage)
        with self._lock:
            if saved.state is not Residency.RESIDENT or saved.writing:
                return
            self._transfers.table.withdraw(saved, storage)
            saved.recipe = recipe
            saved.state = Residency.SPILLED
            del storage
            self._transfers.table.drop_source(saved)

    def demand(self, saved: SavedStorage) -> torch.UntypedStorage:
        """Recompute a storage for the calling thread; wait for room.

        Raises:
            BudgetError: There can be no room for it.
            HookError: The result differs from what was dropped.
            InPlaceError: Something that it is computed from has been modified since.
        """
        recipe = saved.recipe
        assert recipe is not None, f"{saved.label} has no recipe"
        with recipe.lock:
            with self._lock:
                storage = in_memory(saved)
            if storage is not None:
                return storage
            start_ns = self._recorder.clock.now_ns()
            memory = self._memory(
                saved.nbytes, name=saved.label, of_pass=saved.of_pass, saved=saved
            )
            try:
                storage = recipe.compute().untyped_storage()
                self._prove(saved, recipe, storage)
                memory.made(storage)
            finally:
                memory.close()
            self._transfers.mover.made(storage)
            with self._lock:
                if saved.state is Residency.SPILLED:
                    saved.state = Residency.RESTORED
                    saved.storage = storage
                    saved.restored = TensorRef(storage)
                    self._transfers.restored[saved] = None
        self.note_run(recipe.name, start_ns, saved.nbytes)
        return storage

    def _memory(
        self, nbytes: int, *, name: str, of_pass: Pass, saved: SavedStorage | None
    ) -> RecomputedMemory:
        take = partial(
            self._eviction.take, owner=RECOMPUTED, name=name, of_pass=of_pass, saved=saved
        )
        return RecomputedMemory(nbytes, take=take, budget=self._budget)

    def _prove(self, saved: SavedStorage, recipe: Recipe, made: torch.UntypedStorage) -> None:
        if made.nbytes() != saved.nbytes:
            raise HookError(
                f"{recipe.name} makes {made.nbytes()} bytes when it is called again for {saved.label},"
                f" which had {saved.nbytes}; {_ADVICE}"
            )
        if recipe.digest is None:
            return
        if Comparison(recipe.digest, digest_of_storage(made)).differ():
            raise HookError(
                f"{recipe.name} computes something else when it is called again: {saved.label}, of"
                f" {saved.nbytes} bytes, differs in its bits; {_ADVICE}"
            )
        self._proven.add(recipe.name)
