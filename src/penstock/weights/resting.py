"""The class of a parameter while it rests: whoever touches it gets its bytes, and is noticed.

[Note: a resting weight]
    A parameter is one object all its life, so optimizers, hooks, tied weights and state dicts see no
    change. What changes is its memory (``.data``) and its class. At rest its memory is a mapping of its
    home in a file. So any read, C++ code's included, gets the right bytes, and any write reaches the
    home. Its class is then :class:`RestingParameter`, whose ``__torch_function__`` tells its home of what
    is done with it, before and after. While a module works with it, its memory is a buffer, and its class
    is :class:`BusyParameter`, with which nothing is slower: only ``data`` and the like, which give the
    memory away with a version counter of its own or none, tell the home. A compiled module finds
    ``Parameter``, which ``torch.compile`` knows.

    On a device nothing is mapped. At rest the memory there is one NaN, of which the parameter is made by
    strides of 0: who reads it past the class gets NaN, and who writes it gets torch's error. A touch
    brings the weight. Views of it share its version, which tells of changes; what shares memory without
    that counts as a change.

    A parameter that is spread over ranks is a DTensor: what is exchanged is the memory of its local
    tensor, and the class of the parameter (:mod:`.shards`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import embedding

from penstock.homed import home_of, is_sharded, local_of
from penstock.staging import copy_across, ready_event
from penstock.untraced import leave_untraced

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


METADATA: Final = frozenset(_metadata())
"""Functions that neither read nor write values."""
SET_METADATA: Final = frozenset(
    {
        *(getattr(Tensor, name).__set__ for name in _SET if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS if name.startswith(("register", "retain"))),
        Tensor.requires_grad_,
    }
)
"""Those of them that change something of the tensor."""
_LAYOUT: Final = frozenset({Tensor.stride, Tensor.is_contiguous, Tensor.dim_order})
"""Those of them that tell of another memory at rest, if the home is not mapped."""
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA: Final = Tensor.data.__get__  # type: ignore[attr-defined]
ADDRESSES: Final = frozenset({Tensor.data_ptr})
"""Functions whose result says where the values are, though it is no tensor."""
_no_function: Final = torch._C.DisableTorchFunctionSubclass


class RestingHome(Protocol):
    """Home of a resting parameter, which is told what is done with it."""

    @property
    def is_mapped(self) -> bool:
        """True if the values can be read and written at rest; else ``begin_touch`` brings them."""

    @property
    def layout(self) -> Tensor:
        """Tensor with the shape, the strides and the dtype of the parameter."""

    def begin_touch(self) -> None:
        """Let the values be where they are until ``end_touch``, and no transfer of them be in flight."""

    def end_touch(self, *, changed: bool) -> None:
        """End an operation, which may have changed the values or given their memory away."""

    def lent(self) -> None:
        """Note that the memory of the values was given to somebody who may change them."""

    def addressed(self) -> None:
        """Note that the address of the values was given to somebody, who may change them there."""

    def embedded(
        self, indices: Tensor, embed: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Look rows up where the values rest, which are not mapped; may wait for the current stream.

        Args:
            indices: Integers, of any shape, on any device.
            embed: Works with the parameter as it rests: until it returns, no other thread brings the
                values.

        Returns:
            A row for each index, in host memory, and what ``embed`` returned; None if the values are in
            memory, or should be.
        """

    def detached(self) -> Tensor | None:
        """Return what a state dict has of the values; None: a tensor that shares their memory."""

    def replaced(self, data: Tensor) -> None:
        """Take other values in place of the present ones, as ``parameter.data = data`` asks for."""


class Resting:
    """Methods of a parameter while its values are at home. See [Note: a resting weight]."""

    __slots__ = ()
    ordinary: ClassVar[type[Any]] = Parameter
    """Class that it has without a home."""

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
        caller = sys._getframe(1).f_code if func is Tensor.detach else None
        if caller is _SAVER:
            home = _home_of(cast(Parameter, args[0]))
            standing = None if home is None else home.detached()
            if standing is not None:
                return standing
        if func in _LAYOUT and isinstance(args[0], Resting):
            home = _home_of(cast(Parameter, args[0]))
            if home is not None and not (home.is_mapped or is_sharded(cast(Parameter, args[0]))):
                return func(home.layout, *args[1:], **kwargs)
        if func in METADATA and (func != Tensor.type or len(args) == 1):
            with _no_function():
                return func(*args, **kwargs)
        if func is embedding:
            embedded = _embedded(*args, **kwargs)
            if embedded is not None:
                return embedded
        with _no_function():
            found = {id(each): each for each in _resting((*args, *kwargs.values()))}
            homes = [(each, home) for each in found.values() if (home := _home_of(each))]
            is_new = func == _SET_DATA and homes and args[0] is homes[0][0]
            if is_new and not is_sharded(args[0]):  # whose values torch does not replace
                homes[0][1].replaced(args[1])
                return None
            result = run_touched(func, args, kwargs, homes)
        if func is Tensor.detach and caller is _MAKER:
            result.__class__ = type(args[0])  # else Parameter(parameter) refuses it
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """Return a copy in memory, an ordinary parameter."""
        if id(self) in memo:
            known: Parameter = memo[id(self)]
            return known
        parameter = cast(Parameter, self)
        home = _home_of(parameter)
        if home is not None:
            home.begin_touch()
        try:
            if not isinstance(parameter, Resting):  # its keeper has brought it
                return deepcopy(parameter, memo)
            with _no_function():
                copy = Parameter(parameter.detach().clone(), parameter.requires_grad)
            memo[id(self)] = copy
            return copy
        finally:
            if home is not None:
                home.end_touch(changed=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter."""
        return _reduced(cast(Parameter, self))


class RestingParameter(Resting, Parameter):
    """Parameter whose values are at home. See [Note: a resting weight]."""


class Busy:
    """Methods of a parameter while a module works with its values. See [Note: a resting weight]."""

    __slots__ = ()
    ordinary: ClassVar[type[Any]] = Parameter
    """Class that it has without a home."""

    @property
    def data(self) -> Tensor:
        """The values, with a version counter of their own."""
        lend(cast(Parameter, self))
        data: Tensor = _GET_DATA(self)
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        home = _home_of(cast(Parameter, self))
        if home is not None and not is_sharded(cast(Parameter, self)):
            home.replaced(data)
        else:
            _SET_DATA(self, data)

    def detach(self) -> Tensor:
        """Return the values without gradient; ``detach().numpy()`` is changed without a version."""
        home = _home_of(cast(Parameter, self))
        if home is not None and home.is_mapped:
            home.lent()
        return Tensor.detach(cast(Tensor, self))

    def data_ptr(self) -> int:
        """Return the address of the values."""
        if home := _home_of(cast(Parameter, self)):
            home.addressed()
        return Tensor.data_ptr(cast(Tensor, self))

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array; they share memory unless ``force`` makes a copy."""
        lend(cast(Parameter, self))
        return Tensor.numpy(cast(Tensor, self), force=force)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory of the values."""
        lend(cast(Parameter, self))
        return Tensor.untyped_storage(cast(Tensor, self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter."""
        return _reduced(cast(Parameter, self))


class BusyParameter(Busy, Parameter):
    """Parameter whose values a module works with. See [Note: a resting weight]."""


class RestingPart(Tensor):
    """Local tensor of a DTensor at rest on a device, where it is one element. It tells of its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def stride(self, *args: Any, **kwargs: Any) -> Any:
        """Return the strides of the values."""
        home = cast("RestingHome | None", home_of(self))
        return Tensor.stride(self if home is None else home.layout, *args, **kwargs)


class Kinds(NamedTuple):
    """Classes that a parameter has at rest, in use, and without a home."""

    resting: type[Any]
    busy: type[Any]
    ordinary: type[Any]


KINDS: Final = Kinds(RestingParameter, BusyParameter, Parameter)


_MAKER: Final = Parameter.__new__.__code__
_SAVER: Final = Module._save_to_state_dict.__code__


def run_touched(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    homes: Sequence[tuple[Parameter, RestingHome]],
) -> Any:
    """Call a function between the beginning and the end of a touch of each weight."""
    begun: list[tuple[Parameter, RestingHome, int]] = []
    changes = func in ADDRESSES or _is_in_place(func) or "out" in kwargs
    result = None
    over = False
    try:
        for each, home in homes:
            home.begin_touch()
            begun.append((each, home, each._version))
        result = func(*args, **kwargs)
        over = True
        if func in ADDRESSES:
            for _, home in homes:
                home.addressed()
    finally:
        for each, home, version in begun:
            may_differ = changes or not over or each._version != version
            if not may_differ and aliases(result, each):
                may_differ = home.is_mapped or is_sharded(each) or func == _GET_DATA
                may_differ = may_differ or not isinstance(result, Tensor)
            home.end_touch(changed=may_differ)
    return result


def _embedded(indices: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Embed with rows from where a weight rests, if it is not mapped and they are few; else None."""
    home = _home_of(weight) if type(weight) is RestingParameter else None
    if home is None or home.is_mapped or args or kwargs.get("max_norm") is not None:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(indices):
        return None  # no rows of their own

    def embed() -> Tensor:
        with _no_function():
            return embedding(indices, weight, **kwargs)  # of NaN; autograd sees the weight in it

    found = home.embedded(indices, embed)
    if found is None:
        return None
    rows, result = found
    with torch.no_grad():
        line = result.view(-1)
        copy_across(rows.view(-1), line, ready_event(line.device))
    return result


def _is_in_place(func: Any) -> bool:
    """Return whether the name of a function says so; fused optimizers count no version."""
    name = getattr(func, "__name__", "_")
    return name.endswith("_") and (not name.endswith("__") or name[2:5] == "set")


def _home_of(parameter: Parameter) -> RestingHome | None:
    """Return the home; None for a parameter made from another one, which becomes an ordinary one."""
    home = home_of(parameter)
    if home is None:
        parameter.__class__ = cast(Any, parameter).ordinary
    return cast("RestingHome | None", home)


def lend(parameter: Parameter) -> None:
    """Tell the home that the memory of the values is given to somebody who may change them."""
    if home := _home_of(parameter):
        home.lent()


@dataclass
class Touch:
    """An operation on a weight, at home or in memory.

    Attributes:
        changes: True if it may change the values, or gives their memory away.
    """

    changes: bool = False


@contextmanager
def touched(parameter: Parameter) -> Iterator[Touch]:
    """Let a weight stay where it is in a ``with`` block, in which no transfer of it is in flight."""
    touch, home = Touch(), _home_of(parameter)
    if home is None:
        yield touch
        return
    home.begin_touch()
    try:
        yield touch
    finally:
        home.end_touch(changed=touch.changes)


def _reduced(parameter: Parameter) -> Any:
    """Return what makes an ordinary parameter of these values."""
    hooks: dict[int, Any] = {}
    arguments = (parameter.detach(), parameter.requires_grad, hooks)
    if not parameter.__dict__:
        return torch._utils._rebuild_parameter, arguments
    state = torch._utils._get_obj_state(parameter)  # type: ignore[no-untyped-call]
    return torch._utils._rebuild_parameter_with_state, (*arguments, state)


def _resting(values: Iterable[Any]) -> Iterator[Parameter]:
    """Yield the resting parameters among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Resting):
            yield cast(Parameter, value)
        elif isinstance(value, list | tuple):
            yield from _resting(value)


def aliases(result: Any, tensor: Tensor) -> bool:
    """Return whether a result may be the tensor's own memory."""
    if result is tensor or isinstance(result, bool | int | float | str | torch.Size):
        return False
    if isinstance(result, Tensor):
        if result.layout != torch.strided or result.device != tensor.device:
            return False
        while torch._C._functorch.is_functorch_wrapped_tensor(result):
            result = torch._C._functorch.get_unwrapped(result)
        mine, its = local_of(tensor).untyped_storage(), local_of(result).untyped_storage()
        return bool(mine._cdata == its._cdata)
    if isinstance(result, list | tuple):
        return any(aliases(each, tensor) for each in result)
    return True


leave_untraced(Resting.__torch_function__.__func__, run_touched, _embedded, aliases, _home_of)  # type: ignore[attr-defined]
