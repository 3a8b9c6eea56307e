"""Gradients that come from a device, and weights that go back to it, on a stream of their own.

On the host there is nothing to do. On CUDA each thread that updates tiles has a side stream per device:
it waits for an event and for nothing else, and the thread waits for the copy.

[Note: what a step comes after]
    A step on the device itself comes after all that its stream was told before, and other streams are
    the program's to order. The same holds here. At the begin of a pass an event is recorded, for each
    device, on the stream that is current in the thread that calls ``step``; every copy of that pass, of
    gradients and of weights, in both directions, waits for it. So kernels that still read the old
    weights (backward, an evaluation between backward and ``step``) have read them if they run on that
    stream, or on another one that it has waited for. A reader on a stream that ``step`` knows nothing of
    is overwritten, as it would be by an optimizer of torch.

    With ``overlap`` a tile is updated during backward, and an event for each parameter is recorded where
    its gradient was accumulated: autograd has had that stream wait for all uses of the weight in this
    graph. An evaluation after backward then reads the new weights, or some of them.

    When ``step`` returns, the host has seen the end of every copy: all streams may use the weights.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class _Streams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, Any] = {}


_streams = _Streams()


def ready_event(device: torch.device) -> Any:
    """Record an event on the stream of ``device`` that is current in this thread; None on the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def copy_across(source: Tensor, target: Tensor, after: Any) -> Tensor:
    """Copy between host and device and wait for it; see [Note: what a step comes after].

    The target's type is made on the way, behind the event: what the calling thread itself computes of
    ``source`` would come after nothing.

    Args:
        source: On the host or on a device.
        target: Of the same shape, of any dtype.
        after: An event to wait for first; None if neither is on a device.

    Returns:
        The target.
    """
    if source.device == target.device:
        return target.copy_(source)
    device = source.device if source.device.type == "cuda" else target.device
    with torch.cuda.device(
        device
    ):  # torch.cuda.stream alone would leave it by way of cudaSetDevice
        stream = _streams.by_device.get(device)
        if stream is None:
            stream = _streams.by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
        stream.synchronize()
    return target
