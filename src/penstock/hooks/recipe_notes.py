"""Recipes of an observed pass: which saved storage pure modules make from which other one."""

from __future__ import annotations

import weakref

import torch

from penstock.hooks.pure_calls import PureCalls, PureOutput, StorageOf
from penstock.runtime.storage import SlotRecord, TensorRef


class RecipeNotes(PureCalls[str, SlotRecord]):
    """Writes recipes into the records of slots. For one thread."""

    def __init__(self, storage_of: StorageOf) -> None:
        """Start without records."""
        super().__init__(storage_of)
        self._records: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, SlotRecord]] = {}

    def packed(self, record: SlotRecord, tensor: torch.Tensor) -> None:
        """Record that a tensor is saved as the slot ``record``."""
        storage = self.storage_of(tensor)
        if storage is None:
            return
        self._records[storage._cdata] = TensorRef(storage), tensor._version, record
        made = self.made(storage, tensor._version)
        if made is not None:
            _write_recipe(record, made)

    def source_of(self, given: torch.Tensor, storage: torch.UntypedStorage) -> SlotRecord | None:
        """Return the slot as which ``given`` was saved."""
        return self._record(storage, given._version)

    def on_made(self, storage: torch.UntypedStorage, made: PureOutput[str, SlotRecord]) -> None:
        """Write the recipe of a storage that was saved during the call which made it."""
        record = self._record(storage, made.version)
        if record is not None:
            _write_recipe(record, made)

    def _record(self, storage: torch.UntypedStorage, version: int) -> SlotRecord | None:
        known = self._records.get(storage._cdata)
        if known is None or known[1] != version or known[0]() is not storage:
            return None
        return known[2]


def _write_recipe(record: SlotRecord, made: PureOutput[str, SlotRecord]) -> None:
    if record is not made.source:
        record.recipe, record.source = made.members, made.source
