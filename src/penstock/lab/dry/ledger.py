"""Every byte that is alive in a step, over time: each storage from its making to its death."""

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
from penstock.runtime.weak import TensorRef


@dataclass(slots=True, eq=False)
class Entry:
    """A storage that is alive, or was."""

    number: int
    nbytes: int
    """0: it is not counted."""
    source: weakref.ref[torch.UntypedStorage]
    slots: int = 0
    """How many slots it is counted in at the moment."""


class Ledger:
    """Knows the storages of one step. A reused address is another storage (TRAPS rule 5)."""

    def __init__(self, clock: Clock, fixed: Iterable[torch.Tensor]) -> None:
        """Know of what is there all the time, which is not counted.

        Args:
            clock: Says when.
            fixed: Parameters and buffers.
        """
        self._clock = clock
        self._alive: dict[int, Entry] = {}
        self._changes: list[tuple[int, int, int]] = []
        self._count = 0
        for tensor in fixed:
            if self.find(tensor.untyped_storage()) is None:
                self._enter(tensor.untyped_storage(), nbytes=0)

    def add(self, tensor: torch.Tensor, *, at_ns: int) -> None:
        """A storage begins to live, unless it is known: the tensor is a view of another one's."""
        storage = tensor.untyped_storage()
        if self.find(storage) is None:
            entry = self._enter(storage, storage.nbytes())
            self._changes.append((at_ns, entry.number, entry.nbytes))

    def find(self, storage: torch.UntypedStorage) -> Entry | None:
        """Return what is known of a storage."""
        entry = self._alive.get(storage._cdata)
        return entry if entry is not None and entry.source() is storage else None

    def into_slot(self, entry: Entry) -> None:
        """The storage is counted as a slot from now on."""
        entry.slots += 1
        if entry.slots == 1:
            self._change(entry, -entry.nbytes)

    def out_of_slot(self, entry: Entry) -> None:
        """Autograd is done with a slot of the storage, which may live on."""
        entry.slots -= 1
        if not entry.slots and entry.source() is not None:
            self._change(entry, entry.nbytes)

    def timeline(self, *, without: Collection[torch.Tensor]) -> tuple[Transient, ...]:
        """Bytes alive in storages that are in no slot, whenever they change.

        Args:
            without: Tensors whose storages count as fixed: gradients that have come to stay.
        """
        kept = (self.find(one.untyped_storage()) for one in without)
        stay = {entry.number for entry in kept if entry is not None}
        changes = (change for change in self._changes if change[1] not in stay)
        alive = 0
        found: list[Transient] = []
        for at_ns, together in groupby(sorted(changes, key=itemgetter(0)), key=itemgetter(0)):
            before, alive = alive, alive + sum(delta for _, _, delta in together)
            if alive != before:
                found.append(Transient(at_ns, alive))
        return tuple(found)

    def _enter(self, storage: torch.UntypedStorage, nbytes: int) -> Entry:
        self._count += 1
        cdata, number = storage._cdata, self._count
        source = TensorRef(storage, partial(self._died, cdata, number))
        entry = self._alive[cdata] = Entry(number, nbytes, source)
        return entry

    def _died(self, cdata: int, number: int, _: object) -> None:
        entry = self._alive.get(cdata)
        if entry is None or entry.number != number:
            return
        del self._alive[cdata]
        if not entry.slots:
            self._change(entry, -entry.nbytes)

    def _change(self, entry: Entry, delta: int) -> None:
        self._changes.append((self._clock.now_ns(), entry.number, delta))
