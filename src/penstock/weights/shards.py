"""Classes of parameters that are spread over ranks, as DTensors, while what is here of them has a home.

See [Note: a resting weight] in :mod:`.resting`. Operators on a DTensor work with its local tensor below
autograd, where neither its class nor its version is noticed. So it is the DTensor whose class tells the
home what is done.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from penstock.weights.resting import Busy, Kinds, Resting, touched


class _Lent(DTensor):
    """A DTensor that tells its home when its local tensor is given away."""

    __slots__ = ()

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the local tensor, as DTensor does; it shares the memory of the values."""
        with touched(cast(Parameter, self)) as touch, torch._C.DisableTorchFunctionSubclass():
            touch.changes = True
            return _other(DTensor.to_local(self, *args, **kwargs), self._local_tensor)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return it placed otherwise, as DTensor does; if nothing moves it shares the memory."""
        with touched(cast(Parameter, self)) as touch, torch._C.DisableTorchFunctionSubclass():
            made = DTensor.redistribute(self, *args, **kwargs)
            mine = self._local_tensor.untyped_storage()._cdata
            if made._local_tensor.untyped_storage()._cdata == mine:
                touch.changes = True
                made._local_tensor = _other(made._local_tensor, self._local_tensor)
        return made


def _other(made: Tensor, local: Tensor) -> Tensor:
    """Return what was made, as a tensor of its own, which refers to the memory, if it is ``local``."""
    return made.view_as(made) if made is local else made


class RestingShard(Resting, _Lent):
    """Parameter over ranks whose local values are at home."""

    __slots__ = ()
    ordinary = DTensor


class BusyShard(Busy, _Lent):
    """Parameter over ranks whose local values a module works with."""

    __slots__ = ()
    ordinary = DTensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Return a copy in memory, an ordinary parameter."""
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = Parameter(copied, self.requires_grad)
        return cast(Parameter, memo[id(self)])


KINDS: Final = Kinds(RestingShard, BusyShard, DTensor)
