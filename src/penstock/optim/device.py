"""Gradients that come from a device, and weights that go back to it, on a stream of their own.

On the host there is nothing to do. On CUDA each thread that updates tiles has a side stream per device:
it waits for what has made the gradient and for nothing else, and the thread waits for the copy.
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


def ready_event(tensor: Tensor) -> Any:
    """Something to wait for before ``tensor`` is read by another stream; None on the host."""
    if tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def copy_across(source: Tensor, target: Tensor, after: Any = None) -> Tensor:
    """Copy between host and device and wait for it; ``after``: an event to wait for first.

    The target's type is made on the way, behind that event: what the calling thread itself computes of
    ``source`` would come after nothing.
    """
    if source.device == target.device:
        return target.copy_(source)
    device = source.device if source.device.type == "cuda" else target.device
    stream = _streams.by_device.get(device)
    if stream is None:
        stream = _streams.by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        if after is not None:
            stream.wait_event(after)
        target.copy_(source, non_blocking=True)
    stream.synchronize()
    return target
