"""Memory that operators take, counted without a device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Counts the bytes of the storages that operators have made and that are alive.

    Adds, while an operator runs, what it would take inside itself on a CUDA device.
    """

    def __init__(self, *others):
        super().__init__()
        self.peak_bytes = 0
        self._live = {}
        self._others = {tensor.untyped_storage()._cdata for tensor in others}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        inside = taken_inside(operator.overloadpacket, args, kwargs or {})
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._others and key not in self._live:
                    self._live[key] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, key)
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()) + inside)
        return result


def taken_inside(operator, args, kwargs):
    """Return the bytes that an operator takes on a CUDA device besides its result.

    Assumed, from torch's source (ATen/native/cuda, and ReduceOps.cpp beside it):

    - Indexing by a mask and ``masked_select`` find the places of its true elements by ``nonzero``: int64,
      one number per element and dimension of the mask, which lives until the result is filled.
    - ``masked_scatter`` makes a prefix sum, int64, as large as the mask, broadcast to the destination.
    - Both copy a mask first if it is not contiguous.
    - ``sum`` and ``cumsum`` convert their input to the result's type first; integers and bools become
      int64 if no type is given.

    Not counted, as it is small: what CUB and reductions across thread blocks need.
    """
    aten = torch.ops.aten
    if operator in (aten.index, aten.index_put, aten.index_put_):
        masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
        return sum(_places_bytes(mask) for mask in masks)
    if operator is aten.masked_select:
        return _places_bytes(torch.broadcast_tensors(*args)[1])
    if operator in (aten.masked_scatter, aten.masked_scatter_):
        mask = args[1].expand_as(args[0])
        return 8 * mask.numel() + _copy_bytes(mask) + _copy_bytes(args[2])
    if operator is aten.nonzero:
        return _copy_bytes(args[0])  # the places are its result
    if operator in (aten.sum, aten.cumsum):
        source = args[0]
        integers = torch.int64 if not source.is_floating_point() else source.dtype
        into = kwargs.get("dtype") or integers
        return source.numel() * into.itemsize if into != source.dtype else 0
    return 0


def _places_bytes(mask):
    return 8 * mask.dim() * int(mask.sum()) + _copy_bytes(mask)


def _copy_bytes(tensor):
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.itemsize
