"""A gradient on flash, or on its way there, and the tensor that stands in ``.grad`` for it.

[Note: transparent use]
    Any use of such a gradient gets its values: torch hands each operation on it to
    ``__torch_dispatch__``, which reads them and runs the operation on those. If the operation changes
    it (autograd adds to it, a clip, an unscaling), the bytes on flash are discarded, and the source
    decides again where it is kept. A view may change it unnoticed, so from then on it stays in
    memory. When ``.grad`` is dropped, so is its place on flash.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from penstock.core.errors import ClosedError
from penstock.core.locks import defer
from penstock.store.base import Ticket, Tier

_OVERWRITE: Final = (torch.ops.aten.copy_.default, torch.ops.aten.zero_.default)
"""Operators for which the old contents of their first argument do not matter."""


class GradientPlace:
    """Place of the values of one gradient. The source's lock guards what changes.

    Attributes:
        param: Number of its parameter.
        dtype: Of the values.
        real: The values, in the parameter's shape and strides, while they are in memory.
        tickets: Claims on the pieces on flash, or on their way there, one for each tile; may be empty.
        unwritten: Number of pieces on their way.
        norm: The values' 2-norm, if it is known.
        stays: True once a view of ``real`` was taken.
    """

    __slots__ = ("__weakref__", "dtype", "norm", "param", "real", "stays", "tickets", "unwritten")

    def __init__(self, param: int, real: Tensor) -> None:
        """Describe a gradient in memory."""
        self.param = param
        self.dtype = real.dtype
        self.real: Tensor | None = real
        self.tickets: list[Ticket] = []
        self.unwritten = 0
        self.norm: Tensor | None = None
        self.stays = False

    def hold(self, tier: Tier, tickets: list[Ticket]) -> None:
        """Claim these bytes on flash, until ``self`` is gone or they are discarded."""
        self.tickets = tickets
        self.unwritten = len(tickets)
        weakref.finalize(self, defer, discard_all, tier, tickets).atexit = False


class ReplacedGradients:
    """Gradients that are offloaded for nothing: before the step, others in memory replace them.

    ``DistributedDataParallel(gradient_as_bucket_view=True)`` replaces them in each backward.
    """

    def __init__(self) -> None:
        """Begin with no gradient offloaded."""
        self._left: set[int] = set()
        self._times: dict[int, int] = {}

    def __contains__(self, param: int) -> bool:
        """Return whether a parameter's gradient was offloaded for nothing in two steps in a row."""
        return self._times.get(param, 0) > 1

    def leaves(self, param: int) -> None:
        """Note that a parameter's gradient was offloaded."""
        self._left.add(param)

    def judge(self, grads: Mapping[int, Tensor]) -> list[int]:
        """Return the parameters whose gradients, as a step begins, were replaced for the second time."""
        for param in self._left & grads.keys():
            is_away = isinstance(grads[param], OffloadedGradient)
            self._times[param] = 0 if is_away else self._times.get(param, 0) + 1
        found = [param for param in self._left if param in self]
        self._left.clear()
        return found


class GradientSource(Protocol):
    """Source of gradients that are on flash or in memory."""

    def bring(self, place: GradientPlace, *, values: bool = True) -> Tensor:
        """Return the values, read if they are not in memory, in the parameter's shape, on its device.

        Without ``values``, return memory for new ones.
        """

    def changed(self, place: GradientPlace, real: Tensor) -> None:
        """Take ``real`` as the values from now on, in place of those on flash."""


class OffloadedGradient(Tensor):
    """A gradient without memory, of its parameter's shape, strides and device."""

    place: GradientPlace
    _source: weakref.ref[
        GradientSource
    ]  # the collector does not see what .grad holds, so no circle is closed

    @staticmethod
    def __new__(
        cls: type[OffloadedGradient], place: GradientPlace, source: GradientSource, model: Tensor
    ) -> OffloadedGradient:
        """Stand for a gradient of ``model``."""
        made: OffloadedGradient = torch.Tensor._make_wrapper_subclass(
            cls, model.shape, strides=model.stride(), dtype=place.dtype, device=model.device
        )
        made.place, made._source = place, weakref.ref(source)
        return made

    @property
    def source(self) -> GradientSource:
        """Source of the gradient's values. Raises ClosedError if it is gone."""
        found = self._source()
        if found is None:
            raise ClosedError(
                f"the gradient of parameter {self.place.param} was not in memory, and its optimizer is"
                " gone; set it to None, or keep the optimizer"
            )
        return found

    def __init__(self, place: GradientPlace, source: GradientSource, model: Tensor) -> None:
        """See ``__new__``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return a text without the values, which would have to be read."""
        what = f"gradient of parameter {self.place.param}"
        return f"OffloadedGradient({what}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the values. See [Note: transparent use]."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.is_pinned.default:
            return False
        if _is_norm(func, args, kwargs) and args[0].place.norm is not None:
            return args[0].place.norm.clone()
        brought: dict[int, tuple[OffloadedGradient, Tensor]] = {}
        is_overwritten = func in _OVERWRITE and not any(each is args[0] for each in args[1:])

        def bring(grad: OffloadedGradient) -> Tensor:
            if id(grad) not in brought:
                values = not (is_overwritten and grad is args[0])
                brought[id(grad)] = grad, grad.source.bring(grad.place, values=values)
            return brought[id(grad)][1]

        values, named = tree_map_only(cls, bring, (args, kwargs))
        out = func(*values, **named)
        stands_for = {}
        for grad in _written(func, args, kwargs):
            real = brought[id(grad)][1]
            grad.source.changed(grad.place, real)
            stands_for[id(real)] = grad
        if _gives_views(func):
            for grad, real in brought.values():
                grad.place.stays = True
                grad.source.changed(grad.place, real)
        if _is_norm(func, args, kwargs):
            args[0].place.norm = out.clone()
        return tree_map_only(Tensor, lambda each: stands_for.get(id(each), each), out)


def discard_all(tier: Tier, tickets: list[Ticket]) -> None:
    """Discard claims that are not read any more; cancel those that are not written yet."""
    while tickets:
        tier.discard(tickets.pop())


def _is_norm(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether it is the 2-norm of one gradient."""
    return (
        func is torch.ops.aten.linalg_vector_norm.default
        and isinstance(args[0], OffloadedGradient)
        and tuple(args[1:]) in ((), (2,))
        and not kwargs
    )


def _gives_views(func: Any) -> bool:
    """Return whether what it returns shares memory with an argument that it does not write to."""
    infos = [each.alias_info for each in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _written(func: Any, args: Any, kwargs: Any) -> list[OffloadedGradient]:
    """Return the gradients that an operation writes to, each once."""
    values = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return list(
        {
            id(each): each for each in tree_leaves(values) if isinstance(each, OffloadedGradient)
        }.values()
    )
