"""Eviction: free memory in a device's budget.

[Note: room]
    Everything held counts against one budget: storages that are kept or await their write, restored
    ones, and touched but idle pages of the arena. When something new does not fit, room is made in
    this order: idle pages, and what was taken in advance, are given back, unless it is quicker to wait
    for a write than to touch the pages again; writes under way are waited for; prefetched copies are
    dropped, the one needed last first; kept storages are spilled, the one needed last first. Only when
    none of these is left is the budget too small, and the error says what would do. If a tier has
    failed, or all are full, bytes have nowhere to go: then the budget is exceeded, with a warning. What
    was refused by full tiers is tried again when they hold less. A limit that was only estimated
    ([Note: what is left]) is exceeded, too, where nothing is left to be done, and nothing fails for it.

    If it is other products that fill the memory of the process ([Note: one account]), all that can be
    spilled is spilled, too, and then they are waited for, for ``OTHERS_PATIENCE_S`` at most. After a
    wait in which they have not freed enough they are not waited for again until they hold less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from penstock.core.config import UNLIMITED
from penstock.core.errors import BudgetError
from penstock.core.units import format_bytes, round_up
from penstock.io.mapping import HUGE_PAGE_BYTES
from penstock.observe.counters import REFUSED
from penstock.observe.recorder import Recorder, Stage, StallCause
from penstock.runtime.compute_time import ComputeTime
from penstock.runtime.storage import Pass, Residency, SavedStorage
from penstock.runtime.table import SMALL, is_in_use, is_settled, strip
from penstock.runtime.transfers import Transfers, session_closed
from penstock.store.account import Account
from penstock.store.pool import free_idle

OTHERS_PATIENCE_S: Final = 2.0
"""Longest wait for memory of other products, such as the buffers of a checkpoint that is written."""
_COMPILED: Final = "OptimizedModule"
"""Class name of `torch.compile(model)`, and so the name of what it saves."""
_BLOCKS: Final = (
    "; torch.compile took the model as a whole, so that it saves everything when forward is over and"
    " needs much of it at once: compile its blocks, as with `for block in blocks: block.compile()`"
)
_WHOLE_STEP: Final = ", which does for a whole step as profiled"
_TO_HERE: Final = " to get past this point; more may be needed later in the step, "
_NOT_AS_PROFILED: Final = "which needs more than those profiled before"
_NOT_PROFILED: Final = (
    "of which there is no profile yet (the summary of a run without `device_memory` names a budget that"
    " does for all of it)"
)


class Eviction:
    """Frees memory of a budget for new storages. It waits, so call it without the runtime's lock."""

    def __init__(
        self,
        *,
        budget: Account,
        transfers: Transfers,
        recorder: Recorder,
        time: ComputeTime,
    ) -> None:
        """Serve one executor.

        Args:
            budget: Budget in which memory is freed.
            transfers: Storages that can be moved, and their transfers.
            recorder: Gets a span for each wait.
            time: Measures computing; waits are left out.
        """
        self._time = time
        self._budget = budget
        self._transfers = transfers
        self._recorder = recorder
        self._waited_for_bytes = UNLIMITED
        """Bytes that others held when they were last waited for without success."""

    def take(
        self, nbytes: int, owner: str, *, name: str, of_pass: Pass, saved: SavedStorage | None
    ) -> None:
        """Take ``nbytes`` from the budget, waiting for room.

        Args:
            nbytes: Bytes to take.
            owner: Owner of the bytes in the budget.
            name: Purpose of the bytes, for errors.
            of_pass: Pass whose storages are evicted first.
            saved: Storage that needs the bytes, and so is not evicted.

        Raises:
            BudgetError: Not enough can be freed.
        """
        if self._budget.try_take(nbytes, owner):
            return
        start_ns = self._recorder.clock.now_ns()
        waiting = self._time.wait_begins()
        while not self._budget.try_take(nbytes, owner):
            if not self.make(nbytes, name=name, of_pass=of_pass, saved=saved, from_budget=True):
                self._budget.force(nbytes, owner)
                break
        self._time.wait_ends(waiting)
        self.stalled(start_ns, StallCause.BUDGET, name)

    def make(
        self,
        nbytes: int,
        *,
        name: str,
        of_pass: Pass,
        saved: SavedStorage | None,
        from_budget: bool = False,
    ) -> bool:
        """Take one step towards ``nbytes`` of free budget; see [Note: room].

        Args:
            nbytes: Bytes that are needed.
            name: Purpose of the bytes, for errors.
            of_pass: Pass whose storages are evicted first.
            saved: Storage that is not evicted.
            from_budget: True if free budget suffices, without a block of the arena: then nothing is
                evicted if a write has ended since the caller tried.

        Returns:
            False if nothing is left to do, and the budget must be exceeded because a tier failed.

        Raises:
            BudgetError: Nothing is left to do.
            ClosedError: The session is closed, so that nothing can be moved.
        """
        transfers = self._transfers
        if transfers.closed:
            raise session_closed(name)
        missing = nbytes - self._budget.free_bytes if from_budget else nbytes
        has_others = from_budget or self._budget.missing_elsewhere(nbytes) > 0
        if missing <= 0 or self._write_ends_sooner(missing) or transfers.mover.trim(missing) > 0:
            return True
        with transfers.table.lock:
            if from_budget and self._budget.free_bytes >= nbytes:
                return True
            if transfers.table.free_spare() or self._drop_behind_writes(of_pass, saved):
                return True
            if transfers.reading:
                transfers.table.changed.wait()
                return True
            transfers.table.promote_all()
            victim = self._victim(of_pass, saved)
        if victim is not None:
            self._evict(victim)
            return True
        return (has_others and self._others_give_way(nbytes)) or self._exceed(nbytes, name)

    def _others_give_way(self, nbytes: int) -> bool:
        """Wait for other products if it is their memory that is in the way; return whether it is free."""
        budget = self._budget
        if budget.parent is None or budget.limit_bytes - budget.used_bytes < nbytes:
            return False
        if free_idle(budget, nbytes) or budget.free_bytes >= nbytes:  # others were quicker
            return True
        if budget.make_room(nbytes):
            return True
        held_bytes = budget.parent.limit_bytes - budget.used_bytes - budget.free_bytes
        if budget.free_bytes + held_bytes < nbytes or held_bytes >= self._waited_for_bytes:
            return False
        with budget.changed:
            is_free = budget.changed.wait_for(
                lambda: budget.free_bytes >= nbytes, OTHERS_PATIENCE_S
            )
        self._waited_for_bytes = UNLIMITED if is_free else held_bytes
        return is_free

    def give_way(self, nbytes: int, of_pass: Pass) -> None:
        """Begin to free ``nbytes`` for other parts of Penstock; does not wait.

        See [Note: accounts that yield].

        Args:
            nbytes: Bytes that are missing.
            of_pass: The pass whose storages go, the one needed last first.
        """
        transfers = self._transfers
        if transfers.closed:
            return
        with transfers.table.lock:
            going = transfers.table.free_spare() + transfers.writing_bytes
        going += transfers.mover.trim(nbytes)
        if going >= nbytes:
            return
        with transfers.table.lock:
            while self._drop_prefetched(of_pass, None):
                pass
            transfers.table.promote_all()
        going += transfers.mover.trim(nbytes)
        while going < nbytes:
            with transfers.table.lock:
                victim = self._victim(of_pass, None)
            if victim is None:
                return
            going += victim.nbytes
            self._evict(victim)

    def _exceed(self, nbytes: int, name: str) -> bool:
        """Refuse to, where the limit is given and tiers could take more; else count it: False.

        True if the limit could be raised.
        """
        transfers, advisory = self._transfers, self._budget.advisory
        excess = self._budget.used_bytes + nbytes - self._budget.limit_bytes
        if excess > 0 and self._budget.extend is not None and self._budget.extend(excess):
            return True
        if not (transfers.failed or advisory):
            self._refuse(nbytes, name)
        if not advisory:
            self._recorder.warn(
                f"budget.{self._budget.name}",
                f"the {self._budget.name} budget is exceeded for {name}, because a tier has failed or"
                f" is full, and nothing else can be moved away ({transfers.usage()}); give more"
                " host_memory or flash_capacity, or a smaller batch; further cases are only counted",
            )
        self._recorder.count("budget.overflow")
        return False

    def _write_ends_sooner(self, nbytes: int) -> bool:
        """Wait for a write, if that takes less than to have idle pages again that are given back."""
        transfers = self._transfers
        with transfers.table.lock:
            if transfers.writing_bytes < nbytes:
                return False
            if transfers.write_ns_per_byte * nbytes >= transfers.mover.retouch_ns(nbytes):
                return False
            transfers.table.changed.wait()
        return True

    def _drop_behind_writes(self, of_pass: Pass, saved: SavedStorage | None) -> bool:
        if self._transfers.writing:
            self._transfers.table.changed.wait()
            return True
        return self._drop_prefetched(of_pass, saved)

    def stalled(self, start_ns: int, cause: StallCause, name: str) -> None:
        """Account for a wait that ends now."""
        end_ns = self._recorder.clock.now_ns()
        self._time.stalled_ns += end_ns - start_ns
        self._recorder.span(Stage.STALL, start_ns, end_ns, cause=cause, slot=name)

    def _drop_prefetched(self, of_pass: Pass, wanted_for: SavedStorage | None) -> bool:
        if not self._transfers.restored:
            return False
        for saved in self._last_first(of_pass, self._transfers.restored):
            if saved.state is Residency.RESTORED and saved is not wanted_for:
                self._transfers.retire(saved)
                self._recorder.count("prefetch.dropped")
                return True
        return False

    def _victim(self, of_pass: Pass, wanted_for: SavedStorage | None) -> SavedStorage | None:
        if not self._transfers.tiers:
            return None
        used = None
        for saved in self._last_first(of_pass, self._transfers.table.entries.values()):
            if saved.state is not Residency.RESIDENT or saved is wanted_for:
                continue
            if not self._transfers.can_spill(saved) or not is_settled(saved):
                continue
            if saved.pending > 0:
                return saved
            if used is None and not is_in_use(saved):
                used = saved  # its graph was walked, and is kept to be walked again
        return used

    def _last_first(self, of_pass: Pass, others: Iterable[SavedStorage]) -> Iterator[SavedStorage]:
        """The pass's storages, the one needed last first; then those of other passes."""
        yield from of_pass.needed_last()
        yield from list(others)  # not a tuple, during whose allocation finalizers may run

    def _evict(self, saved: SavedStorage) -> None:
        self._recorder.count("evicted")
        with self._transfers.table.lock:
            if saved.writing:
                return  # another thread was quicker; it may have been needed since
            if saved.state is Residency.RESIDENT and saved.ticket is not None:
                strip(saved)
                saved.state = Residency.SPILLED  # a tier has its bytes already
                self._transfers.table.drop_source(saved)
                return
        self._transfers.spill(saved, "")

    def _refuse(self, nbytes: int, name: str) -> None:
        used = self._budget.used_bytes
        limit = self._budget.limit_bytes
        least = used + nbytes
        if self._budget.missing_elsewhere(nbytes):
            raise self._budget.refusal(nbytes, name, "give other uses of this memory less")
        if least <= limit:  # the bytes would fit, but what is restored takes whole pages
            pages = used + round_up(nbytes, HUGE_PAGE_BYTES)
            least = max(pages, round_up(limit + 1, HUGE_PAGE_BYTES))
        of_step = self._transfers.active.orders.min_budget_bytes()
        if of_step is None:
            reach = _TO_HERE + _NOT_PROFILED
        elif of_step < least:
            reach = _TO_HERE + _NOT_AS_PROFILED
        else:
            least, reach = of_step, _WHOLE_STEP
        small = self._budget.used_by(SMALL)
        self._recorder.count(REFUSED)
        raise BudgetError(
            f"the {self._budget.name} budget of {limit} bytes ({format_bytes(limit)}) is too small"
            f" for {name}: it needs {nbytes} bytes beside {used} that cannot be moved away now"
            f" ({small} of them in tensors below the floor, which stay); give at least {least} bytes"
            f" ({format_bytes(least)}){reach}"
            + (", or a lower `floor`, so that they can be moved" if 4 * small > limit else "")
            + ("" if self._transfers.tiers else ", or name a flash directory to spill to")
            + (_BLOCKS if name.startswith(_COMPILED) else ""),
            slot=name,
            limit_bytes=limit,
            least_bytes=least,
        )
