"""Account of every byte that is alive in a step, over time, storage by storage."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter

import torch

from penstock.observe.clock import Clock
from penstock.plan.profile import Transient
from penstock.runtime.storage import TensorRef


@dataclass(slots=True, eq=False)
class StorageEntry:
    """A storage that is or was alive."""

    number: int
    nbytes: int
    """Counted bytes; 0 for a storage that is always there."""
    source: weakref.ref[torch.UntypedStorage]
    slots: int = 0
    """Number of slots in which the storage is counted now."""


class StorageLedger:
    """Storages of one step. A reused address is another storage (TRAPS rule 5)."""

    def __init__(self, clock: Clock, fixed: Iterable[torch.Tensor]) -> None:
        """Register the fixed storages, which are not counted.

        Args:
            clock: Clock of the step.
            fixed: Parameters and buffers.
        """
        self._clock = clock
        self._alive: dict[int, StorageEntry] = {}
        self._changes: list[tuple[int, int, int]] = []
        self._count = 0
        for tensor in fixed:
            if self.find(tensor.untyped_storage()) is None:
                self._enter(tensor.untyped_storage(), nbytes=0)

    def add(self, tensor: torch.Tensor, *, at_ns: int) -> None:
        """Register a new storage; do nothing if it is known and the tensor is a view of it."""
        storage = tensor.untyped_storage()
        if self.find(storage) is None:
            entry = self._enter(storage, storage.nbytes())
            self._changes.append((at_ns, entry.number, entry.nbytes))

    def find(self, storage: torch.UntypedStorage) -> StorageEntry | None:
        """Return the entry of a storage."""
        entry = self._alive.get(storage._cdata)
        return entry if entry is not None and entry.source() is storage else None

    def enter_slot(self, entry: StorageEntry) -> None:
        """Count the storage as a slot from now on."""
        entry.slots += 1
        if entry.slots == 1:
            self._change(entry, -entry.nbytes)

    def leave_slot(self, entry: StorageEntry) -> None:
        """Stop counting the storage as a slot; it may live on."""
        entry.slots -= 1
        if not entry.slots and entry.source() is not None:
            self._change(entry, entry.nbytes)

    def timeline(self, *, without: Collection[torch.Tensor]) -> tuple[Transient, ...]:
        """Return the bytes alive in storages that are in no slot, at each change.

        Args:
            without: Tensors whose storages count as fixed: gradients that stay after the step.
        """
        kept = (self.find(one.untyped_storage()) for one in without)
        stay = {entry.number for entry in kept if entry is not None}
        changes = (change for change in self._changes if change[1] not in stay)
        alive = 0
        found: list[Transient] = []
        for at_ns, group in groupby(sorted(changes, key=itemgetter(0)), key=itemgetter(0)):
            before, alive = alive, alive + sum(delta for _, _, delta in group)
            if alive != before:
                found.append(Transient(at_ns, alive))
        return tuple(found)

    def _enter(self, storage: torch.UntypedStorage, nbytes: int) -> StorageEntry:
        self._count += 1
        cdata, number = storage._cdata, self._count
        source = TensorRef(storage, partial(self._on_death, cdata, number))
        entry = self._alive[cdata] = StorageEntry(number, nbytes, source)
        return entry

    def _on_death(self, cdata: int, number: int, _: object) -> None:
        entry = self._alive.get(cdata)
        if entry is None or entry.number != number:
            return
        del self._alive[cdata]
        if not entry.slots:
            self._change(entry, -entry.nbytes)

    def _change(self, entry: StorageEntry, delta: int) -> None:
        self._changes.append((self._clock.now_ns(), entry.number, delta))
