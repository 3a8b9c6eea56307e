"""Finds recipes in an observed pass: which saved storage is made from which, by which pure modules."""

from __future__ import annotations

import weakref

import torch

from penstock.hooks.pure_calls import Made, PureCalls, StorageOf
from penstock.runtime.residency import SlotRecord
from penstock.runtime.weak import TensorRef


class RecipeNotes(PureCalls[str, SlotRecord]):
    """Tells the records of slots their recipes. In one thread."""

    def __init__(self, storage_of: StorageOf) -> None:
        """Nothing is saved yet."""
        super().__init__(storage_of)
        self._records: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, SlotRecord]] = {}

    def packed(self, record: SlotRecord, tensor: torch.Tensor) -> None:
        """A tensor is saved, as the slot ``record``."""
        storage = self.storage_of(tensor)
        if storage is None:
            return
        self._records[storage._cdata] = TensorRef(storage), tensor._version, record
        made = self.made(storage, tensor._version)
        if made is not None:
            _tell(record, made)

    def source_of(self, given: torch.Tensor, storage: torch.UntypedStorage) -> SlotRecord | None:
        """The slot that ``given`` was saved as."""
        return self._record(storage, given._version)

    def on_made(self, storage: torch.UntypedStorage, made: Made[str, SlotRecord]) -> None:
        """Its maker may have saved it, while it ran."""
        record = self._record(storage, made.version)
        if record is not None:
            _tell(record, made)

    def _record(self, storage: torch.UntypedStorage, version: int) -> SlotRecord | None:
        known = self._records.get(storage._cdata)
        if known is None or known[1] != version or known[0]() is not storage:
            return None
        return known[2]


def _tell(record: SlotRecord, made: Made[str, SlotRecord]) -> None:
    if record is not made.source:
        record.recipe, record.source = made.members, made.source
