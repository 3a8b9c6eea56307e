"""Gradients on flash, and the memory that they return to."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import TransferError
from penstock.core.locks import Lock
from penstock.core.units import MIB, round_up
from penstock.homed import use_count
from penstock.io.engine import Engine, Transfer
from penstock.io.pages import forget_contents, whole_pages
from penstock.observe.clients import GRADIENTS, ClientRecorder
from penstock.optim.offloaded_gradient import discard_all
from penstock.optim.params import Param, ParameterPiece, Tile
from penstock.staging import copy_across, ready_event
from penstock.store.arena import Arena
from penstock.store.base import Ticket
from penstock.store.flash import FlashTier

TILES_AHEAD: Final = 4
"""Tiles whose gradients are on their way back, or there, besides those that are updated."""
_MAPPED_BYTES: Final = 32 * MIB
"""glibc maps memory of this length, or more, by itself, and returns it to the system when it is freed,
unless it was set to do otherwise."""
_MALLOC_SETTINGS: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")
FLYING_BYTES: Final = 64 * MIB
"""Most bytes of gradients on their way out: their memory is not free yet."""


class GradientRead:
    """A piece of a gradient that is being read.

    Attributes:
        transfer: Ends when the bytes are in memory.
    """

    def __init__(self, memory: NDArray[np.uint8], ticket: Ticket, transfer: Transfer) -> None:
        """Describe a read to ``memory``, which is as long as the ticket's window."""
        self._memory = memory
        self._ticket = ticket
        self.transfer = transfer

    def wait(self, dtype: torch.dtype) -> Tensor:
        """Return the elements. Raises TransferError or ChecksumError with the gradient's name."""
        try:
            self.transfer.wait()
        except TransferError as error:
            raise TransferError(
                errno=error.errno or errno.EIO,
                op=error.op,
                path=error.path,
                offset_bytes=error.offset_bytes,
                nbytes=error.nbytes,
                moved_bytes=error.moved_bytes,
                free_bytes=error.free_bytes,
                advice=f"{self._ticket.label} is lost; redo forward and backward of this step",
            ) from error
        start = self._ticket.window.skew
        return torch.from_numpy(self._memory[start : start + self._ticket.nbytes]).view(dtype)


class LeftMemory:
    """Memory that a gradient has left, whose pages are freed once nothing else uses it. Thread-safe.

    glibc would keep them, although a gradient of the same length does not fit there: aligned memory needs
    more bytes around it, which are not free. To trim the whole heap costs new pages for all that is free
    for a moment. FSDP2 cuts the gradients of a block from one piece of memory, and torch holds a gradient
    while it calls hooks, so what is in use when a gradient leaves is looked at again with the next one.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._lock = Lock()
        self._storage: torch.UntypedStorage | None = None

    def add(self, gradient: Tensor) -> None:
        """Take a gradient's memory, in place of that which another has left."""
        is_plain = type(gradient) is Tensor  # one that wraps another has no memory of its own
        is_kept = is_plain and _is_kept_by_malloc(gradient.untyped_storage())
        with self._lock:
            self._storage = gradient.untyped_storage() if is_kept else None

    def free(self) -> None:
        """Free the pages unless something else uses them."""
        with self._lock:
            storage, self._storage = self._storage, None
        if storage is None:
            return
        if _references(storage) == _ALONE:
            forget_contents(whole_pages(storage.data_ptr(), storage.nbytes()))
            return
        with self._lock:
            self._storage = self._storage or storage

    def drop(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._storage = None


def _is_kept_by_malloc(storage: torch.UntypedStorage) -> bool:
    """Return whether glibc keeps the pages when it is freed, and nobody else knows them.

    Memory that is not torch's own, as NumPy's, may have users that do not count, and a device may know
    the pages of pinned memory.
    """
    if storage.device.type != "cpu" or not storage.resizable() or storage.is_pinned():
        return False
    return storage.nbytes() < _MAPPED_BYTES or any(each in os.environ for each in _MALLOC_SETTINGS)


def _references(storage: torch.UntypedStorage) -> tuple[int, int, int]:
    """Return how many torch has, and Python, whose references are one of torch's together.

    Torch's are counted again at the end: another thread may make a tensor of one of Python's meanwhile.
    """
    before = use_count(storage)
    of_python = sys.getrefcount(storage) + weakref.getweakrefcount(storage)
    return before, of_python, use_count(storage)


def _references_alone() -> tuple[int, int, int]:
    """Return how many there are if one variable of the caller is all that refers to a storage."""
    storage = torch.empty(0).untyped_storage()
    return _references(storage)


_ALONE: Final = _references_alone()


class GradientSpill:
    """Gradients on flash, in the pieces that tiles have of them. Thread-safe.

    Files and memory are made for the first of them: a run whose gradients fit takes no space.
    """

    def __init__(
        self,
        params: Sequence[Param],
        tiles: Sequence[Tile],
        *,
        directories: Sequence[str],
        engine: Engine,
        allow_memory_filesystem: bool,
    ) -> None:
        """See ``Gradients``."""
        self._params = params
        self._tiles = tiles
        self._directories = directories
        self._engine = engine
        self._allow_memory_filesystem = allow_memory_filesystem
        self._lock = Lock()
        self._pieces: dict[int, list[ParameterPiece]] = {}  # by parameter, of the first tiles
        self._known_tiles = 0
        self._tier: FlashTier | None = None
        self._arena: Arena | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes on flash, or on their way there."""
        return 0 if self._tier is None else self._tier.held_bytes

    def pieces(self, param: int) -> list[ParameterPiece]:
        """Return the parts that tiles have of a parameter, in order."""
        if self._known_tiles != len(self._tiles):
            with self._lock:
                for tile in self._tiles[self._known_tiles :]:
                    for piece in tile.pieces:
                        self._pieces.setdefault(piece.param, []).append(piece)
                self._known_tiles = len(self._tiles)
        return self._pieces[param]

    def replace_engine(self, engine: Engine) -> None:
        """Use another engine from now on."""
        with self._lock:
            self._engine = engine
            if self._tier is not None:
                self._tier.engine = engine

    def open(self) -> FlashTier:
        """Return the tier. Raises TransferError, or NoSpaceError if not all gradients would fit."""
        with self._lock:
            if self._tier is None:
                # a piece may begin and end inside a page; what is given up may still be on its way
                needed = 2 * FLYING_BYTES
                needed += sum(each.count * each.tensor.element_size() for each in self._params)
                needed += sum(8192 * len(tile.pieces) for tile in self._tiles)
                self._tier = FlashTier(
                    self._directories,
                    capacity_bytes=needed,
                    engine=self._engine,
                    recorder=ClientRecorder(self._directories[0]),
                    name=GRADIENTS,
                    allow_memory_filesystem=self._allow_memory_filesystem,
                )
            if self._arena is None:
                longest = max(each.count * each.tensor.element_size() for each in self._params)
                tile = max(tile.elements for tile in self._tiles)
                room = 2 * TILES_AHEAD * (round_up(4 * tile, MIB) + MIB)
                self._arena = Arena(room + FLYING_BYTES + 2 * longest, owner="gradients")
            return self._tier

    def take(self, flat: Tensor) -> Tensor:
        """Return a gradient's values outside the heap, which would be fragmented otherwise.

        They are copied unless they are there already. Raises as ``open``.
        """
        self.open()
        assert self._arena is not None
        first = self._arena.address
        if flat.device.type == "cpu" and 0 <= flat.data_ptr() - first < self._arena.capacity_bytes:
            return flat
        return copy_across(flat, self.empty(flat.numel(), flat.dtype), ready_event(flat.device))

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory for a gradient."""
        return torch.from_numpy(self._memory(elements * dtype.itemsize)).view(dtype)

    def write(self, param: Param, flat: Tensor) -> list[Ticket]:
        """Begin to write what ``take`` returned; return a ticket for each piece. Raises as ``open``."""
        tier = self.open()
        tickets: list[Ticket] = []
        try:
            for piece in self.pieces(param.index):
                part = flat[piece.start : piece.stop]
                what = f"elements {piece.start} to {piece.stop} of the gradient of parameter"
                tickets.append(
                    tier.write(
                        part.data_ptr(),
                        part.nbytes,
                        keep_alive=flat,
                        label=f"{what} {param.name}",
                    )
                )
        except BaseException:
            discard_all(tier, tickets)
            raise
        return tickets

    def begin_read(self, tickets: Sequence[Ticket], piece: ParameterPiece) -> GradientRead:
        """Begin to read a piece that ``write`` wrote. Waits for memory, so it is called without locks."""
        ticket = tickets[self.pieces(piece.param).index(piece)]
        return self._begin_read(ticket, self._memory(ticket.window.nbytes))

    def begin_read_ahead(
        self, tickets: Sequence[Ticket], piece: ParameterPiece
    ) -> GradientRead | None:
        """Begin the same if there is memory now; return None if there is none."""
        ticket = tickets[self.pieces(piece.param).index(piece)]
        self.open()
        assert self._arena is not None
        block = self._arena.allocate(ticket.window.nbytes, wait=False)
        return None if block is None else self._begin_read(ticket, block.lend(0, block.nbytes))

    def _begin_read(self, ticket: Ticket, memory: NDArray[np.uint8]) -> GradientRead:
        transfer = self.open().read(ticket, memory.ctypes.data, keep_alive=memory)
        return GradientRead(memory, ticket, transfer)

    def trim(self) -> None:
        """Free the memory that no gradient is in."""
        if self._arena is not None:
            self._arena.trim()

    def close(self) -> None:
        """Discard what is on flash. Idempotent."""
        if self._tier is not None:
            self._tier.close()
        if self._arena is not None:
            self._arena.close()

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        """Return aligned memory, of large pages if there are any; it is free when the array is gone.

        Waits for others to free memory; if they do not, it is forced.
        """
        granule = self.open().spec.granule_bytes
        assert self._arena is not None
        block = self._arena.allocate(nbytes) or self._arena.allocate(nbytes, force=True)
        if block is not None:
            return block.lend(0, nbytes)
        memory = np.empty(nbytes + granule, np.uint8)
        skip = -memory.ctypes.data % granule
        return memory[skip : skip + nbytes]
