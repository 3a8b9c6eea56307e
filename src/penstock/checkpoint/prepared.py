"""A state that is about to be saved: what of it goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.checkpoint.leaves import Leaf, collect
from penstock.checkpoint.manifest import TensorEntry
from penstock.checkpoint.moves import await_devices
from penstock.checkpoint.packing import FILE_BYTES, FilePlan, pack
from penstock.checkpoint.parts import frozen_in, plain_state
from penstock.checkpoint.values import Json


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A state that is about to be saved: what goes where.

    Attributes:
        document: What is no tensor.
        leaves: The tensors.
        plans: Files.
        entries: What the manifest says of the tensors.
    """

    document: Json
    leaves: Sequence[Leaf]
    plans: Sequence[FilePlan]
    entries: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(each.nbytes for each in self.plans)


def prepare(
    state: object, *, private: list[Any] | None = None, file_bytes: int = FILE_BYTES
) -> Prepared:
    """Say what of a state goes where.

    Args:
        state: It.
        private: Where parts are added that were made for the occasion.
        file_bytes: A file is closed once it is as long as this.

    Raises:
        CheckpointError: Something has no form in a checkpoint.
    """
    plain = plain_state(state, [] if private is None else private)
    document, leaves = collect(plain, frozenset(each.data_ptr() for each in frozen_in(state)))
    await_devices(each.tensor.device for each in leaves)
    plans, entries = pack(leaves, file_bytes=file_bytes)
    return Prepared(document, leaves, plans, entries)
