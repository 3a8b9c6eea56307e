"""Seam between weights that rest elsewhere than in memory and those who work with them.

A weight with a *home* has its bytes in a file and is in memory only while something works with it
(:mod:`penstock.weights`). An optimizer that updates it says so by ``hold`` and ``let_go``; autograd holds
a :class:`Reference` to it.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from penstock.core.locks import defer
from penstock.observe.clients import GRADIENTS, OPTIMIZER
from penstock.store.account import Account

FLYING_SHARE: Final = 32
"""Divisor of a limit of memory: that part is for gradients on their way out."""


_dtensor: type[Any] | None = None


def _find_dtensor() -> type[Any] | None:
    """Return torch's class of DTensors, without importing it; None if nobody has imported it yet."""
    global _dtensor  # noqa: PLW0603  (found once: its users are hot)
    _dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return _dtensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, without importing that class."""
    kind = _dtensor or _find_dtensor()
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: Tensor) -> Tensor:
    """Return the values that this process has: a DTensor's shard, any other tensor as it is."""
    kind = _dtensor or _find_dtensor()
    if kind is None or not isinstance(tensor, kind):
        return tensor
    local: Tensor = tensor._local_tensor
    return local


def use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


class Reference(ABC):
    """Handle of a saved tensor that holds no memory, because its bytes are elsewhere anyway."""

    __slots__ = ()

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the tensor as it was saved. Raises ``InPlaceError`` if it has changed."""


class RecordHolder(Protocol):
    """Holder of an optimizer's records that stay in memory as long as there is room. Thread-safe."""

    def give_way(self, nbytes: int) -> int:
        """Begin to free so many bytes, and do not wait; return the bytes that will be free."""


class UpdateMemory:
    """Memory that a session gives to updates of its weights. Thread-safe.

    Attributes:
        waiting: Account of gradients that wait in memory. Its limit is what is left to them.
        moving: Account of what cannot be left out: the gradient that is being made.
        records: Account of optimizer records that stay in memory. Its limit is what is left to them; it
            yields.
    """

    def __init__(self, parent: Account) -> None:
        """Give nothing yet of what ``parent`` accounts for."""
        self._parent = parent
        self.waiting = parent.child(GRADIENTS, 0)
        self.moving = parent.child(GRADIENTS)
        self.records = parent.child(OPTIMIZER, 0)
        self.records.yield_by(self._records_give_way)
        self._wanted: dict[int, tuple[int, int]] = {}  # bytes of all gradients, and of the longest
        self._holders: dict[int, tuple[weakref.ref[RecordHolder], int]] = {}

    def limit(self, nbytes: int, *, with_records: bool) -> int:
        """Divide what is left to gradients, and then to records; return the bytes that they can use."""
        gradients = max(0, min(nbytes, sum(each for each, _ in self._wanted.copy().values())))
        self.waiting.limit_bytes = gradients
        wanted = sum(each for _, each in self._holders.copy().values()) if with_records else 0
        self.records.limit_bytes = max(0, min(nbytes - gradients, wanted))
        return gradients + self.records.limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of gradients and records that have what is left."""
        return self.waiting.used_bytes + self.records.used_bytes

    @property
    def flying_bytes(self) -> int:
        """Most bytes that are to be on their way out at once, unless one gradient is longer."""
        return self._parent.limit_bytes // FLYING_SHARE

    def want(self, owner: object, sizes: Sequence[int]) -> None:
        """Note the lengths in bytes of the gradients that wait for ``owner``, while it is alive.

        May wait for memory for the longest of them, which others free.
        """
        key = id(owner)
        if key not in self._wanted:
            weakref.finalize(owner, self._wanted.pop, key, None).atexit = False
        self._wanted[key] = sum(sizes), max(sizes, default=0)
        longest = max(each for _, each in self._wanted.copy().values())
        missing = longest - self.moving.used_bytes
        if missing < 0:
            self.moving.free(-missing, GRADIENTS)
        if missing > 0:
            if self.moving.missing_elsewhere(missing):
                self.moving.make_room(missing)
            self.moving.force(missing, GRADIENTS)

    def keep(self, gradient: Tensor) -> bool:
        """Charge a gradient to ``waiting`` while its memory is in use; False if it does not fit."""
        nbytes = gradient.nbytes
        if not self.waiting.try_take(nbytes, GRADIENTS):
            return False
        storage = gradient.untyped_storage()
        weakref.finalize(storage, defer, self.waiting.free, nbytes, GRADIENTS).atexit = False
        return True

    def want_records(self, holder: RecordHolder, nbytes: int) -> None:
        """Note the bytes of records that ``holder`` would have stay, while it is alive."""
        key = id(holder)
        if key not in self._holders:
            weakref.finalize(holder, self._holders.pop, key, None).atexit = False
        self._holders[key] = weakref.ref(holder), nbytes

    def _records_give_way(self, nbytes: int) -> None:
        nbytes = max(nbytes, self.records.owed_bytes)  # of several who wait
        for reference, _ in self._holders.copy().values():
            holder = reference()
            if nbytes <= 0:
                break
            nbytes -= 0 if holder is None else holder.give_way(nbytes)

    def close(self) -> None:
        """Give nothing any more. Idempotent."""
        self._records_give_way(self.records.used_bytes)
        for account in (self.waiting, self.moving, self.records):
            account.close()


class HomedWeight(Protocol):
    """A parameter that has a home. Thread-safe."""

    @property
    def is_mapped(self) -> bool:
        """True if its home has an address; else it can only be worked with where it is brought."""

    @property
    def is_in_memory(self) -> bool:
        """True if the values rest in host memory, and not in a file."""

    @property
    def directory(self) -> str:
        """The directory of its home; ``""`` if that is in host memory."""

    def mapped(self) -> Tensor | None:
        """Return the values in host memory, mapped; ``None`` while those on a device are newer.

        May wait for a write. What is mapped changes with the parameter: read it before the next update.
        """

    @property
    def memory_bytes(self) -> int | None:
        """Most bytes that it and the other weights with a home may take in memory; None: no limit."""

    @property
    def update_memory(self) -> UpdateMemory | None:
        """Memory for its gradient and records; None: gradients have no limit, and no records stay."""

    @property
    def streamed_bytes(self) -> int | None:
        """The same of those alone that do not stay between steps; ``None`` also if this one does."""

    def hold(self) -> None:
        """Bring it to memory, where it may be changed and stays until ``let_go``; may wait for a read.

        Raises:
            TransferError: It cannot be read.
            ChecksumError: It is not what was written.
        """

    def let_go(self, *, changed: bool) -> None:
        """End a ``hold``; it is written home, now or later, if its values have ``changed``."""


_homes: Final[dict[int, tuple[weakref.ref[Tensor], HomedWeight]]] = {}
"""Homes of parameters that are alive, by ``id``: torch's own table is slower, and this one is hot."""


def home_of(tensor: Tensor) -> HomedWeight | None:
    """Return the home of a parameter; ``None`` if its only place is memory."""
    found = _homes.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None


def settle(tensor: Tensor, home: HomedWeight) -> None:
    """Note the home of a parameter for as long as that is alive."""
    key = id(tensor)

    def forget(reference: weakref.ref[Tensor]) -> None:
        found = _homes.get(key)
        if found is not None and found[0] is reference:
            del _homes[key]

    _homes[key] = weakref.ref(tensor, forget), home


def move_out(tensor: Tensor) -> None:
    """Note that a parameter has no home any more; memory is its only place."""
    if home_of(tensor) is not None:
        _homes.pop(id(tensor), None)


class WithoutMemory(Tensor):
    """Tensor of a state dict that has its values brought when it is worked with.

    Nobody should ask for its address, or that of the parameter: that would bring it, for good.

    Attributes:
        parameter: The parameter whose values it has.
        home: The home of the parameter when the state dict was made.
    """

    parameter: Tensor
    home: HomedWeight


class HostValues:
    """Values of tensors, those of weights that a device works with in host memory, and each once."""

    def __init__(self) -> None:
        """Know none yet."""
        self._known: dict[int, tuple[HomedWeight, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return a tensor itself, or the values of one without memory; tied ones are one tensor.

        Raises:
            InPlaceError: The parameter was replaced since the state dict was made.
            TransferError: What is newer on a device cannot be brought.
        """
        if not isinstance(tensor, WithoutMemory):
            return tensor
        home = tensor.home
        if id(home) not in self._known:
            mapped = home.mapped() if home_of(tensor.parameter) is home else None
            self._known[id(home)] = home, tensor.cpu() if mapped is None else mapped
        return self._known[id(home)][1]


def has_address(tensor: Tensor) -> bool:
    """Return whether a tensor is in memory or mapped: not a weight that rests for a device."""
    home = home_of(tensor)
    return not isinstance(tensor, WithoutMemory) and (home is None or home.is_mapped)


class WeightHolder(Protocol):
    """Holder of weights that works with them in threads of its own. Thread-safe."""

    def pause(self) -> None:
        """Wait until no thread works with a weight, let go of all; let none begin until ``resume``."""

    def resume(self) -> None:
        """Let the threads go on."""


_holders: Final[weakref.WeakSet[WeightHolder]] = weakref.WeakSet()


def add_holder(holder: WeightHolder) -> None:
    """Note a holder for as long as it is alive."""
    _holders.add(holder)


@contextmanager
def paused_holders() -> Iterator[None]:
    """Let no thread of an optimizer work with any weight while weights get a home, or lose theirs."""
    with ExitStack() as resumed:
        for holder in tuple(_holders):
            resumed.callback(holder.resume)
            holder.pause()
        yield
