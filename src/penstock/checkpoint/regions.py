"""Copies between tensors and blocks of files.

A region is a tensor seen as bytes, in the order of its elements. The memory of torch's tensors begins at
multiples of 64 bytes and direct I/O needs 512 or more, so bytes are copied to aligned blocks. That takes
a fraction of the time of writing, and ensures that the bytes written are those of the checksum.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import torch

from penstock.core.units import KIB, MIB
from penstock.staging import PIECE_BYTES, CopyStep, Staging, ready_event, staging_for

_STEP_BYTES: Final = 4 * MIB
"""Bytes copied at once of a tensor that is not contiguous."""
_CACHED_BYTES: Final = 512 * KIB
"""Bytes of host memory copied before their checksum is taken, while they are in the core's cache."""
_STAGED_BYTES: Final = PIECE_BYTES - 4 * KIB
"""Bytes copied at once of a device's memory, less room for elements that two steps share."""


class Region(ABC):
    """Some bytes that have a place in a file.

    Attributes:
        nbytes: Their number.
    """

    nbytes: int


class SourceRegion(Region):
    """Bytes that are saved.

    Attributes:
        step_bytes: Best number of bytes to copy at once.
    """

    step_bytes: int = _STEP_BYTES

    @abstractmethod
    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy the bytes ``[start, stop)`` to memory."""


class TargetRegion(Region):
    """Bytes that are loaded."""

    @abstractmethod
    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Set the bytes ``[start, stop)`` from memory."""


class TensorRegion(SourceRegion, TargetRegion):
    """Bytes of a tensor."""


class Fixed(SourceRegion):
    """Constant bytes: the header of a file."""

    def __init__(self, data: bytes) -> None:
        """Hold the bytes."""
        self.nbytes = len(data)
        self._data = data

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some of them to memory."""
        ctypes.memmove(address, self._data[start:stop], stop - start)


class Plain(TensorRegion):
    """A tensor whose elements lie one after another in host memory."""

    step_bytes = _CACHED_BYTES

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the tensor."""
        self.nbytes = tensor.numel() * tensor.element_size()
        self._tensor = tensor
        self._address = tensor.data_ptr()

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some bytes to memory, without the interpreter's lock."""
        ctypes.memmove(address, self._address + start, stop - start)

    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Set some bytes from memory, without the interpreter's lock."""
        ctypes.memmove(self._address + start, address, stop - start)


class Elsewhere(TensorRegion):
    """A tensor in host memory with its elements in another order, copied step by step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the tensor."""
        self.nbytes = tensor.numel() * tensor.element_size()
        self._tensor = tensor
        self._itemsize = tensor.element_size()

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some bytes to memory."""
        for first, last, low, high in self._steps(start, stop):
            values = torch.empty(last - first, dtype=self._tensor.dtype)
            _copy_range(self._tensor, first, last, values, out=True)
            source = values.data_ptr() + low - first * self._itemsize
            ctypes.memmove(address + low - start, source, high - low)

    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Set some bytes from memory."""
        for first, last, low, high in self._steps(start, stop):
            values = torch.empty(last - first, dtype=self._tensor.dtype)
            if low % self._itemsize or high % self._itemsize:  # an element that two blocks share
                _copy_range(self._tensor, first, last, values, out=True)
            target = values.data_ptr() + low - first * self._itemsize
            ctypes.memmove(target, address + low - start, high - low)
            _copy_range(self._tensor, first, last, values, out=False)

    def _steps(
        self, start: int, stop: int, nbytes: int = _STEP_BYTES
    ) -> list[tuple[int, int, int, int]]:
        """Return steps: elements ``[first, last)``, and their bytes ``[low, high)`` to copy."""
        size = self._itemsize
        return [
            (low // size, -(-high // size), low, high)
            for low in range(start, stop, nbytes)
            for high in (min(low + nbytes, stop),)
        ]


class OnDevice(Elsewhere):
    """A tensor on a CUDA device; see [Note: staging].

    It is copied after the work that was enqueued before the region was made, on the stream that was
    current then.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Hold the tensor."""
        super().__init__(tensor)
        self._ready = ready_event(tensor.device)

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some bytes to memory."""
        with staging_for(self._tensor.device) as staging:
            steps = (self._step_out(each, address - start) for each in self._cut(start, stop))
            staging.to_host(steps, self._ready)

    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Set some bytes from memory."""
        with staging_for(self._tensor.device) as staging:
            steps = (
                self._step_in(each, address - start, staging) for each in self._cut(start, stop)
            )
            staging.to_device(steps, self._ready)

    def _cut(self, start: int, stop: int) -> Iterator[_Span]:
        return (_Span(*each) for each in self._steps(start, stop, _STAGED_BYTES))

    def _step_out(self, span: _Span, base: int) -> CopyStep:
        """Return a step out; ``base`` is the address for the tensor's first byte."""

        def empty(piece: torch.Tensor) -> None:
            ctypes.memmove(base + span.low, self._inside(piece, span), span.nbytes)

        return CopyStep(
            self._piece_bytes(span), lambda piece: self._move(piece, span, out=True), empty
        )

    def _step_in(self, span: _Span, base: int, staging: Staging) -> CopyStep:
        """Return a step in, as ``_step_out``."""

        def fill(piece: torch.Tensor) -> None:
            if span.low % self._itemsize or span.high % self._itemsize:
                self._move(piece, span, out=True)  # an element that two blocks share
                staging.synchronize()
            ctypes.memmove(self._inside(piece, span), base + span.low, span.nbytes)

        return CopyStep(
            self._piece_bytes(span), lambda piece: self._move(piece, span, out=False), fill
        )

    def _move(self, piece: torch.Tensor, span: _Span, *, out: bool) -> None:
        flat = piece.view(self._tensor.dtype)
        _copy_range(self._tensor, span.first, span.last, flat, out=out)

    def _inside(self, piece: torch.Tensor, span: _Span) -> int:
        """Return the address of the span's first byte in a piece, which begins with whole elements."""
        return piece.data_ptr() + span.low - span.first * self._itemsize

    def _piece_bytes(self, span: _Span) -> int:
        return (span.last - span.first) * self._itemsize


class _Span(NamedTuple):
    """Elements ``[first, last)`` of a tensor, and their bytes ``[low, high)`` to copy."""

    first: int
    last: int
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.high - self.low


def await_devices(devices: Iterable[torch.device]) -> None:
    """Wait until CUDA devices have finished all their work.

    Other threads copy from them, on current streams of their own that wait for nothing.
    """
    for device in {each for each in devices if each.type == "cuda"}:
        torch.cuda.synchronize(device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie in host memory in their order, as they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def region_of(tensor: torch.Tensor) -> TensorRegion:
    """Return a tensor's bytes as a region."""
    if tensor.is_cuda:
        return OnDevice(tensor)
    return Plain(tensor) if is_plain(tensor) else Elsewhere(tensor)


@torch.no_grad()
def _copy_range(
    tensor: torch.Tensor, first: int, last: int, flat: torch.Tensor, *, out: bool
) -> None:
    """Copy the elements ``[first, last)``, in their logical order, to ``flat`` or from it.

    If the tensor is on a device, this only enqueues it, on the current stream.
    """
    if tensor.dim() <= 1:
        part = tensor.reshape(1)[first:last] if tensor.dim() == 0 else tensor[first:last]
        _copy(part, flat, out=out)
        return
    row = tensor[0].numel()
    top, bottom = -(-first // row), last // row
    if top > bottom:  # within one row
        _copy_range(tensor[bottom], first - bottom * row, last - bottom * row, flat, out=out)
        return
    head, body = top * row - first, bottom * row - first
    if head:
        _copy_range(tensor[top - 1], row - head, row, flat[:head], out=out)
    if body > head:
        _copy(tensor[top:bottom], flat[head:body].view(bottom - top, *tensor.shape[1:]), out=out)
    if last - first > body:
        _copy_range(tensor[bottom], 0, last - first - body, flat[body:], out=out)


def _copy(part: torch.Tensor, flat: torch.Tensor, *, out: bool) -> None:
    target, source = (flat, part) if out else (part, flat)
    set_to(target, source, non_blocking=part.is_cuda)


def set_to(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy, also to a tensor that was made in inference mode, which only that mode may change."""
    with torch.inference_mode(target.is_inference()):
        target.copy_(source, non_blocking=non_blocking)
