"""Tracker of the calls of pure modules: which storage they made from which other storage.

A storage counts as made by its observed calls only at the version that its tensor had when they ended.
A later change, such as ``out += identity``, ends its recipe; see [Note: recipes] (plan/recipes.py).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from penstock.runtime.storage import TensorRef

StorageOf = Callable[[torch.Tensor], torch.UntypedStorage | None]
Member = TypeVar("Member")
Source = TypeVar("Source")


@dataclass(slots=True)
class PureOutput(Generic[Member, Source]):
    """A storage at its version at the end of a call, and the calls that made it."""

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    members: tuple[Member, ...]
    source: Source
    """Source of the input of the first member."""

    def holds(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Return whether ``storage`` at ``version`` is the storage that was made."""
        return self.version == version and self.storage() is storage


@dataclass(slots=True)
class _Open:
    """A call that has not ended."""

    given: torch.Tensor
    version: int


class PureCalls(ABC, Generic[Member, Source]):
    """Tracker of one thread. Subclasses define what members and sources are."""

    def __init__(self, storage_of: StorageOf) -> None:
        """Start without calls; ``storage_of`` returns a tensor's storage if it is just bytes of one."""
        self.storage_of = storage_of
        self._open: list[_Open | None] = []
        self._made: dict[int, PureOutput[Member, Source]] = {}

    @abstractmethod
    def source_of(self, given: torch.Tensor, storage: torch.UntypedStorage) -> Source | None:
        """Return how to obtain ``given`` again, or ``None`` if that is not certain."""

    @abstractmethod
    def on_made(self, storage: torch.UntypedStorage, made: PureOutput[Member, Source]) -> None:
        """Handle a storage that a call has made or changed in place."""

    @property
    def under_way(self) -> bool:
        """True while a call has begun and not ended."""
        return bool(self._open)

    def enter(self, args: Any, *, pure: bool) -> None:
        """Handle the beginning of a call; ``pure`` says whether its module is."""
        given = args[0] if pure and len(args) == 1 and _is_plain(args[0]) else None
        self._open.append(None if given is None else _Open(given, given._version))

    def leave(self, output: Any, member: Callable[[], Member], *, refused: bool) -> None:
        """Handle the end of the call that began last.

        Args:
            output: What it returned; ``None`` if it raised.
            member: Factory of the record from which the call can be repeated.
            refused: The call must not be repeated: it had more arguments, or did something else too.
        """
        call = self._open.pop()
        if call is None or refused or not _is_plain(output):
            return
        before, after = self.storage_of(call.given), self.storage_of(output)
        if before is None or after is None:
            return
        if after is not before:
            if call.given._version == call.version and _fills(output, after):
                source = self.source_of(call.given, before)
                if source is not None:
                    self._add(after, output._version, (member(),), source)
            return
        made = self.made(before, call.version)
        if made is not None and output._version != call.version:
            self._add(after, output._version, (*made.members, member()), made.source)

    def made(
        self, storage: torch.UntypedStorage, version: int
    ) -> PureOutput[Member, Source] | None:
        """Return how a storage was made at this version, or ``None`` if that is not known."""
        made = self._made.get(storage._cdata)
        return made if made is not None and made.holds(storage, version) else None

    def being_changed(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the running call received ``storage`` at a version whose making is known."""
        call = self._open[-1] if self._open else None
        if call is None or self.storage_of(call.given) is not storage:
            return False
        return self.made(storage, call.version) is not None

    def _add(
        self,
        storage: torch.UntypedStorage,
        version: int,
        members: tuple[Member, ...],
        source: Source,
    ) -> None:
        forget = partial(_forget, weakref.ref(self), storage._cdata)
        made = PureOutput(TensorRef(storage, forget), version, members, source)
        self._made[storage._cdata] = made
        self.on_made(storage, made)

    def _forget(self, key: int, dead: object) -> None:
        made = self._made.get(key)
        if made is not None and made.storage is dead:
            del self._made[key]


def _forget(owner: weakref.ref[PureCalls[Any, Any]], key: int, dead: object) -> None:
    calls = owner()
    if calls is not None:
        calls._forget(key, dead)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _fills(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Return whether the tensor fills its storage, so that recomputing it restores the storage."""
    nbytes = tensor.numel() * tensor.element_size()
    return tensor.storage_offset() == 0 and nbytes == storage.nbytes()
