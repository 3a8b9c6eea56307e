"""Weights are worked with at rest, by optimizers and in backward."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import embedding

from penstock.core.errors import InPlaceError
from penstock.homed import UpdateMemory, home_of, local_of
from penstock.weights.eviction import WeightEviction
from penstock.weights.homes import Home, is_laid_alike, shares_storage, view_like
from penstock.weights.module_uses import ModuleUses
from penstock.weights.reads import WeightReads
from penstock.weights.stays import Stay, WeightTable


class WeightKeeper:
    """Keeper of all homes of a session. Thread-safe; see :class:`.homes.Keeper`."""

    def __init__(
        self, table: WeightTable, eviction: WeightEviction, reads: WeightReads, uses: ModuleUses
    ) -> None:
        """Keep the weights of a table.

        Args:
            table: The weights.
            eviction: Writes them home.
            reads: Brings them.
            uses: Told of the modules that touch a weight.
        """
        self._table = table
        self._eviction = eviction
        self._reads = reads
        self._uses = uses

    # -- for backward -----------------------------------------------------------------------------

    def bring(self, home: Home, parameter: Parameter) -> Tensor:
        """Return a weight whole; its memory stays as long as anybody refers to it."""
        if home.keeper is not self or (home.parameter is None and home_of(parameter) is None):
            if not home.is_mapped and home.is_at_rest:
                home.begin_touch()  # which raises
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # the session is closed, or it has left its home
                return view_like(Tensor.untyped_storage(local_of(parameter)), home.layout)
        self._table.check_process(home)
        stay = self._table.by_home[home]
        self._reads.acquire(stay, trains=True)
        storage = stay.storage
        if storage is None and home.is_mapped:
            storage = home.resting.untyped_storage()
        whole = None if storage is None else view_like(storage, home.layout)
        self._reads.release(stay)  # it does not leave now, as somebody refers to it
        if whole is None:
            raise InPlaceError(
                f"weight {home.name}, which backward needs, was replaced meanwhile in another thread"
            )
        return whole

    # -- for optimizers ---------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Limit of the weights in memory; see :class:`penstock.homed.HomedWeight`."""
        return self._table.account.limit_bytes

    @property
    def update_memory(self) -> UpdateMemory | None:
        """Memory in which gradients may wait; see :class:`penstock.homed.HomedWeight`."""
        return self._table.update_memory

    def streamed_bytes(self, home: Home) -> int | None:
        """Limit of the weights that do not stay; see :class:`penstock.homed.HomedWeight`."""
        table, kept = self._table, self._table.order.kept
        if table.by_home[home].index in kept:
            return None
        return table.account.limit_bytes - sum(table.stays[each].home.nbytes for each in kept)

    def hold(self, home: Home) -> None:
        """Bring a weight to be changed; see :class:`penstock.homed.HomedWeight`."""
        self._table.check_process(home)
        stay = self._table.by_home[home]
        self._reads.acquire(stay, trains=True)
        self._eviction.wait_for_write(stay)
        if stay.storage is not None:
            self._table.memory.settle(stay.storage)

    def let_go(self, home: Home, *, changed: bool) -> None:
        """End a ``hold``."""
        stay = self._table.by_home[home]
        if changed:
            self.lent(home)
        self._reads.release(stay)

    # -- for resting weights ----------------------------------------------------------------------

    def begin_touch(self, home: Home) -> None:
        """Let a weight stay where it is, no transfer of it be in flight, and note who works with it."""
        self._table.check_process(home)
        stay = self._table.by_home[home]
        if not home.is_mapped:
            self._reads.acquire(stay, is_touch=True)
            with self._table.wake:
                self._table.wake.wait_for(lambda: stay.writing is None)
                stay.begin_use()
            self._reads.release(stay)
            self._uses.note_user(stay)
            return
        while True:
            if stay.coming is not None:  # what it reads may be changed now
                self._reads.finish(stay)
            with self._table.wake:
                self._table.wake.wait_for(lambda: stay.writing is None)
                if stay.coming is None:
                    stay.begin_use()
                    break
        self._uses.note_user(stay)

    def end_touch(self, home: Home, *, changed: bool) -> None:
        """End a touch."""
        stay = self._table.by_home[home]
        with self._table.wake:
            if stay.at_home:
                stay.at_home -= 1
            else:
                stay.touching -= 1
            if changed:
                stay.note_change()
            self._table.check_memory(stay)
            self._table.wake.notify_all()

    def is_as_home(self, home: Home) -> bool:
        """See :class:`.homes.Keeper`."""
        self._table.check_process(home)
        stay = self._table.by_home[home]
        with self._table.wake:
            self._table.wake.wait_for(lambda: stay.writing is None)
            return stay.storage is None or not (stay.is_changed or stay.is_addressed)

    def embedded(
        self, home: Home, indices: Tensor, embed: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Look rows up where a weight rests; see :class:`.resting.RestingHome`."""
        self._table.check_process(home)
        stay = self._table.by_home[home]
        if not home.has_few_rows(indices.numel()) or torch.cuda.is_current_stream_capturing():
            return None
        with self._table.wake:
            if not stay.is_away:
                return None
            stay.at_home += 1
            stay.looking.append(get_ident())
        try:
            return embedding(indices.cpu(), home.values), embed()
        finally:
            with self._table.wake:
                stay.at_home -= 1
                stay.looking.remove(get_ident())
                self._table.wake.notify_all()

    def lent(self, home: Home) -> None:
        """Note that a weight may be changed where it is."""
        self._table.check_process(home)
        with self._table.wake:
            self._table.by_home[home].note_change()

    def addressed(self, home: Home) -> None:
        """Note that the address of a weight is known; where nothing is mapped, it keeps it."""
        self._table.check_process(home)
        with self._table.wake:
            stay = self._table.by_home[home]
            stay.note_change()
            stay.is_addressed = not home.is_mapped

    def replaced(self, home: Home, data: Tensor) -> None:
        """Take other values of a weight, of any shape and type; if it cannot rest, it leaves its home."""
        stay = self._table.by_home[home]
        if not home.is_mapped:
            self._replaced_on_device(stay, data)
            return
        home.begin_touch()
        try:
            is_lent = home.is_lent if stay.storage is None else stay.is_lent
            is_same = is_laid_alike(data, home.resting)
            memory = stay.storage or home.resting.untyped_storage()
            is_its_own = is_same and shares_storage(data, memory)
            is_taken = is_its_own or home.can_take(data, is_lent=is_lent)
            if is_taken and is_same:
                home.take(data)
            elif is_taken:
                self._move(stay, data)
        finally:
            home.end_touch(changed=True)
        if not is_taken:
            self._leave_for(stay, data)

    def _replaced_on_device(self, stay: Stay, data: Tensor) -> None:
        """Let a weight whose home is not mapped leave it for other values."""
        parameter = stay.home.parameter
        if parameter is None or data is parameter:  # as by ``to`` with nothing to convert
            return
        self._leave_for(stay, data)

    def _leave_for(self, stay: Stay, data: Tensor) -> None:
        """Let a weight leave its home for memory of the program's, unless torch refuses that."""
        home = stay.home
        with self._table.wake:
            with torch._C.DisableTorchFunctionSubclass():
                Tensor.data.__set__(home.parameter, data)  # type: ignore[attr-defined]
            self._table.leave_home(stay)
        home.warn_of_move(data)

    def _move(self, stay: Stay, data: Tensor) -> None:
        """Let a weight have another shape or type from now on."""
        home = stay.home
        others = [
            each.home
            for each in self._table.stays
            if each is not stay and each.home.parameter is not None
        ]
        self._table.check_sizes(
            [(each.nbytes, each.name) for each in others] + [(data.nbytes, home.name)]
        )
        before = home.nbytes
        with self._table.wake:
            resting = home.resting.untyped_storage()
            kind = type(home.parameter)
            home.move(data)
            if stay.storage is not None:
                self._table.give_up(stay)
                stay.at_home, stay.touching = stay.pins + stay.touching, 0
            self._table.by_storage.pop(resting._cdata, None)
            self._table.by_storage[home.resting.untyped_storage()._cdata] = stay
            self._table.total_bytes += home.nbytes - before
            if stay.pins:
                home.parameter.__class__ = kind
