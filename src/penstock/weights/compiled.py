"""Modules that torch.compile has compiled, by ``torch.compile(module)`` or ``module.compile()``.

Such a module is entered as one: its graph needs the weights of all modules in it at once. The first form
is a module around it, whose calls hooks see. The second replaces the module's call, and hooks run within
the graph, if at all. So the call is replaced once more, by one that brings the weights before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.nn import Module

_CALL: Final = "_compiled_call_impl"
"""Attribute for which ``Module.__call__`` looks first."""


def is_compiled(module: Module) -> bool:
    """Return whether the weights of all modules in a module are needed when it is called."""
    return "_orig_mod" in module._modules or isinstance(module.__dict__.get(_CALL), CompiledCall)


def compiled_in_place(model: Module) -> Iterator[Module]:
    """Yield the modules whose calls ``module.compile()`` has replaced."""
    for module in model.modules():
        if hasattr(module.__dict__.get(_CALL), "_torchdynamo_orig_callable"):
            yield module


class CompiledCall:
    """Call of a module that was compiled in place, until ``undo``."""

    def __init__(
        self,
        module: Module,
        enter: Callable[[Module, tuple[Any, ...]], None],
        leave: Callable[[Module], None],
    ) -> None:
        """Replace the call.

        Args:
            module: The module; see ``compiled_in_place``.
            enter: Called before with the module and its arguments.
            leave: Called after it, also if ``enter`` or the call raises.
        """
        self._module = module
        self._enter = enter
        self._leave = leave
        self._call = module.__dict__[_CALL]
        module.__dict__[_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as it was compiled."""
        if torch.compiler.is_compiling():  # inside, the compiled region is the place
            return self._call(*args, **kwargs)
        try:
            self._enter(self._module, args)
            return self._call(*args, **kwargs)
        finally:
            self._leave(self._module)

    def undo(self) -> None:
        """Give the module its call back, unless other code has replaced it since."""
        if self._module.__dict__.get(_CALL) is self:
            self._module.__dict__[_CALL] = self._call
