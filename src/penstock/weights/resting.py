"""The class of a parameter while it rests: whoever touches it gets its bytes, and is noticed.

[Note: a resting weight]
    A parameter is one object all its life, so optimizers, hooks, tied weights and state dicts see no
    change. What changes is its memory (``.data``) and its class. At rest its memory is a mapping of its
    home in a file. So any read, C++ code's included, gets the right bytes, and any write reaches the
    home. Its class is then :class:`RestingParameter`, whose ``__torch_function__`` tells its home of what
    is done with it. While a module works with it, its memory is a buffer, and its class is ``Parameter``,
    so that nothing is slower and ``torch.compile`` sees what it always sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.homed import home_of

_PROPERTIES: Final = (
    *(
        "shape",
        "dtype",
        "device",
        "grad",
        "requires_grad",
        "is_leaf",
        "_version",
        "grad_fn",
        "layout",
    ),
    *(
        "ndim",
        "nbytes",
        "itemsize",
        "_base",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_mps",
        "is_xla",
        "name",
    ),
    *("is_sparse", "is_sparse_csr", "is_mkldnn", "is_nested", "is_quantized", "retains_grad"),
    *("output_nr", "_backward_hooks", "_grad", "grad_dtype", "is_vulkan", "is_ipu", "is_xpu"),
    *("_post_accumulate_grad_hooks", "is_maia", "is_mtia", "is_hpu", "names", "volatile"),
)
_SET: Final = ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_grad")
_METHODS: Final = (
    *("numel", "nelement", "dim", "ndimension", "stride", "size", "element_size", "is_contiguous"),
    *(
        "storage_offset",
        "_is_view",
        "is_floating_point",
        "is_complex",
        "is_conj",
        "is_neg",
        "__len__",
    ),
    *(
        "_is_zerotensor",
        "is_inference",
        "get_device",
        "type",
        "is_pinned",
        "is_shared",
        "is_same_size",
    ),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    *(
        "is_signed",
        "has_names",
        "is_distributed",
        "__hash__",
        "dim_order",
        "_has_symbolic_sizes_strides",
    ),
)


def _metadata() -> Iterator[Any]:
    for name in _PROPERTIES:
        found = getattr(Tensor, name, None)
        if found is not None and hasattr(found, "__get__"):
            yield found.__get__
    for name in _SET:
        found = getattr(Tensor, name, None)
        if found is not None and hasattr(found, "__set__"):
            yield found.__set__
    for name in _METHODS:
        found = getattr(Tensor, name, None)
        if found is not None:
            yield found


_METADATA: Final = frozenset(_metadata())
"""Functions that neither read nor write values."""
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
_ADDRESSES: Final = frozenset({Tensor.data_ptr})
"""Functions whose result says where the values are, though it is no tensor."""


class RestingHome(Protocol):
    """Home of a resting parameter, which is told what is done with it."""

    def touched(self) -> None:
        """Handle the beginning of an operation on the values."""

    def may_differ(self) -> None:
        """Handle the end of an operation that has changed the values, or has given their memory away."""

    def replaced(self, data: Tensor) -> None:
        """Handle the assignment of other values. Raises ConfigError if they do not fit."""


_no_function: Final = torch._C.DisableTorchFunctionSubclass


class RestingParameter(Parameter):
    """Parameter whose values are at home. See [Note: a resting weight]."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the values at home, or in memory, and tell the home of it."""
        kwargs = kwargs or {}
        if func in _METADATA:
            with _no_function():
                return func(*args, **kwargs)
        found = {id(each): each for each in _resting((*args, *kwargs.values()))}
        with _no_function():
            homes = [(each, _home_of(each)) for each in found.values()]
            if func == _SET_DATA and type(args[0]) is RestingParameter:
                homes[0][1].replaced(args[1])
                return None
            for _, home in homes:
                home.touched()
            before = [each._version for each, _ in homes]
            result = func(*args, **kwargs)
            for (each, home), version in zip(homes, before, strict=True):
                # fused steps of optimizers return None, and raise no version
                may_differ = result is None or func in _ADDRESSES or _aliases(result, each)
                if each._version != version or may_differ:
                    home.may_differ()
            return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Return a copy in memory, an ordinary parameter."""
        if id(self) in memo:
            known: Parameter = memo[id(self)]
            return known
        _home_of(self).touched()
        if type(self) is not RestingParameter:  # its keeper has brought it
            return cast(Parameter, deepcopy(self, memo))
        copy = memo[id(self)] = Parameter(self.clone().detach(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter."""
        hooks: dict[int, Any] = {}
        rebuild = torch._utils._rebuild_parameter
        return rebuild, (self.data, self.requires_grad, hooks)


def _home_of(parameter: Parameter) -> RestingHome:
    home = home_of(parameter)
    assert home is not None, "a resting parameter has a home"
    return cast(RestingHome, home)


def _resting(values: Iterable[Any]) -> Iterator[RestingParameter]:
    """Yield the resting parameters among arguments, and in lists of them."""
    for value in values:
        if type(value) is RestingParameter:
            yield value
        elif isinstance(value, list | tuple):
            yield from _resting(value)


def _aliases(result: Any, tensor: Tensor) -> bool:
    """Return whether a result may be the tensor's own memory."""
    if isinstance(result, bool | int | float | str | torch.Size):
        return False
    if isinstance(result, Tensor):
        if result.layout != torch.strided or result.device != tensor.device:
            return False
        return bool(result.untyped_storage()._cdata == tensor.untyped_storage()._cdata)
    if isinstance(result, list | tuple):
        return any(_aliases(each, tensor) for each in result)
    return True
