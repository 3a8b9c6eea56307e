"""Compatibility with ``torch.func``, which refuses to run under saved-tensor hooks (TRAPS rule 25).

``torch.func.grad`` and its relatives enter ``torch.autograd.graph.disable_saved_tensors_hooks``, which
raises while any hook is active. While a session is attached, that function first removes the session's
hooks, if they are the innermost ones, and restores them afterwards. Tensors saved inside are not
offloaded, and the summary says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

_autograd: Any = torch._C._autograd


class FunctorchGuard:
    """Replaces ``disable_saved_tensors_hooks`` while attached.

    Attributes:
        times: Number of times that other code disabled the hooks.
    """

    def __init__(
        self,
        pack: Callable[..., Any],
        unpack: Callable[..., Any],
        *,
        on_unhook: Callable[[], None] = lambda: None,
    ) -> None:
        """Remember the pair of hooks, ``pack`` and ``unpack``, to remove and restore.

        ``on_unhook`` is called each time that other code disables the hooks.
        """
        self._pack = pack
        self._unpack = unpack
        self._on_unhook = on_unhook
        self._original: Any = None
        self.times = 0

    def attach(self) -> None:
        """Replace ``disable_saved_tensors_hooks``."""
        self._original = graph.disable_saved_tensors_hooks
        original = self._original

        @contextmanager
        def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
            if self._on_top():
                self.times += 1
                self._on_unhook()
            with self.unhooked(), original(error_message):
                yield

        graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks

    def detach(self) -> None:
        """Restore the original ``disable_saved_tensors_hooks``."""
        if self._original is not None:
            graph.disable_saved_tensors_hooks = self._original
            self._original = None

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Remove the session's hooks from this thread inside the block, if they are the innermost."""
        if not self._on_top():
            yield
            return
        _autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    def _on_top(self) -> bool:
        top = _autograd._top_saved_tensors_default_hooks(True)  # True: also while disabled
        return top is not None and bool(top[0] == self._pack)
