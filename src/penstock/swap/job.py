"""What can be suspended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.observe.recorder import Recorder
from penstock.tier.base import Tier

if TYPE_CHECKING:
    from penstock.swap.space import Space
    from penstock.swap.suspend import Suspended


class Job(Protocol):
    """What can be suspended; a :class:`penstock.Session` can."""

    suspended: Suspended | None
    """While it is."""
    space: Space | None
    """Where it rested last."""
    recorder: Recorder
    wrap_tier: Callable[[Tier], Tier] | None
    """Applied to each tier that is opened for it."""

    @property
    def directories(self) -> tuple[str, ...]:
        """Where it spills to."""

    @property
    def modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Those that it knows, outermost ones, by name."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that it knows."""

    def rest(self) -> None:
        """Give back to the system what it holds in reserve; it moves nothing until ``wake``."""

    def wake(self) -> None:
        """Take again what ``rest`` gave back, as far as that is not taken when it is needed."""
