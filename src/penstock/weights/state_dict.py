"""Values of weights in the state dict of a model on a device: brought when somebody works with them.

[Note: values that are brought later]
    On the CPU a state dict has the mappings of homes. Nothing is mapped on a device, and the memory of a
    weight that was brought stays as long as a tensor shares it: a state dict of all weights would have
    the whole model in device memory. So it has tensors without memory. A function that is called with one
    gets a tensor in its place that shares the parameter's memory, and lets that go when it returns. So
    ``{name: each.cpu() for name, each in state.items()}`` brings one weight at a time.

    What is changed in such a tensor is changed in the parameter, and the other way round, as it is with
    the tensors of any state dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.core.errors import ConfigError, InPlaceError
from penstock.homed import WithoutMemory, home_of
from penstock.weights.homes import Home
from penstock.weights.resting import (
    ADDRESSES,
    METADATA,
    SET_METADATA,
    RestingHome,
    aliases,
    run_touched,
)

_VERSION: Final = Tensor._version.__get__  # type: ignore[attr-defined]
_MEMORY: Final = frozenset(
    {*ADDRESSES, Tensor.untyped_storage, Tensor.data.__get__}  # type: ignore[attr-defined]
)
"""Functions that give the memory away, which the parameter's class is to notice."""


class DetachedWeight(WithoutMemory):
    """Tensor of a state dict, for a weight whose values are on flash.

    See [Note: values that are brought later]. It has the shape, the strides, the dtype and the device of
    the parameter, and no memory. Any thread may use it.
    """

    parameter: Parameter
    home: Home
    _generation: int

    @staticmethod
    def of(home: Home, parameter: Parameter) -> DetachedWeight:
        """Return the values of a parameter that has a home on a device."""
        detached = Tensor._make_wrapper_subclass(
            DetachedWeight,
            parameter.size(),
            strides=home.layout.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        detached.parameter, detached.home = parameter, home
        detached._generation = home.generation
        return detached

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function with tensors that have the values."""
        kwargs = kwargs or {}
        mine = args[0] if args else None
        if isinstance(mine, DetachedWeight):
            if func == _VERSION:
                return mine.parameter._version
            if func in SET_METADATA:
                raise ConfigError(
                    f"weight {mine.home.name} of a state dict has its values at rest, and no gradient"
                    f" or hooks of its own, which {func.__name__} asks for: clone() it first"
                )
            if func in METADATA and (func != Tensor.type or len(args) == 1):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func == Tensor.contiguous and len(args) == 1 and not kwargs:
                return mine  # weights that rest on a device are
            if func in _MEMORY:
                return func(mine._checked(), *args[1:], **kwargs)
        return func(*_with_values(args), **_with_values(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the same for code that goes past ``__torch_function__``."""
        kwargs = kwargs or {}
        result = func(*_with_values(args), **_with_values(kwargs))
        for argument, each in zip(func._schema.arguments, args, strict=False):
            if isinstance(each, DetachedWeight):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written or aliases(result, each._values()):
                    each.home.lent()
        return result

    def _checked(self) -> Parameter:
        """Return the parameter. Raises ``InPlaceError`` if it has other values, and not by a change."""
        if self.home.generation != self._generation:
            raise InPlaceError(
                f"weight {self.home.name} was replaced, as by parameter.data = x, after the state dict"
                " was made, and its former values are gone: take the state dict after that"
            )
        return self.parameter

    def _values(self) -> Tensor:
        """Bring the values; return a tensor that shares their memory."""
        parameter = self._checked()
        home = home_of(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            touched = [] if home is None else [(parameter, cast(RestingHome, home))]
            values: Tensor = run_touched(Tensor.detach, (parameter,), {}, touched)
        return values

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a tensor with the values."""
        return self._values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy in device memory."""
        if id(self) not in memo:
            memo[id(self)] = self._values().clone()
        copied: Tensor = memo[id(self)]
        return copied


def _with_values(each: Any) -> Any:
    """Return an argument, or arguments, with the values in place of what stands for them."""
    if isinstance(each, DetachedWeight):
        return each._values()
    if type(each) in (list, tuple):
        return type(each)(map(_with_values, each))
    if type(each) is dict:
        return {key: _with_values(value) for key, value in each.items()}
    return each


def detached(home: Home) -> Tensor | None:
    """Return what stands for a weight in a state dict; None if the program has dropped the parameter."""
    parameter = home.parameter
    if parameter is None or home_of(parameter) is not home:
        return None
    return DetachedWeight.of(home, parameter)
