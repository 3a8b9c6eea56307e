"""Bytes between tensors and the blocks that go to a file and come from one.

A region is a tensor seen as its bytes, in the order of its elements, wherever they lie. The memory of
torch's tensors begins at multiples of 64 bytes and files open for direct I/O want 512 or more, so what is
written is put together in blocks of an arena, which takes a fraction of the time that writing does, and
makes what is written the very bytes whose checksum was taken.
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
        nbytes: How many.
        step_bytes: How many are best copied at once.
    """

    nbytes: int
    step_bytes: int = _STEP_BYTES

    @abstractmethod
    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy the bytes ``[start, stop)`` to memory."""

    @abstractmethod
    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Set them from memory."""


class Fixed(Region):
    """Bytes that are known: the header of a file. What comes in is left aside."""

    def __init__(self, data: bytes) -> None:
        """Hold them."""
        self.nbytes = len(data)
        self._data = data

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some of them to memory."""
        ctypes.memmove(address, self._data[start:stop], stop - start)

    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Do nothing."""


class Plain(Region):
    """A tensor whose elements lie one after another in host memory."""

    step_bytes = _CACHED_BYTES

    def __init__(self, tensor: torch.Tensor) -> None:
        """Look at it; it is kept alive."""
        self.nbytes = tensor.numel() * tensor.element_size()
        self._tensor = tensor
        self._address = tensor.data_ptr()

    def copy_out(self, start: int, stop: int, address: int) -> None:
        """Copy some bytes to memory, without the interpreter's lock."""
        ctypes.memmove(address, self._address + start, stop - start)

    def copy_in(self, start: int, stop: int, address: int) -> None:
        """Set some bytes from memory, without the interpreter's lock."""
        ctypes.memmove(self._address + start, address, stop - start)


class Elsewhere(Region):
    """Any other tensor of the host: with its elements in another order. Copied step by step."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Look at it; it is kept alive."""
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
        """Elements [first, last) of which the bytes [low, high) are meant, step by step."""
        size = self._itemsize
        return [
            (low // size, -(-high // size), low, high)
            for low in range(start, stop, nbytes)
            for high in (min(low + nbytes, stop),)
        ]


class OnDevice(Elsewhere):
    """A tensor on a CUDA device; see [Note: staging]. Copied behind what its stream was told before.

    That is the stream which was current in the thread that made the region, when it was made.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Look at it; it is kept alive."""
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
        """The bytes go to where ``base`` says that the tensor's first byte would go."""

        def empty(piece: torch.Tensor) -> None:
            ctypes.memmove(base + span.low, self._inside(piece, span), span.nbytes)

        return CopyStep(
            self._piece_bytes(span), lambda piece: self._move(piece, span, out=True), empty
        )

    def _step_in(self, span: _Span, base: int, staging: Staging) -> CopyStep:
        """The same the other way round."""

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
        """The address of the first byte that is meant, in a piece that begins with whole elements."""
        return piece.data_ptr() + span.low - span.first * self._itemsize

    def _piece_bytes(self, span: _Span) -> int:
        return (span.last - span.first) * self._itemsize


class _Span(NamedTuple):
    """Elements ``[first, last)`` of a tensor, of which the bytes ``[low, high)`` are meant."""

    first: int
    last: int
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        """How many are meant."""
        return self.high - self.low


def await_devices(devices: Iterable[torch.device]) -> None:
    """Wait until CUDA devices have done all they were told.

    Other threads copy from them, and those have current streams of their own, which come after nothing.
    """
    for device in {each for each in devices if each.type == "cuda"}:
        torch.cuda.synchronize(device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie one after another in host memory, as they are."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def region_of(tensor: torch.Tensor) -> Region:
    """A tensor's bytes."""
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
    """Copy, also to a tensor that was made in inference mode, which torch lets change there only."""
    with torch.inference_mode(target.is_inference()):
        target.copy_(source, non_blocking=non_blocking)
