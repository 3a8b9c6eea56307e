"""Tensors as frames of a lossless codec: fewer bytes on flash, and the same bits when they are back.

A tensor goes in pieces of ``FRAME_BYTES`` of its bytes, each a frame (:mod:`penstock.codec.base`), one
behind the other. A frame that is shorter than a certain part of its piece is filled up with zeros, so
that what a reader allocates for a tensor is in proportion to what the file has of it, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from penstock.checkpoint.manifest import CODECS, FRAME_BYTES, LEAST_PART, TensorEntry
from penstock.checkpoint.regions import SourceRegion, TargetRegion, region_of
from penstock.codec import registry
from penstock.codec.base import HEADER_BYTES, Bytes, frame_bytes
from penstock.core.errors import CodecError, ConfigError
from penstock.io.mapping import memory_at

ALIGNMENT_BYTES: Final = 64
"""Multiple to which each tensor is padded in its file, so that the next is aligned."""
_SMALL_BYTES: Final = 4096
"""Shorter tensors stay as they are, for others to read."""


class Encoder:
    """Makes frames. Not thread-safe; for one save."""

    def __init__(self, codec: str) -> None:
        """Get ready.

        Args:
            codec: Its name.

        Raises:
            ConfigError: It is none of those that a checkpoint may be encoded with.
        """
        if codec not in CODECS:
            raise ConfigError(
                f"codec={codec!r}: a checkpoint is encoded without loss, by one of {', '.join(CODECS)}"
            )
        self.name = codec
        self._codec = registry.get(codec)
        self._source = np.empty(FRAME_BYTES, np.uint8)
        self._frame = np.empty(HEADER_BYTES + FRAME_BYTES, np.uint8)

    def pays(self, region: SourceRegion, dtype: str) -> bool:
        """Return whether it makes a tensor's first piece shorter; if not, the tensor stays as it is."""
        if region.nbytes < _SMALL_BYTES or not self._codec.accepts(dtype):
            return False
        return self._encode(region, dtype, 0).size < min(region.nbytes, FRAME_BYTES)

    def frames(self, region: SourceRegion, dtype: str) -> Iterator[tuple[Bytes, int]]:
        """Each frame, valid until the next, and where its piece ends; what fills up the last at the end.

        Args:
            region: A tensor's bytes.
            dtype: Its elements' type.
        """
        length = 0
        for start in range(0, region.nbytes, FRAME_BYTES):
            frame = self._encode(region, dtype, start)
            length += frame.size
            yield frame, min(start + FRAME_BYTES, region.nbytes)
        yield np.zeros(-length % ALIGNMENT_BYTES, np.uint8), region.nbytes

    def _encode(self, region: SourceRegion, dtype: str, start: int) -> Bytes:
        stop = min(start + FRAME_BYTES, region.nbytes)
        source = self._source[: stop - start]
        region.copy_out(start, stop, source.ctypes.data)
        length = self._codec.encode(source, self._frame, dtype=dtype)
        least = _least_bytes(source.size)
        self._frame[length:least] = 0
        return self._frame[: max(length, least)]


class Decoding(TargetRegion):
    """The frames of a tensor, that fill another region as they come in; in order, and once.

    Every method raises CodecError if they are not what an encoder makes.
    """

    def __init__(self, entry: TensorEntry, target: TargetRegion | None) -> None:
        """Expect the first frame.

        Args:
            entry: What the manifest says of the tensor.
            target: What is filled; None: nothing, frames are only proven.
        """
        self.nbytes = entry.stored_bytes
        self._codec = registry.get(entry.codec)
        self._dtype = entry.dtype
        self._target = target
        self._all_bytes = entry.nbytes
        self._done_bytes = 0
        self._next = 0
        self._held = 0
        self._frame = self._piece = np.empty(0, np.uint8)

    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Take the bytes ``[start, stop)`` of the frames, and decode those that are whole now."""
        assert start == self._next, "blocks come in order"
        self._next = stop
        data = memory_at(address, stop - start)
        if not self._frame.size:
            self._frame = np.empty(HEADER_BYTES + FRAME_BYTES, np.uint8)
            self._piece = np.empty(min(FRAME_BYTES, self._all_bytes), np.uint8)
        while data.size and self._done_bytes < self._all_bytes:
            data = data[self._take(data) :]
        if self._done_bytes == self._all_bytes:
            if data.any() or data.size + self.nbytes - stop >= ALIGNMENT_BYTES:
                raise CodecError("there is something behind the last frame")
            self._frame = self._piece = np.empty(0, np.uint8)
        elif stop == self.nbytes:
            raise CodecError(f"{self._done_bytes} of {self._all_bytes} bytes are there")

    def _take(self, data: Bytes) -> int:
        """Add bytes to the frame that is not whole yet; how many."""
        count = min(data.size, self._length() - self._held)
        self._frame[self._held : self._held + count] = data[:count]
        self._held += count
        if self._held >= HEADER_BYTES and self._held == self._length():
            self._decode()
        return count

    def _piece_bytes(self) -> int:
        return min(FRAME_BYTES, self._all_bytes - self._done_bytes)

    def _length(self) -> int:
        """Of the frame that is coming in, as far as is known."""
        if self._held < HEADER_BYTES:
            return HEADER_BYTES
        piece = self._piece_bytes()
        length = frame_bytes(self._frame)
        if length > HEADER_BYTES + piece:
            raise CodecError(f"a frame of {length} bytes for {piece}")
        return max(length, _least_bytes(piece))

    def _decode(self) -> None:
        piece = self._piece[: self._piece_bytes()]
        self._codec.decode(self._frame[: self._held], piece, dtype=self._dtype)
        if self._target is not None:
            end = self._done_bytes + piece.size
            self._target.copy_in(self._done_bytes, end, piece.ctypes.data)
        self._done_bytes += piece.size
        self._held = 0


def stored_in(entry: TensorEntry, target: Any) -> TargetRegion:
    """Return the region that a tensor's bytes in its file fill as they arrive.

    Args:
        entry: What the manifest says of it.
        target: A tensor of its dtype and shape.
    """
    region = region_of(target)
    return Decoding(entry, region) if entry.codec else region


def _least_bytes(piece_bytes: int) -> int:
    return -(-piece_bytes // LEAST_PART)
