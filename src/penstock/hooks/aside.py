"""Stepping aside for ``torch.func``, which refuses to run under saved-tensor hooks (TRAPS rule 25).

``torch.func.grad`` and its kin enter ``torch.autograd.graph.disable_saved_tensors_hooks``, which raises
while any hook is active. While a session is attached that function first takes the session's hooks off,
if they are the innermost ones, and puts them back afterwards: what runs inside is not offloaded, and the
summary says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

_autograd: Any = torch._C._autograd


class StepAside:
    """Replaces ``disable_saved_tensors_hooks`` while attached.

    Attributes:
        times: How often it had to step aside for somebody else.
    """

    def __init__(
        self,
        pack: Callable[..., Any],
        unpack: Callable[..., Any],
        *,
        on_aside: Callable[[], None] = lambda: None,
    ) -> None:
        """For the hooks that ``pack`` and ``unpack`` were pushed as.

        ``on_aside`` is called whenever it has to step aside for somebody else.
        """
        self._pack = pack
        self._unpack = unpack
        self._on_aside = on_aside
        self._original: Any = None
        self.times = 0

    def attach(self) -> None:
        """Begin to step aside."""
        self._original = graph.disable_saved_tensors_hooks
        original = self._original

        @contextmanager
        def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
            if self._on_top():
                self.times += 1
                self._on_aside()
            with self.aside(), original(error_message):
                yield

        graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks

    def detach(self) -> None:
        """Stop."""
        if self._original is not None:
            graph.disable_saved_tensors_hooks = self._original
            self._original = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within, this thread saves tensors as if there were no session (unless it was not hooked)."""
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
