"""Optimizers as a processing element sees them: how many states, and which passes over a page of words.

The element of OptimStore (HPCA 2023) has four operations on pages of FP32 words. An update is a sequence
of them, one pass each; bias correction, the schedule, weight decay and unscaling are folded into their
constants. There is no division, and the small term that keeps a root from zero is inside it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from penstock.core.errors import ConfigError
from penstock.lab.ssd.description import nearest


class Pass(enum.StrEnum):
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
        """For each word; of the inverse root two Newton steps of three and one, from a table: assumed."""
        return {"linear": 2, "quadratic": 3, "multiply": 1, "inverse-root": 6}[self.value]

    @property
    def additions(self) -> int:
        """For each word."""
        return {"linear": 1, "quadratic": 1, "multiply": 0, "inverse-root": 2}[self.value]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer."""

    name: str
    states: tuple[str, ...]
    """What stays on flash, the weight first."""
    passes: tuple[Pass, ...]
    """In order."""


_SECOND: Final = (Pass.QUADRATIC, Pass.INVERSE_ROOT)
"""``v = a v + b g g``, then its inverse root."""
_FACTOR: Final = (Pass.MULTIPLY, Pass.LINEAR)
"""The step is a product; ``w = a w - b step``."""
_ADAM: Final = (Pass.LINEAR, *_SECOND, *_FACTOR)

OPTIMIZERS: Final = {
    each.name: each
    for each in (
        Optimizer("sgd", ("weight",), (Pass.LINEAR,)),
        Optimizer("momentum", ("weight", "momentum"), (Pass.LINEAR, Pass.LINEAR)),
        Optimizer("adagrad", ("weight", "sum"), (*_SECOND, *_FACTOR)),
        Optimizer("rmsprop", ("weight", "variance"), (*_SECOND, *_FACTOR)),
        Optimizer("adam", ("weight", "momentum", "variance"), _ADAM),
        Optimizer("adamw", ("weight", "momentum", "variance"), _ADAM),
    )
}
"""By name. AdamW's decay is the constant of the last pass, so it is as long as Adam."""


def optimizer(name: str) -> Optimizer:
    """One of ``OPTIMIZERS``. Raises ConfigError naming the nearest if there is none."""
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ConfigError(
            f"unknown optimizer {name!r}{nearest(name, OPTIMIZERS)}; known are {known}"
        )
    return OPTIMIZERS[name]
