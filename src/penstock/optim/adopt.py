"""Scripts that build a known torch optimizer get it with its states on flash."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.core import knobs
from penstock.core.errors import ConfigError, PenstockWarning
from penstock.core.units import format_bytes
from penstock.optim.memory import memory_notes
from penstock.optim.optimizer import OnFlash, on_flash
from penstock.optim.wear import wear_of

KNOWN: Final = tuple(
    getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""Classes of torch that are adopted; subclasses of them, which may do anything, are not."""


class Adoption:
    """While it lasts, optimizers of the known classes put their states on flash when they are made.

    Attributes:
        adopted: Those that were.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        floor_bytes: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Begin.

        Args:
            settings: Fields of ``StatesConfig``.
            floor_bytes: Bytes of parameters below which states stay in memory; ``knobs.floor_bytes()``
                if None.
            tell: Called with what each adopted optimizer costs the SSD, before its first step.
        """
        self._tell = tell
        self._floor_bytes = knobs.floor_bytes() if floor_bytes is None else floor_bytes
        self._told_of_small = False
        self.adopted: list[torch.optim.Optimizer] = []
        self._settings = dict(settings)
        self._originals: dict[type[Any], Any] = {}
        for cls in KNOWN:
            self._originals[cls] = cls.__init__
            cls.__init__ = self._wrapped(cls, cls.__init__)

    def end(self) -> None:
        """Adopt no more."""
        for cls, original in self._originals.items():
            cls.__init__ = original
        self._originals.clear()

    def _wrapped(self, cls: type[Any], original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if type(optimizer) is cls:
                self._adopt(optimizer)

        return made

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        nbytes = sum(p.numel() * p.element_size() for p in params)
        name = type(optimizer).__name__
        if nbytes < self._floor_bytes:
            self._tell_once(
                f"{name}: optimizer states stay in memory: {format_bytes(nbytes)} of parameters are"
                f" below the floor of {format_bytes(self._floor_bytes)}, and not worth a file"
            )
            return
        try:
            on_flash(optimizer, **self._settings)
        except ConfigError as error:
            if any(map(is_traceable_wrapper_subclass, params)):
                raise  # a model that is sharded to save memory has none for these states
            warnings.warn(
                f"the states of this {name} stay in memory: {error}", PenstockWarning, stacklevel=4
            )
            return
        self.adopted.append(optimizer)
        if self._tell is not None:
            states = cast(OnFlash, optimizer)._penstock
            states.has_reported_costs = True
            for text in (wear_of(states), *memory_notes(states)):
                self._tell(f"{name}: {text}")

    def _tell_once(self, text: str) -> None:
        """Report a small optimizer once: a script may make thousands."""
        if self._tell is not None and not self._told_of_small:
            self._tell(text)
        self._told_of_small = True
