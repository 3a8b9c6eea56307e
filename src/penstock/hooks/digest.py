"""A digest of a tensor's values, to find that a module does not compute the same when it is run again."""

from __future__ import annotations

import ctypes

import torch
import xxhash


def digest(tensor: torch.Tensor) -> int | None:
    """64 bits of what ``tensor`` holds; None if that cannot be told, or need not be the same.

    The memory of a device cannot be read from here, and bytes are workspaces, parts of which are never
    written to.
    """
    if tensor.device.type != "cpu" or tensor.dtype is torch.uint8:
        return None
    with torch.no_grad():
        whole = tensor.detach().contiguous()
    nbytes = whole.numel() * whole.element_size()
    memory = (ctypes.c_char * nbytes).from_address(whole.data_ptr())
    return int(xxhash.xxh3_64_intdigest(memory))
