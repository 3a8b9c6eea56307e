"""A gradient that rests on flash, or is on its way there: what stands in ``.grad`` for it.

[Note: nobody has to know]
    Whoever uses such a gradient gets its values: torch hands each operation on it to
    ``__torch_dispatch__``, which has them read, and runs the operation on those. Where that changes it
    (autograd that adds to it, a clip, an unscaling), what is on flash is forgotten, and the keeper
    decides anew where it rests. Who takes a view of it may change it unseen, so from then on it stays in
    memory. When ``.grad`` is given up, so is its place on flash.
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


class Rest:
    """Place of the values of one gradient. The keeper's lock guards what changes.

    Attributes:
        param: Number of its parameter.
        dtype: Of the values.
        real: The values, in the parameter's shape and strides, while they are in memory.
        tickets: What is on flash, or on its way there, a piece for each tile; none: nothing is.
        unwritten: How many of these are on their way.
        norm: The values' 2-norm, if it is known.
        stays: Whether somebody has a view of ``real``.
    """

    __slots__ = ("__weakref__", "dtype", "norm", "param", "real", "stays", "tickets", "unwritten")

    def __init__(self, param: int, real: Tensor) -> None:
        """They are in memory."""
        self.param = param
        self.dtype = real.dtype
        self.real: Tensor | None = real
        self.tickets: list[Ticket] = []
        self.unwritten = 0
        self.norm: Tensor | None = None
        self.stays = False

    def hold(self, tier: Tier, tickets: list[Ticket]) -> None:
        """These are the values on flash, until ``self`` is gone or they are discarded."""
        self.tickets = tickets
        self.unwritten = len(tickets)
        weakref.finalize(self, defer, discard_all, tier, tickets).atexit = False


class InVain:
    """Which gradients leave in vain: at the step they are in memory, for somebody has replaced them.

    ``DistributedDataParallel(gradient_as_bucket_view=True)`` does so in each backward.
    """

    def __init__(self) -> None:
        """None has left."""
        self._left: set[int] = set()
        self._times: dict[int, int] = {}

    def __contains__(self, param: int) -> bool:
        """Return whether a parameter's gradient has left in vain in two steps, one after the other."""
        return self._times.get(param, 0) > 1

    def leaves(self, param: int) -> None:
        """A parameter's gradient is away."""
        self._left.add(param)

    def judge(self, grads: Mapping[int, Tensor]) -> list[int]:
        """A step begins with these gradients; those that have left in vain for the second time."""
        for param in self._left & grads.keys():
            is_away = isinstance(grads[param], Away)
            self._times[param] = 0 if is_away else self._times.get(param, 0) + 1
        found = [param for param in self._left if param in self]
        self._left.clear()
        return found


class Keeper(Protocol):
    """Source of gradients that are on flash or in memory."""

    def bring(self, rest: Rest, *, values: bool = True) -> Tensor:
        """The values, read if they are not in memory, in the parameter's shape, on its device.

        Not ``values``: only memory for new ones.
        """

    def changed(self, rest: Rest, real: Tensor) -> None:
        """These are the values now, and not those on flash."""


class Away(Tensor):
    """A gradient without memory, of its parameter's shape, strides and device."""

    rest: Rest
    _keeper: weakref.ref[
        Keeper
    ]  # the collector does not see what .grad holds, so no circle is closed

    @staticmethod
    def __new__(cls: type[Away], rest: Rest, keeper: Keeper, model: Tensor) -> Away:
        """Stand for a gradient of ``model``."""
        made: Away = torch.Tensor._make_wrapper_subclass(
            cls, model.shape, strides=model.stride(), dtype=rest.dtype, device=model.device
        )
        made.rest, made._keeper = rest, weakref.ref(keeper)
        return made

    @property
    def keeper(self) -> Keeper:
        """Source of the gradient's values. Raises ClosedError if it is gone."""
        found = self._keeper()
        if found is None:
            raise ClosedError(
                f"the gradient of parameter {self.rest.param} was on flash, and its optimizer is gone;"
                " set it to None, or keep the optimizer"
            )
        return found

    def __init__(self, rest: Rest, keeper: Keeper, model: Tensor) -> None:
        """See ``__new__``."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Without its values, which would have to be read."""
        return (
            f"Away(the gradient of parameter {self.rest.param}, {tuple(self.shape)}, {self.dtype})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the values. See [Note: nobody has to know]."""
        kwargs = kwargs or {}
        if _is_norm(func, args, kwargs) and args[0].rest.norm is not None:
            return args[0].rest.norm.clone()
        brought: dict[int, tuple[Away, Tensor]] = {}
        is_overwritten = func in _OVERWRITE and not any(each is args[0] for each in args[1:])

        def bring(grad: Away) -> Tensor:
            if id(grad) not in brought:
                values = not (is_overwritten and grad is args[0])
                brought[id(grad)] = grad, grad.keeper.bring(grad.rest, values=values)
            return brought[id(grad)][1]

        values, named = tree_map_only(cls, bring, (args, kwargs))
        out = func(*values, **named)
        stands_for = {}
        for grad in _written(func, args, kwargs):
            real = brought[id(grad)][1]
            grad.keeper.changed(grad.rest, real)
            stands_for[id(real)] = grad
        if _gives_views(func):
            for grad, real in brought.values():
                grad.rest.stays = True
                grad.keeper.changed(grad.rest, real)
        if _is_norm(func, args, kwargs):
            args[0].rest.norm = out.clone()
        return tree_map_only(Tensor, lambda each: stands_for.get(id(each), each), out)


def discard_all(tier: Tier, tickets: list[Ticket]) -> None:
    """Nobody will read these; those not written yet are not."""
    while tickets:
        tier.discard(tickets.pop())


def _is_norm(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether it is the 2-norm of one gradient."""
    return (
        func is torch.ops.aten.linalg_vector_norm.default
        and isinstance(args[0], Away)
        and tuple(args[1:]) in ((), (2,))
        and not kwargs
    )


def _gives_views(func: Any) -> bool:
    """Return whether what it returns shares memory with an argument that it does not write to."""
    infos = [each.alias_info for each in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def _written(func: Any, args: Any, kwargs: Any) -> list[Away]:
    """The gradients that an operation writes to, each once."""
    values = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return list({id(each): each for each in tree_leaves(values) if isinstance(each, Away)}.values())
