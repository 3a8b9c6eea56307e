"""Records made shorter on their way to flash, and whole again on their way back, to the bit.

1. ``stretches`` says which parts of a record are floats of which kind, and ``slack_bytes`` how much
   longer than the record its buffer must be.
2. ``Squeezer.squeeze``, in the thread that is about to write a record, leaves it at the end of its
   buffer, shorter; ``Squeezer.expand``, in the thread that is about to update it, puts it back.
3. ``Squeezer.judge``, after each pass, says whether the next one squeezes (:mod:`squeeze_judge`).

[Note: squeezing in place]
    A record is squeezed in the memory that it lies in, from its last block to its first, towards the end
    of its buffer, and expanded from its first block to its last. A block is first made beside it. The
    buffer is longer than the record by a head for each block, so that a block is never written over one
    that is still to be read, however little they shrink.

What is stored: [Note: squeezed floats] in :mod:`squeeze_kernels`.
"""

from __future__ import annotations

import functools
import importlib
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.locks import Lock
from penstock.core.units import round_up
from penstock.optim.formats import RECORD_BYTES, Array
from penstock.optim.layout import Tile
from penstock.optim.squeeze_judge import Judge

_BLOCK: Final = 512
_HEAD_BYTES: Final = 3


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a record: whole blocks of floats, or bytes that stay as they are."""

    start: int
    stop: int
    width: int
    """Halves of an element: 2 of float32, 1 of bfloat16, 0 of anything else."""


@functools.lru_cache(maxsize=256)
def stretches(arrays: tuple[Array, ...], record_bytes: int) -> tuple[Stretch, ...]:
    """Return the parts of a record, from its beginning to its end."""
    found: list[Stretch] = []
    place = 0
    for array in arrays:
        start, width = _floats(array)
        block_bytes = 2 * max(width, 1) * _BLOCK
        stop = start + (array.offset_bytes + array.nbytes - start) // block_bytes * block_bytes
        if width and stop > start:
            found += [Stretch(place, start, 0)] * (start > place)
            found.append(Stretch(start, stop, width))
            place = stop
    return (*found, *[Stretch(place, record_bytes, 0)] * (record_bytes > place))


def _floats(array: Array) -> tuple[int, int]:
    """Return the offset of an array's floats in the record, and their width."""
    if array.packing == "plain" and array.dtype == torch.float32:
        return array.offset_bytes, 2
    if array.packing == "bfloat16" or (array.packing == "plain" and array.dtype == torch.bfloat16):
        return array.offset_bytes, 1
    if array.packing == "low+ties":  # the bitmap, which is nearly all zero, goes for floats
        return array.offset_bytes + array.nbytes * 16 // 17, 2
    return array.offset_bytes, 0


@functools.lru_cache(maxsize=256)
def _slack_bytes(arrays: tuple[Array, ...], record_bytes: int) -> int:
    blocks = sum(
        (part.stop - part.start) // (2 * part.width * _BLOCK)
        for part in stretches(arrays, record_bytes)
        if part.width
    )
    return round_up(_HEAD_BYTES * blocks, RECORD_BYTES)


def slack_bytes(tile: Tile) -> int:
    """Return a buffer's bytes beyond a tile's record; 0: there is nothing to compress in it."""
    return _slack_bytes(tile.arrays, tile.record_bytes)


def extent(tile: Tile, squeezed_bytes: int) -> tuple[int, int]:
    """Return a record's offset and length in its buffer, in multiples of ``RECORD_BYTES``.

    Args:
        tile: The tile.
        squeezed_bytes: Its exact length when squeezed; 0: it is not.
    """
    if not squeezed_bytes:
        return 0, tile.record_bytes
    end = tile.record_bytes + slack_bytes(tile)
    start = (end - squeezed_bytes) // RECORD_BYTES * RECORD_BYTES
    return start, end - start


class Squeezer:
    """Squeezes the records of one optimizer, if that pays. Thread-safe.

    Attributes:
        is_on: Whether records are squeezed now.
    """

    def __init__(self, when: bool | None) -> None:
        """Always, never, or (None) when it pays."""
        self.is_on = when is not False
        self._judge = Judge() if when is None else None
        self._lock = Lock()
        self._spent_s = 0.0
        self._whole = self._squeezed = 0  # bytes, in this pass

    def squeeze(self, tile: Tile, buffer: NDArray[np.uint8]) -> int:
        """Squeeze a record.

        Args:
            tile: The tile.
            buffer: Begins with its record, and is ``slack_bytes`` longer at least.

        Returns:
            The length of what ends where the slack ends now; 0: the record is where it was.
        """
        slack = slack_bytes(tile)
        if not slack or not self.is_on:
            return 0
        kernels, begun = _kernels(), time.perf_counter()
        memory = buffer[: tile.record_bytes + slack]
        place = memory.size
        for part in reversed(stretches(tile.arrays, tile.record_bytes)):
            if part.width:
                halves = memory[part.start : part.stop].view(np.uint16)
                place = kernels.squeeze(memory, halves, part.width, place)
            else:
                place = kernels.move_back(memory, part.start, part.stop, place)
        length = int(memory.size - place)
        moved = extent(tile, length)[1]
        if moved >= tile.record_bytes:
            self._expand(tile, memory, length)
            length, moved = 0, tile.record_bytes
        self._note(begun, tile.record_bytes, moved)
        return length

    def expand(self, tile: Tile, buffer: NDArray[np.uint8], length: int) -> bool:
        """The reverse; false: that is not a squeezed record, and the buffer holds anything."""
        _kernels()
        begun = time.perf_counter()
        is_whole = self._expand(tile, buffer[: tile.record_bytes + slack_bytes(tile)], length)
        self._note(begun, 0, 0)
        return is_whole

    @staticmethod
    def _expand(tile: Tile, memory: NDArray[np.uint8], length: int) -> bool:
        kernels, place = _kernels(), memory.size - length
        if not 0 < length <= memory.size:
            return False
        for part in stretches(tile.arrays, tile.record_bytes):
            if part.width:
                halves = memory[part.start : part.stop].view(np.uint16)
                place = kernels.expand(memory, place, halves, part.width)
            else:
                place = kernels.move_front(memory, place, part.start, part.stop)
            if place < 0:
                return False
        return bool(place == memory.size)

    def _note(self, begun: float, whole: int, squeezed: int) -> None:
        with self._lock:
            self._spent_s += time.perf_counter() - begun
            self._whole += whole
            self._squeezed += squeezed

    def judge(self, *, took_s: float, waited_s: float) -> None:
        """A pass is over, for which one has waited so long, and threads for flash; see ``Judge``."""
        with self._lock:
            spent, self._spent_s = self._spent_s, 0.0
            whole, self._whole = self._whole, 0
            squeezed, self._squeezed = self._squeezed, 0
        if self._judge is not None:
            self._judge.passed(
                took_s=took_s, waited_s=waited_s, spent_s=spent, whole=whole, squeezed=squeezed
            )
            self.is_on = self._judge.is_on


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("penstock.optim.squeeze_kernels")
