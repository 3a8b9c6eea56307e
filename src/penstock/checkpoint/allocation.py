"""Memory for new tensors of a loaded checkpoint.

It is in huge pages, which are faster for the device and the optimizer; or in an unlinked mapped file, for
states that are on their way to flash and need not fit in memory.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.checkpoint.manifest import TensorEntry
from penstock.checkpoint.values import DTYPES
from penstock.core.units import MIB, round_up
from penstock.io.files import open_unlinked_buffered
from penstock.io.mapping import PAGE_BYTES, Mapping
from penstock.io.pages import PageRange

_CHUNK_BYTES: Final = 64 * MIB
"""Length of mappings that tensors share, which live as long as any of those."""
_ALIGNMENT_BYTES: Final = 64
_LARGE_BYTES: Final = MIB
"""Torch allocates smaller tensors."""


class Fresh:
    """Allocator of tensors, whose memory is not resident until it is written to.

    Attributes:
        pages: Memory of the tensors, oldest first; it lives as long as they do.
    """

    def __init__(self, directory: str | None = None) -> None:
        """Allocate nothing yet.

        Args:
            directory: Directory for an unlinked file; None to allocate memory.
        """
        self.pages: list[PageRange] = []
        self._directory = directory
        self._chunk_bytes = 0
        self._left: NDArray[np.uint8] = np.empty(0, np.uint8)

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return a tensor for an owner's entry. Raises TransferError if there is no memory."""
        dtype = DTYPES[entry.dtype].dtype
        if entry.nbytes < _LARGE_BYTES:
            if entry.strides is None:
                return torch.empty(entry.shape, dtype=dtype)
            return torch.empty_strided(entry.shape, entry.strides, dtype=dtype)
        flat = torch.from_numpy(self._take(entry.nbytes)).view(dtype)
        strides = _contiguous(entry.shape) if entry.strides is None else entry.strides
        return flat.as_strided(entry.shape, strides)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        taken = round_up(nbytes, _ALIGNMENT_BYTES)
        if taken > self._left.nbytes:
            self._chunk_bytes = round_up(max(taken, _CHUNK_BYTES), PAGE_BYTES)
            self._left = self._chunk(self._chunk_bytes)
        memory, self._left = self._left[:nbytes], self._left[taken:]
        if self.pages:
            used = self._chunk_bytes - self._left.nbytes
            self.pages[-1] = PageRange(self.pages[-1].address, round_up(used, PAGE_BYTES))
        return memory

    def _chunk(self, nbytes: int) -> Any:
        if self._directory is not None:
            return _mapped_file(self._directory, nbytes)
        mapping = Mapping(nbytes)
        memory = mapping.array(0, nbytes)
        self.pages.append(PageRange(mapping.address, 0))
        weakref.finalize(memory, _let_go, mapping).atexit = False
        return memory


def _let_go(_: Mapping) -> None:
    """The registry of finalizers has kept the mapping until now."""


def _mapped_file(directory: str, nbytes: int) -> Any:
    file = open_unlinked_buffered(directory)
    try:
        file.preallocate(nbytes)
        return np.frombuffer(mmap.mmap(file.fd, nbytes), np.uint8)
    finally:
        file.close()


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
