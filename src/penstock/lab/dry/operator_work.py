"""Work of one operator call: floating-point operations, bytes moved, geometry of a convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from penstock.lab.dry.roofline import is_dense
from penstock.plan.operators import Convolution, Product

_aten: Final = torch.ops.aten
_NO_DATA_TOUCHED: Final = frozenset(
    {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operators that touch no data, though their results may be new storages."""
_UNREAD_ARGUMENT: Final = {
    **dict.fromkeys(
        [
            *("bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "uniform_"),
            *("zero_", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
            *("new_full", "new_ones", "new_zeros"),
        ],
        0,
    ),
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
    "max_pool2d_with_indices_backward": 1,
}
"""Argument that gives a shape or a place to write to, but is not read."""
_INDEXED: Final = frozenset({"embedding", "gather", "index_select", "nll_loss_forward"})
"""Operators that read of their first argument only what indices select, which is no more than there are
results or indices."""
_MATRIX_PRODUCTS: Final = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
}
"""Products of two matrices, and the index of the first matrix among the arguments."""
_FLOPS_EQUIVALENT: Final = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "_scaled_dot_product_flash_attention_backward"
    ),
}
"""Operators that PyTorch's flop counter lacks, and equivalent ones that it has."""


class OperatorWork(NamedTuple):
    """Work of one call."""

    name: str
    flops: int
    moved_bytes: int
    convolution: Convolution | None
    half: bool
    dense: bool
    product: Product | None


Args = Sequence[Any]
Options = Mapping[str, Any]


def work_of(func: Any, args: Args, options: Options, out: Any) -> OperatorWork | None:
    """Count the work of a call; ``None`` if it only made a view, or memory to be written later.

    Args:
        func: The operator, as ``TorchDispatchMode`` passes it.
        args: Its arguments.
        options: Its keyword arguments.
        out: Its result.
    """
    name = func._opname
    if name in _NO_DATA_TOUCHED:
        return None
    operands = list(tensors_in((*args, *options.values())))
    results = list(tensors_in((out,)))
    if not func._schema.is_mutable and results and _all_views(results, operands):
        return None
    written = [_touched_bytes(one) for one in results]
    moved_bytes = sum(_bytes_read(name, args, operands, written)) + sum(written)
    if not moved_bytes:
        return None
    full_name = f"{func.namespace}.{name}"
    convolution = _convolution(func, args, out)
    return OperatorWork(
        name=full_name,
        flops=_flops(func, args, options, out, convolution)
        or max(one.numel() for one in (*operands, *results)),
        moved_bytes=moved_bytes,
        convolution=convolution,
        half=_is_half(operands or results),
        dense=is_dense(full_name),
        product=_product(func, args),
    )


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _all_views(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> bool:
    sources = {one.untyped_storage()._cdata for one in operands}
    return all(one.untyped_storage()._cdata in sources for one in results)


def _bytes_read(
    name: str, args: Args, operands: Sequence[torch.Tensor], written: Sequence[int]
) -> Iterator[int]:
    """Yield the bytes read of each operand; equal operands count once."""
    unread = args[_UNREAD_ARGUMENT[name]] if name in _UNREAD_ARGUMENT else None
    table = args[0] if name in _INDEXED else None
    for one in {id(one): one for one in operands}.values():
        nbytes = _touched_bytes(one)
        if one is table:
            others = (_touched_bytes(other) for other in operands if other is not table)
            yield min(nbytes, max((*others, *written)))
        elif one is not unread:
            yield nbytes


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that exist in memory; an expanded one has fewer than elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_half(tensors: Sequence[torch.Tensor]) -> bool:
    floats = (one for one in tensors if one.is_floating_point())
    first = next(floats, None)
    return first is not None and first.element_size() == 2


def _flops(
    func: Any, args: Args, options: Options, out: Any, convolution: Convolution | None
) -> int:
    if convolution is not None:
        directions = sum(args[10][:2]) if func._opname == "convolution_backward" else 1
        return directions * _convolution_flops(convolution)
    packet = func.overloadpacket
    like = _FLOPS_EQUIVALENT.get(func._opname)
    formula: Callable[..., int] | None = flop_registry.get(getattr(_aten, like) if like else packet)
    return 0 if formula is None else formula(*args, **options, out_val=out)


def _convolution(func: Any, args: Args, out: Any) -> Convolution | None:
    """Return its geometry, also of a backward; ``None`` for other and for transposed convolutions."""
    if func is _aten.convolution.default:
        data, weight, result, (stride, transposed, groups) = (
            args[0],
            args[1],
            out,
            _geometry_arguments(args, 3),
        )
    elif func is _aten.convolution_backward.default:
        result, data, weight, (stride, transposed, groups) = *args[:3], _geometry_arguments(args, 4)
    else:
        return None
    if transposed:
        return None
    return Convolution(
        batch=data.shape[0],
        channels_in=data.shape[1],
        channels_out=weight.shape[0],
        groups=groups,
        input_size=tuple(data.shape[2:]),
        kernel_size=tuple(weight.shape[2:]),
        output_size=tuple(result.shape[2:]),
        stride=tuple(stride),
        element_bytes=data.element_size(),
    )


def _product(func: Any, args: Args) -> Product | None:
    """Return the sizes of the matrices that ``mm`` and the like multiply, or ``None``."""
    if func not in _MATRIX_PRODUCTS:
        return None
    one, other = args[_MATRIX_PRODUCTS[func] :][:2]
    *count, rows, depth = one.shape
    return Product(prod(count), rows, other.shape[-1], depth)


def _geometry_arguments(args: Args, first: int) -> tuple[Sequence[int], bool, int]:
    """Return stride, transposed and groups of arguments that begin with the stride."""
    return args[first], args[first + 3], args[first + 5]


def _convolution_flops(one: Convolution) -> int:
    """Return the operations of a forward; the gradient of input or weights takes as many."""
    per_output = 2 * (one.channels_in // one.groups) * prod(one.kernel_size)
    return one.batch * one.channels_out * prod(one.output_size) * per_output
