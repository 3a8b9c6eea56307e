"""Optimizers for a processing element: their states, and their passes over a page of words.

The element of OptimStore (HPCA 2023) has four operations on pages of FP32 words. An update is a sequence
of them, one pass each; bias correction, the schedule, weight decay and unscaling are folded into their
constants. There is no division, and the small term that keeps a root from zero is inside the root.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.description import nearest


class PagePass(enum.StrEnum):
    """An operation on pages of words."""

    LINEAR = "linear"
    """``a x + b y``."""
    QUADRATIC = "quadratic"
    """``a x + b y y``."""
    MULTIPLY = "multiply"
    """``x y``."""
    INVERSE_ROOT = "inverse-root"
    """``1 / sqrt(x + e)``."""

    @property
    def multiplications(self) -> int:
        """Multiplications for each word; an inverse root has two Newton steps of three, and one."""
        return {"linear": 2, "quadratic": 3, "multiply": 1, "inverse-root": 6}[self.value]

    @property
    def additions(self) -> int:
        """Additions for each word."""
        return {"linear": 1, "quadratic": 1, "multiply": 0, "inverse-root": 2}[self.value]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """States and passes of one optimizer."""

    name: str
    states: tuple[str, ...]
    """States on flash, the weight first."""
    passes: tuple[PagePass, ...]
    """Passes in order."""


_SECOND: Final = (PagePass.QUADRATIC, PagePass.INVERSE_ROOT)
"""Passes of ``v = a v + b g g``, then its inverse root."""
_FACTOR: Final = (PagePass.MULTIPLY, PagePass.LINEAR)
"""Passes of a step that is a product; ``w = a w - b step``."""
_ADAM: Final = (PagePass.LINEAR, *_SECOND, *_FACTOR)

OPTIMIZERS: Final = {
    each.name: each
    for each in (
        Optimizer("sgd", ("weight",), (PagePass.LINEAR,)),
        Optimizer("momentum", ("weight", "momentum"), (PagePass.LINEAR, PagePass.LINEAR)),
        Optimizer("adagrad", ("weight", "sum"), (*_SECOND, *_FACTOR)),
        Optimizer("rmsprop", ("weight", "variance"), (*_SECOND, *_FACTOR)),
        Optimizer("adam", ("weight", "momentum", "variance"), _ADAM),
        Optimizer("adamw", ("weight", "momentum", "variance"), _ADAM),
    )
}
"""Optimizers by name. AdamW's decay is a constant of the last pass, so it takes as long as Adam."""


def optimizer(name: str) -> Optimizer:
    """Return one of ``OPTIMIZERS``. Raises ConfigError that names the nearest for an unknown name."""
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ConfigError(
            f"unknown optimizer {name!r}{nearest(name, OPTIMIZERS)}; use one of {known}"
        )
    return OPTIMIZERS[name]
