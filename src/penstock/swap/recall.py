"""Memory that a checkpoint has, byte for byte: it goes without being written, and comes from there.

Checkpoints are cheap on flash, so spend them to save DRAM: that is the policy of "How to Exploit Flash
Memory for DNN Training", and a suspend right after a checkpoint is nearly free by it. What of a state is
still the same is told by the checkpoint's own checksums, without reading the files. They are kept open,
so that it can be brought back even if the checkpoint is removed meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import torch

from penstock.checkpoint import unchanged
from penstock.checkpoint.frames import Decoding
from penstock.checkpoint.manifest import TensorEntry
from penstock.checkpoint.moves import Region
from penstock.checkpoint.reading import Opened
from penstock.io.pages import Pages
from penstock.swap.state import Held


class Recall:
    """What a checkpoint has of a job's memory.

    Attributes:
        held: Those storages.
    """

    def __init__(self, path: str | os.PathLike[str], state: object, held: Sequence[Held]) -> None:
        """Find out, and keep the files open.

        Args:
            path: The checkpoint.
            state: What ``penstock.checkpoint.save`` was given for it.
            held: What is to go.

        Raises:
            CheckpointError: There is none, or it is damaged.
            TransferError: It cannot be read.
        """
        self._places: dict[Held, tuple[int, int]] = {}
        self._encoded: dict[Held, tuple[TensorEntry, int]] = {}
        self._opened = Opened(os.path.abspath(path))
        try:
            numbers = {each.name: i for i, each in enumerate(self._opened.manifest.files)}
            entries = {each.name: each for each in self._opened.manifest.tensors}
            owners = {each.storage._cdata: each for each in held}
            for place in unchanged(path, state):
                each = owners.get(place.tensor.untyped_storage()._cdata)
                if (
                    each is not None
                    and each.pages is not None
                    and _covers(place.tensor, each.pages)
                ):
                    begin = each.pages.address - place.tensor.data_ptr()
                    number = numbers[os.path.basename(place.path)]
                    if place.codec:
                        self._places[each] = number, place.offset_bytes
                        self._encoded[each] = entries[place.name], begin
                    else:
                        self._places[each] = number, place.offset_bytes + begin
            for number in {number for number, _ in self._places.values()}:
                self._opened.file(number)
        except BaseException:
            self._opened.close()
            raise

    @property
    def held(self) -> frozenset[Held]:
        """The storages that it can bring back."""
        return frozenset(self._places)

    def place_of(self, held: Held) -> tuple[int, int]:
        """The number of its file, and where in it its pages begin, or the frames that they are in."""
        return self._places[held]

    def bring_back(self, held: Held) -> None:
        """Fill its pages, which are open. What could not be read can be tried again.

        Raises:
            DamagedError: A block of the checkpoint is not what was written.
            TransferError: The device refuses.
        """
        assert held.pages is not None
        number, offset = self._places[held]
        region: Region = _Range(held.pages, held.pages.nbytes)
        if held in self._encoded:
            entry, begin = self._encoded[held]
            region = Decoding(entry, _Range(held.pages, entry.nbytes, begin))
        self._opened.read({number: [(offset, region)]}, keep_open=True)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._opened.close()


class _Range(Region):
    """A tensor's bytes, of which only those in some pages are set."""

    def __init__(self, pages: Pages, nbytes: int, begin: int = 0) -> None:
        """Touch nothing.

        Args:
            pages: What is set.
            nbytes: Of the tensor.
            begin: Where in the tensor the pages begin.
        """
        self.nbytes = nbytes
        self._pages = pages
        self._begin = begin

    def copy_out(self, start: int, stop: int, address: int) -> None:
        raise AssertionError("what is brought back is not read from")

    def copy_in(self, start: int, stop: int, address: int) -> None:
        low = max(start, self._begin)
        high = min(stop, self._begin + self._pages.nbytes)
        if low < high:
            target = self._pages.address + low - self._begin
            ctypes.memmove(target, address + low - start, high - low)


def _covers(tensor: torch.Tensor, pages: Pages) -> bool:
    """Whether the pages lie within what the tensor is, in the order of its file."""
    end = tensor.data_ptr() + tensor.nbytes
    within = tensor.data_ptr() <= pages.address and pages.address + pages.nbytes <= end
    return within and tensor.is_contiguous()
