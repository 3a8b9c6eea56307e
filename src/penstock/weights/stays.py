"""Weights of a session: where the memory of each is, and who uses it.

[Note: who uses a weight]
    A module that owns a weight, from the call of its forward to the return; a weight that another module
    touches is brought with that module from then on. Backward, as long as anybody refers to the memory
    that it was given, which is known by the use count of the storage. An optimizer, between ``hold`` and
    ``let_go``. Everybody else meets the weight at rest (:mod:`.resting`).

    What is in memory and not pinned has the class of a resting weight, so that whoever touches it there
    is noticed too: it counts as changed then, if its memory may have been given away.

    Memory to which others refer stays the parameter's memory, so that each sees what the other writes:
    a buffer does not leave then, and a weight whose mapping was lent, or is worked with just now, is
    used at home, by modules too.

[Note: memory and threads]
    Memory and class of a parameter are exchanged under the lock of the table, in the thread that works
    with it; threads of the engine only set flags. A failed write leaves the weight in memory, over the
    limit if it must, and is tried again in the next step; a failed read is an error where the weight is
    needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import get_ident
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.core.errors import BudgetError
from penstock.core.locks import condition
from penstock.core.process import fork_guard
from penstock.core.units import format_bytes
from penstock.homed import UpdateMemory, home_of, use_count
from penstock.io.engine import Transfer
from penstock.store.account import Account
from penstock.weights.brought import BroughtMemory
from penstock.weights.homes import (
    Home,
    Keeper,
    shares_storage,
    show,
    version_of,
    view_like,
)
from penstock.weights.order import UseOrder

LIMIT_SHARE: Final = 16
"""Those that stay are chosen anew if the limit has grown by more than one part in so many, or fallen."""


class Stay:
    """One weight's memory; see [Note: who uses a weight].

    Attributes:
        storage: Its memory; None if it is not there.
        own_uses: Use count of the storage if nobody else refers to it.
        block, coming: Memory that is being filled, of the kind that weights are brought to,
            and the read.
        writing: Write home in flight.
        dirty: True if the memory is newer than the home.
        version: The parameter's version when the memory was as the home.
        pins: Users that need the class and the memory to stay.
        touching: Operations on the weight in memory that are not over.
        stays: True if it is to stay from its last use to the next one.
        at_home: Users of both kinds that work with the mapping: no read begins meanwhile. If the
            parameter is elsewhere, those that look up rows there; who needs the weight waits for them.
        looking: Threads of those that look up rows.
        is_addressed: True if it stays in memory, at an address that somebody knows.
        has_left: True if it has left its home for memory of the program's.
    """

    __slots__ = (
        *(
            "at_home",
            "block",
            "coming",
            "dirty",
            "has_left",
            "home",
            "index",
            "looking",
            "own_uses",
        ),
        *("pins", "address", "is_addressed", "stays", "storage", "touching", "version", "writing"),
    )

    def __init__(self, index: int, home: Home) -> None:
        """Be at home.

        Args:
            index: Number of the weight.
            home: Its home.
        """
        self.index = index
        self.home = home
        self.storage: torch.UntypedStorage | None = None
        self.own_uses = 0
        self.block: Any = None
        self.coming: Transfer | None = None
        self.writing: Transfer | None = None
        self.dirty = False
        self.version = 0
        self.pins = 0
        self.stays = False
        self.touching = 0
        self.at_home = 0
        self.looking: list[int] = []
        self.address = 0
        self.is_addressed = False
        self.has_left = False

    @property
    def is_lent(self) -> bool:
        """True if others than the parameter refer to the buffer, or it was moved to shared memory."""
        storage = self.storage
        assert storage is not None
        return use_count(storage) > self.own_uses or storage.data_ptr() != self.address

    @property
    def is_changed(self) -> bool:
        """True if the memory is newer than the home."""
        parameter = self.home.parameter
        return self.dirty or (parameter is not None and version_of(parameter) != self.version)

    @property
    def is_away(self) -> bool:
        """True if it is neither in memory nor on its way there."""
        return self.storage is None and self.coming is None

    @property
    def is_over(self) -> bool:
        """True if the program has dropped the parameter, and nobody uses its home or is moving it."""
        is_used = self.pins or self.touching or self.at_home
        is_moving = self.coming is not None or self.writing is not None
        return not (is_used or is_moving or self.home.parameter is not None or self.home.is_lent)

    @property
    def others_at_home(self) -> int:
        """``at_home`` but for this thread, which looks rows up and runs a hook or a handler meanwhile."""
        return self.at_home - self.looking.count(get_ident())

    @property
    def must_stay(self) -> bool:
        """True if it stays in memory because its address was given away."""
        return self.storage is not None and self.is_addressed

    def show_busy(self) -> None:
        """Give the parameter the class of a weight that is used. Under the lock."""
        parameter = self.home.parameter
        if parameter is not None and type(parameter) is self.home.kinds.resting:
            cast(Any, parameter).__class__ = self.home.kinds.busy

    def begin_use(self) -> None:
        """Let it stay where it is until a touch is over. Under the lock."""
        if self.storage is None:
            self.at_home += 1
        else:
            self.touching += 1

    def note_change(self) -> None:
        """Note that its values may be changed where it is. Under the lock."""
        if self.storage is None:
            self.home.forget()
        else:
            self.dirty = True


class WeightTable:
    """All weights of a session, under one lock.

    Attributes:
        stays: The weights, by number.
        by_home: The same by their homes.
        by_storage: The same by what identifies the storage that they have in memory, or at rest.
        present: Those that are in memory.
        account: Account of the weights in memory.
        memory: Where weights are brought to, charged to ``account``.
        update_memory: Memory in which their gradients may wait; None: no limit.
        order: Order of their uses.
        leaving: Those that do not stay from their present or last use to the next, and leave when nobody
            uses them any more; in the order of use, the values are None.
        wake: Condition on the lock, which guards all of this; notified when a transfer or a use is over.
        guard: Knows whether this process is a forked child.
        total_bytes: Bytes of all weights that have a home.
        coming_bytes: Bytes of those whose reads are in flight.
        left: Names of weights that have left their homes.
    """

    def __init__(self, account: Account, memory: BroughtMemory) -> None:
        """Know no weight yet."""
        self.stays: list[Stay] = []
        self.by_home: dict[Home, Stay] = {}
        self.by_storage: dict[int, Stay] = {}
        self.account = account
        self.memory = memory
        self.update_memory: UpdateMemory | None = None
        self.order = UseOrder()
        self.present: set[Stay] = set()
        self.leaving: dict[Stay, None] = {}
        self.wake = condition()
        self.guard = fork_guard()
        self.total_bytes = 0
        self.coming_bytes = 0
        self.left: list[str] = []

    def add(self, homes: Sequence[Home], keeper: Keeper) -> None:
        """Let ``keeper`` keep the weights of these homes.

        They take the numbers of weights that the program has dropped, whose memory and places are freed:
        a state dict that is assigned again and again, say, takes no more of either each time.
        """
        dropped = []  # freed after the lock
        with self.wake:
            over = [stay for stay in self.stays if stay.is_over][: len(homes)] if homes else []
            before = len(self.stays)
            for home in homes:
                if over:
                    dropped.append(over.pop(0))
                    self._forget(dropped[-1])
                    stay = self.stays[dropped[-1].index] = Stay(dropped[-1].index, home)
                else:
                    stay = Stay(len(self.stays), home)
                    self.stays.append(stay)
                self.by_home[home] = stay
                if home.is_mapped:
                    self.by_storage[home.resting.untyped_storage()._cdata] = stay
                self.total_bytes += home.nbytes
                home.keeper = keeper
            if len(self.stays) > before:
                self.order.add(len(self.stays) - before)

    def _forget(self, stay: Stay) -> None:
        """Forget a weight that is over. Under the lock."""
        home = stay.home
        del self.by_home[home]
        self.leaving.pop(stay, None)
        self.give_up(stay)
        if home.is_mapped:
            self.by_storage.pop(home.resting.untyped_storage()._cdata, None)
        if not stay.has_left:
            self.total_bytes -= home.nbytes
        home.tier.discard(home.ticket)

    def begin_pass(self, kind: Hashable) -> None:
        """Begin a pass of a kind, as :meth:`UseOrder.begin` has it. Under the lock."""
        is_other = self.order.begin(kind)
        if is_other or self._limit_bytes != self.order.chosen_limit_bytes:
            self.choose_stays()

    @property
    def _limit_bytes(self) -> int:
        """The limit for which it is chosen what stays: not anew if it has grown by a little."""
        limit, chosen = self.account.limit_bytes, self.order.chosen_limit_bytes
        if chosen is None or limit < chosen or (limit - chosen) * LIMIT_SHARE > chosen:
            return limit
        return chosen

    def choose_stays(self) -> None:
        """Choose the weights that stay between their uses in the present kind of pass. Under the lock."""
        if not self.order.is_steady:
            return
        parameters = [stay.home.parameter for stay in self.stays]
        changed = [each is not None and each.requires_grad for each in parameters]
        sizes = [stay.home.nbytes for stay in self.stays]
        self.order.choose(sizes, changed, self._limit_bytes)
        for stay in self.stays:
            stay.stays = self.order.stays(stay.index)

    def note_use(self, stay: Stay) -> None:
        """Note that a weight is used now. Under the lock."""
        self.leaving.pop(stay, None)
        leaves = self.order.note(stay.index)
        stay.stays = self.order.stays(stay.index)
        if leaves:
            self.leaving[stay] = None

    def check_sizes(self, sizes: list[tuple[int, str]]) -> None:
        """Raise BudgetError if two weights do not fit in memory: their lengths and names."""
        sizes = sorted(sizes)
        least = sum(nbytes for nbytes, _ in sizes[-2:])
        limit = self.account.limit_bytes
        extend = self.account.extend
        if least <= limit or (extend is not None and extend(least - limit)):
            return
        largest = sizes[-1]
        raise BudgetError(
            f"weights in memory are limited to {format_bytes(limit)}, and the largest, {largest[1]}"
            f" ({format_bytes(largest[0])}), and the one after it need {format_bytes(least)}: give"
            f" weights_memory={least} at least",
            slot=largest[1],
            limit_bytes=limit,
            least_bytes=least,
        )

    def check_process(self, home: Home) -> None:
        """Raise ClosedError in a forked child: transfers, their threads and locks are the parent's."""
        if self.guard.in_child:
            raise self.guard.error(
                f"weight {home.name}, which has a home,", "give the child a copy of the model"
            )

    def stay_of(self, parameter: Parameter) -> Stay | None:
        """Return the weight that a parameter is; None if it is none of these."""
        home = home_of(parameter)
        return None if home is None else self.by_home.get(home)  # type: ignore[call-overload]

    def arrived(self, stay: Stay) -> BaseException | None:
        """Let a weight whose read is over be in memory, or return the error. Under the lock."""
        block, coming = stay.block, stay.coming
        assert block is not None
        assert coming is not None
        stay.block = stay.coming = None
        self.coming_bytes -= stay.home.nbytes
        if coming.error is not None:
            self.memory.drop(block)
            return stay.home.read_failure(coming.error)
        parameter = stay.home.parameter
        if parameter is None or stay.home.is_lent or not stay.home.is_as_read:
            self.memory.drop(block)  # it may have been changed at home meanwhile
            return None
        storage = self.memory.finish(block, stay.home)
        stay.storage = storage
        self.present.add(stay)
        stay.address = storage.data_ptr()
        stay.dirty = False
        if parameter is not None:
            kinds = stay.home.kinds
            kind = kinds.busy if stay.pins else kinds.resting
            show(parameter, view_like(storage, stay.home.layout), kind)
            stay.version = version_of(parameter)
        stay.own_uses = use_count(storage)
        stay.home.verify_again(stay.address)
        self.by_storage[storage._cdata] = stay
        return None

    def send_home(self, stay: Stay) -> None:
        """Free the memory of a weight that is as its home. Under the lock."""
        stay.stays = False
        self.give_up(stay)
        stay.home.rest()

    def give_up(self, stay: Stay) -> None:
        """Have the memory of a weight no more, if it is in memory; others may. Under the lock."""
        if stay.storage is not None:
            self.by_storage.pop(stay.storage._cdata, None)
            self.present.discard(stay)
            stay.storage = None

    def resting_moved(self, stay: Stay, before: Tensor) -> None:
        """Note that a weight may have another home than before. Under the lock."""
        if stay.home.resting is not before:
            self.by_storage.pop(before.untyped_storage()._cdata, None)
            self.by_storage[stay.home.resting.untyped_storage()._cdata] = stay

    def check_memory(self, stay: Stay) -> None:
        """Let a weight leave its home that has other memory, as ``set_`` gives it. Under the lock."""
        parameter, storage = stay.home.parameter, stay.storage
        if storage is None:
            storage = stay.home.resting.untyped_storage()
        if parameter is not None and not shares_storage(parameter, storage):
            self.leave_home(stay)

    def leave_home(self, stay: Stay) -> None:
        """Leave a weight to memory, and to those who have given it that memory. Under the lock."""
        name = stay.home.name
        if stay.storage is not None:
            self.give_up(stay)
            stay.at_home, stay.touching = stay.pins + stay.touching, 0
        self.by_storage.pop(stay.home.resting.untyped_storage()._cdata, None)
        stay.home.generation += 1
        stay.home.leave()
        stay.has_left = True
        self.left.append(name)
        self.total_bytes -= stay.home.nbytes
