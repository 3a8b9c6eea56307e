"""Restoring memory from a checkpoint that contains the same bytes, so that it need not be written.

Checkpoints are cheap on flash, so use them to save DRAM: that is the policy of "How to Exploit Flash
Memory for DNN Training". It makes suspending right after a checkpoint nearly free. The checkpoint's
checksums show which part of a state is unchanged, without reading the files. They are kept open, so that
the memory can be restored even if the checkpoint is removed meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from penstock.checkpoint import unchanged
from penstock.checkpoint.frames import Decoding
from penstock.checkpoint.manifest import TensorEntry
from penstock.checkpoint.reader import OpenCheckpoint
from penstock.checkpoint.regions import TargetRegion
from penstock.io.pages import PageRange
from penstock.swap.state import SuspendableStorage


class _Stored(NamedTuple):
    """Place of a storage's tensor in a checkpoint."""

    file: int
    offset: int
    begin: int
    """Offset of the storage's pages in the tensor."""
    encoded: TensorEntry | None


class Recall:
    """The part of a job's memory that a checkpoint contains.

    Attributes:
        held: The storages that it can restore.
    """

    def __init__(
        self, path: str | os.PathLike[str], state: object, held: Sequence[SuspendableStorage]
    ) -> None:
        """Compare a checkpoint with the memory, and keep its files open.

        Args:
            path: Path of the checkpoint.
            state: State that ``penstock.checkpoint.save`` received for it.
            held: Storages to suspend.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
            TransferError: It cannot be read.
        """
        self._places: dict[SuspendableStorage, _Stored] = {}
        self._opened = OpenCheckpoint(os.path.abspath(path))
        try:
            numbers = {each.name: i for i, each in enumerate(self._opened.manifest.files)}
            entries = {each.name: each for each in self._opened.manifest.tensors}
            owners = {each.storage._cdata: each for each in held}
            for place in unchanged(path, state):
                each = owners.get(place.tensor.untyped_storage()._cdata)
                if each is None or each.pages is None or not _covers(place.tensor, each.pages):
                    continue
                number = numbers[os.path.basename(place.path)]
                begin = each.pages.address - place.tensor.data_ptr()
                self._places[each] = _Stored(
                    number, place.offset_bytes, begin, entries[place.name] if place.codec else None
                )
            for stored in self._places.values():
                self._opened.file(stored.file)
        except BaseException:
            self._opened.close()
            raise

    @property
    def held(self) -> frozenset[SuspendableStorage]:
        """The storages that it can restore."""
        return frozenset(self._places)

    def place_of(self, held: SuspendableStorage) -> tuple[int, int]:
        """Return the number of the file and the offset in it, by which reads are in order."""
        stored = self._places[held]
        return stored.file, stored.offset + stored.begin

    def restore(self, held: SuspendableStorage) -> None:
        """Fill the storage's pages, which are open. It may be called again after an error.

        Raises:
            DamagedError: A block of the checkpoint is damaged.
            TransferError: The read failed.
        """
        assert held.pages is not None
        file, offset, begin, encoded = self._places[held]
        if encoded is None:
            region: TargetRegion = _Range(held.pages, held.pages.nbytes)
            offset += begin
        else:
            region = Decoding(encoded, _Range(held.pages, encoded.nbytes, begin))
        self._opened.read({file: [(offset, region)]}, keep_open=True)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._opened.close()


class _Range(TargetRegion):
    """A tensor's bytes, of which only those in some pages are written."""

    def __init__(self, pages: PageRange, nbytes: int, begin: int = 0) -> None:
        """Describe the range.

        Args:
            pages: Pages that are written.
            nbytes: Size of the tensor.
            begin: Offset of the pages in the tensor.
        """
        self.nbytes = nbytes
        self._pages = pages
        self._begin = begin

    def copy_in(self, start: int, stop: int, address: int) -> None:
        low = max(start, self._begin)
        high = min(stop, self._begin + self._pages.nbytes)
        if low < high:
            target = self._pages.address + low - self._begin
            ctypes.memmove(target, address + low - start, high - low)


def _covers(tensor: torch.Tensor, pages: PageRange) -> bool:
    """Return whether the pages lie within the tensor, and its bytes are in the order of the file."""
    end = tensor.data_ptr() + tensor.nbytes
    within = tensor.data_ptr() <= pages.address and pages.address + pages.nbytes <= end
    return within and tensor.is_contiguous()
