"""Digests by which recomputed values are compared with the original ones, bit for bit.

[Note: digests that stay on the device]
    The host cannot read a device's memory, and to have the bytes copied would stop the device. So the
    sums of :mod:`.cuda.digest` are enqueued there, on the current stream of the calling thread, when the
    host would read the values. 40 bytes for each digest remain, on the device. Two of them are compared
    there as well, on a stream that comes after both. Only the answer comes to the host, which waits for
    it when it asks: once for a recomputed module, whatever it saves.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from penstock.runtime.cuda.digest import WORD_BYTES, digest_of
from penstock.staging import bytes_of
from penstock.store import checksums


@dataclass(frozen=True, slots=True, eq=False)
class DeviceDigest:
    """A digest that a device makes; see [Note: digests that stay on the device]."""

    sums: torch.Tensor
    """``DIGEST_BYTES`` bytes, uint8."""
    stream: Any
    """On which they are made."""


Digest: TypeAlias = int | DeviceDigest
"""64 bits, or sums that a device makes."""


def digest(tensor: torch.Tensor) -> Digest | None:
    """Return a digest of the elements of a strided tensor of any shape and dtype.

    Returns:
        ``None`` if its bytes need not be the same: those of type uint8 are workspaces, parts of which are
        never written to. Or if the current stream is being captured in a CUDA graph.
    """
    if tensor.dtype is torch.uint8:
        return None
    with torch.no_grad():
        values = tensor.detach()
        if is_behind(values.device):
            # what is expanded is there once; and in the order of memory no usual layout is copied
            for dim in range(values.dim()):
                if values.stride(dim) == 0 and values.size(dim) > 1:
                    values = values.narrow(dim, 0, 1)
            values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
            return _of_device(values.contiguous().view(-1).view(torch.uint8))
        values = values.contiguous()
        return checksums.full(values.data_ptr(), values.numel() * values.element_size())


def digest_of_storage(storage: torch.UntypedStorage) -> Digest | None:
    """Return a digest of all bytes of a storage; ``None`` only while a CUDA graph is captured."""
    if not is_behind(storage.device):
        return checksums.full(storage.data_ptr(), storage.nbytes())
    with torch.no_grad():
        return _of_device(bytes_of(storage))


class Comparison:
    """Comparison of two digests. The device's answer is asked for only when needed."""

    __slots__ = ("_answer", "_first", "_second", "_stream")

    def __init__(self, first: Digest, second: Digest | None) -> None:
        """Compare; on a device on the current stream, which comes after both from now on. Never waits."""
        self._answer: bool | torch.Tensor = True
        self._first, self._second = first, second  # the device reads them until it has the answer
        if isinstance(first, DeviceDigest) and isinstance(second, DeviceDigest):
            device = second.sums.device
            current = self._stream = torch.get_device_module(device).current_stream(device)
            for each in (first, second):
                if each.stream != current:
                    current.wait_stream(each.stream)
            with torch.no_grad():
                self._answer = (first.sums != second.sums).any()
        else:
            self._answer = first != second

    @property
    def at_hand(self) -> bool:
        """Return whether the answer is known without waiting for a device."""
        return isinstance(self._answer, bool)

    def differ(self) -> bool:
        """Return the answer; waits for the device, if there is one, to have it."""
        if isinstance(self._answer, torch.Tensor):
            # the program may have gone on to another stream, which does not wait for this one
            device = self._answer.device
            module: Any = torch.get_device_module(device)
            # without it, leaving the stream would make a context on the device that is current
            here = module.device(device) if device.type == "cuda" else nullcontext()
            with here, module.stream(self._stream):
                self._answer = bool(self._answer)
        return self._answer


def is_behind(device: torch.device) -> bool:
    """Return whether the host cannot read the memory of a device."""
    return device.type != "cpu"


def _of_device(data: torch.Tensor) -> Digest | None:
    """Have a device digest contiguous bytes of its own."""
    module: Any = torch.get_device_module(data.device)
    if data.is_cuda and module.is_current_stream_capturing():
        return None
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()
    return DeviceDigest(digest_of(data), module.current_stream(data.device))
