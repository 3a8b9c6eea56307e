"""Records made shorter on their way to flash, and whole again on their way back, to the bit.

1. ``stretches`` says which parts of a record are floats of which kind, and ``slack_bytes`` how much
   longer than the record its buffer must be.
2. ``Squeezer.squeeze``, in the thread that is about to write a record, leaves it at the end of its
   buffer, shorter; ``Squeezer.expand``, in the thread that is about to update it, puts it back.
3. ``Squeezer.judge``, after each pass, says whether the next one squeezes.

[Note: squeezing in place]
    A record is squeezed in the memory that it lies in, from its last block to its first, towards the end
    of its buffer, and expanded from its first block to its last. A block is first made beside it. The
    buffer is longer than the record by a head for each block, so that a block is never written over one
    that is still to be read, however little they shrink.

Stretches of floats are stored as payloads of the codec ``exponent``, the shorter of its two ways: [Note:
format exponent] in :mod:`penstock.codec.exponent`. What is between them stays as it is.

[Note: when squeezing pays]
    If the threads that update tiles wait for flash longer than it takes to squeeze and expand what they
    update, flash is the limit, and squeezing costs nothing. If they do not wait, cores may be the limit,
    but need not be: waits are also short while another process uses the cores, or while flash is fast for
    a moment. So waiting is only a hint: after some passes with it a few are made the other way, and the
    faster way is kept for long. Passes without squeezing give the hint when threads wait longer than
    it took. Squeezing stops if records shrink too little.

    With updates in backward it is off: what it takes is taken from backward, which is not timed here. A
    step of a GPT of 124 million parameters, whose update costs 0.4 s on two cores, lost another second.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.locks import Lock
from penstock.core.units import round_up
from penstock.optim.formats import RECORD_BYTES, Array
from penstock.optim.params import Tile

_BLOCK: Final = 512
_HEAD_BYTES: Final = 4
_WORDS: Final[dict[int, Any]] = {2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a record: whole blocks of floats, or bytes that stay as they are."""

    start: int
    stop: int
    itemsize: int
    """Size of a float: 4 for float32, 2 for bfloat16; 0 for anything else."""


@functools.lru_cache(maxsize=256)
def stretches(arrays: tuple[Array, ...], record_bytes: int) -> tuple[Stretch, ...]:
    """Return the parts of a record, from its beginning to its end."""
    found: list[Stretch] = []
    place = 0
    for array in arrays:
        start, itemsize = _floats(array)
        block_bytes = max(itemsize, 1) * _BLOCK
        stop = start + (array.offset_bytes + array.nbytes - start) // block_bytes * block_bytes
        if itemsize and stop > start:
            found += [Stretch(place, start, 0)] * (start > place)
            found.append(Stretch(start, stop, itemsize))
            place = stop
    return (*found, *[Stretch(place, record_bytes, 0)] * (record_bytes > place))


def _floats(array: Array) -> tuple[int, int]:
    """Return the offset of an array's floats in the record, and their size."""
    if array.packing == "plain" and array.dtype == torch.float32:
        return array.offset_bytes, 4
    if array.packing == "bfloat16" or (array.packing == "plain" and array.dtype == torch.bfloat16):
        return array.offset_bytes, 2
    if array.packing == "low+ties":  # the bitmap, which is nearly all zero, goes for floats
        return array.offset_bytes + array.nbytes * 16 // 17, 4
    return array.offset_bytes, 0


@functools.lru_cache(maxsize=256)
def _slack_bytes(arrays: tuple[Array, ...], record_bytes: int) -> int:
    blocks = sum(
        (part.stop - part.start) // (part.itemsize * _BLOCK)
        for part in stretches(arrays, record_bytes)
        if part.itemsize
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
        is_on: True if records are squeezed now.
    """

    def __init__(self, when: bool | None) -> None:
        """Always, never, or (None) when it pays."""
        self.is_on = when is not False
        self._judge = SqueezeJudge() if when is None else None
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
            if part.itemsize:
                place = kernels.encode_back(_words(memory, part), memory, place)
            else:
                place -= part.stop - part.start
                _move(memory, part.start, place, part.stop - part.start)
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
            nbytes = part.stop - part.start
            if part.itemsize:
                place = kernels.decode_ahead(memory, place, _words(memory, part))
            elif place + nbytes <= memory.size:
                _move(memory, place, part.start, nbytes)
                place += nbytes
            else:
                return False
            if place < 0:
                return False
        return bool(place == memory.size)

    def _note(self, begun: float, whole: int, squeezed: int) -> None:
        with self._lock:
            self._spent_s += time.perf_counter() - begun
            self._whole += whole
            self._squeezed += squeezed

    def judge(self, *, took_s: float, waited_s: float) -> None:
        """Decide after a pass whether the next one squeezes; see ``SqueezeJudge``.

        Args:
            took_s: Time that the training thread waited for the pass.
            waited_s: Time that the threads waited for flash.
        """
        with self._lock:
            spent, self._spent_s = self._spent_s, 0.0
            whole, self._whole = self._whole, 0
            squeezed, self._squeezed = self._squeezed, 0
        if self._judge is not None:
            self._judge.passed(
                took_s=took_s, waited_s=waited_s, spent_s=spent, whole=whole, squeezed=squeezed
            )
            self.is_on = self._judge.is_on


def _words(memory: NDArray[np.uint8], part: Stretch) -> NDArray[Any]:
    return memory[part.start : part.stop].view(_WORDS[part.itemsize])


def _move(memory: NDArray[np.uint8], source: int, target: int, nbytes: int) -> None:
    """Move bytes within memory, where source and target may overlap."""
    address = memory.ctypes.data
    ctypes.memmove(address + target, address + source, nbytes)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("penstock.codec.kernels.exponent")


# -- whether it pays ---------------------------------------------------------------------------------


_WORTH: Final = 0.97
"""Above this share of the bytes it is given up."""
_HINTS: Final = 3
"""Passes in a row that must give the hint."""
_TRIAL: Final = 2
"""Passes of a trial that are timed; the one before them has other records to read."""
_TRUST: Final = 64
"""Passes for which the outcome of a trial stands."""


class SqueezeJudge:
    """Decides after each pass. Not thread-safe.

    Attributes:
        is_on: True if the next pass squeezes.
    """

    def __init__(self) -> None:
        """Begin with compression on."""
        self.is_on = True
        self._took_s: dict[bool, deque[float]] = {way: deque(maxlen=3) for way in (True, False)}
        self._untold = 2  # passes that say nothing
        self._hints = 0
        self._trust = 0
        self._is_trial = False
        self._cost_s = 0.0

    def passed(
        self, *, took_s: float, waited_s: float, spent_s: float, whole: int, squeezed: int
    ) -> None:
        """A pass is over.

        Args:
            took_s: What the step was waited for.
            waited_s: What threads have waited for flash, while the step was waited for.
            spent_s: What they have spent on squeezing and expanding.
            whole: Bytes that were written, before they were squeezed.
            squeezed: And after.
        """
        if self._untold:
            self._untold -= 1
            return
        self._took_s[self.is_on].append(took_s)
        if self.is_on and whole:
            self._cost_s = spent_s
            if squeezed >= _WORTH * whole:
                self._cost_s = float("inf")  # no wait is that long
                self._is_trial = False
                self._turn(False)
                return
        if self._is_trial:
            self._conclude()
            return
        self._trust -= 1
        is_hint = waited_s < spent_s / 4 if self.is_on else waited_s > self._cost_s
        self._hints = self._hints + 1 if is_hint else 0
        if self._hints >= _HINTS and self._trust <= 0:
            self._is_trial = True
            self._turn(not self.is_on)

    def _conclude(self) -> None:
        if len(self._took_s[self.is_on]) < _TRIAL:
            return
        self._is_trial = False
        self._trust = _TRUST
        is_better = min(self._took_s[True]) < min(self._took_s[False])
        if is_better != self.is_on:
            self._turn(is_better)

    def _turn(self, on: bool) -> None:
        self.is_on = on
        self._took_s[on].clear()
        self._untold = 1
        self._hints = 0
