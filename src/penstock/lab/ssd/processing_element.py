"""Arithmetic of a processing element: a weight update on pages of words, by its four operations.

:mod:`.closed_form` and :mod:`.simulation` compute the time of an update; this module computes its result.
The element of OptimStore (HPCA 2023) has no divider and no root: Adam is fused into the five passes that
:mod:`.optimizers` counts, and values that are the same for all words (the rate, both bias corrections,
decay, the scale of gradients) are computed once in the controller and broadcast, as constants of passes.

The paper states the operations, FP32, and the fused Adam without division. Assumed, and adjustable here:
the inverse root is a first guess from the bits of a number and Newton steps, two as
:class:`~penstock.lab.ssd.optimizers.PagePass` counts them; every product and sum is rounded to nearest
FP32 by itself; a state of two bytes is bfloat16.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ConfigError
from penstock.lab.ssd.optimizers import OPTIMIZERS, PagePass, optimizer

Words = npt.NDArray[np.float32]
"""Words in the element: FP32, of any shape."""
Page = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""Words in flash: FP32, or the upper halves of FP32 words (bfloat16)."""

_MAGIC: Final = np.uint32(0x5F37_59DF)
"""Constant of the first guess (Lomont, 2003), which is at most 3.5 % off."""
_HALF: Final = np.float32(0.5)
_ONE_AND_A_HALF: Final = np.float32(1.5)


class Rounding(enum.StrEnum):
    """Conversion of an FP32 word to one of two bytes."""

    NEAREST = "nearest"
    """Round to nearest, ties to even."""
    ZERO = "zero"
    """Drop the lower half, which needs no hardware."""
    STOCHASTIC = "stochastic"
    """Round up with a probability equal to the lower half: add random bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Constants of one step: a and b of each linear and quadratic pass, and e of the root."""

    linear: tuple[tuple[float, float], ...]
    """(a, b) of ``a x + b y``, in the order of the passes."""
    quadratic: tuple[float, float] | None = None
    """(a, b) of ``a x + b y y``."""
    root_term: float = 0.0
    """Term e of ``1 / sqrt(x + e)``."""


def constants(
    name: str,
    number: int,
    *,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.9,
    decay: float = 0.0,
    scale: float = 1.0,
) -> Constants:
    """Compute the constants of a step, in double precision, as the controller does.

    Torch's Adam divides by ``sqrt(v) / sqrt(c2) + eps``, with the bias corrections c1 and c2; the
    element multiplies by ``1 / sqrt(v + eps^2 c2)`` with a rate of ``rate sqrt(c2) / c1``. Both are
    equal where v is 0 or large; between them the element's step is larger, by a factor of at most
    root 2.

    Args:
        name: Name of the optimizer: sgd, momentum, adam or adamw.
        number: Number of the step, from 1.
        rate: Learning rate, with its schedule.
        betas: Betas of Adam's moments.
        eps: Adam's eps, as in torch.
        momentum: Momentum's momentum.
        decay: Decoupled weight decay, as in AdamW; for all but adam.
        scale: Factor by which gradients are too large.

    Raises:
        ConfigError: The element has no program for the optimizer, or decay for adam.
    """
    if number < 1 or scale <= 0:
        raise ConfigError(
            f"step {number} at a scale of {scale}: the step must be 1 or more, and the scale above 0"
        )
    kept = 1 - rate * decay
    if name == "sgd":
        return Constants(linear=((kept, -rate / scale),))
    if name == "momentum":
        return Constants(linear=((momentum, 1 / scale), (kept, -rate)))
    if name not in {"adam", "adamw"}:
        raise ConfigError(f"the element has no program for {optimizer(name).name}")
    if name == "adam" and decay:
        raise ConfigError("the element has no pass for Adam's decay; adamw has it in a constant")
    first, second = 1 - betas[0] ** number, 1 - betas[1] ** number
    return Constants(
        linear=((betas[0], (1 - betas[0]) / scale), (kept, -rate * math.sqrt(second) / first)),
        quadratic=(betas[1], (1 - betas[1]) / scale**2),
        root_term=eps**2 * second,
    )


def inverse_root(x: Words, newton_steps: int = 2) -> Words:
    """Compute ``1 / sqrt(x)`` of positive FP32 words, by a first guess from the bits and Newton steps.

    A Newton step is three products and one difference, ``y (1.5 - (x / 2) y y)``; a half is one less in
    the exponent. For a negative number above -0.2, such as a variance with a wrong sign bit, the result
    is tiny and not NaN; there is no error, as on a die that checks nothing.
    """
    half = x * _HALF
    y = (_MAGIC - (x.view(np.uint32) >> np.uint32(1))).view(np.float32)
    for _ in range(newton_steps):
        y = y * (_ONE_AND_A_HALF - half * y * y)
    return y


def to_fp32(page: Page) -> Words:
    """Return a page in the element's words, exactly; an FP32 page is copied."""
    if page.dtype == np.float32:
        return page.astype(np.float32)
    return (page.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """A processing element, described by its arithmetic; it holds no states.

    Attributes:
        newton_steps: Newton steps of the inverse root.
        state_bytes: Bytes of each state of the optimizer, 4 or 2, the weight first; empty for 4 each.
        rounding: Rounding of states of two bytes.
        random: Source of stochastic rounding.
        read: Called with each page of states that was read, to corrupt a copy of it in place: see
            :class:`~penstock.lab.ssd.bit_flips.BitFlips`.
        check: Called with the words that go to the element, to correct them in place.
    """

    newton_steps: int = 2
    state_bytes: tuple[int, ...] = ()
    rounding: Rounding = Rounding.NEAREST
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    read: Callable[[Page], None] | None = None
    check: Callable[[Words], None] | None = None

    def __post_init__(self) -> None:
        if self.newton_steps < 0:
            raise ConfigError(f"newton_steps is {self.newton_steps}; it must be 0 or more")
        if any(size not in {2, 4} for size in self.state_bytes):
            raise ConfigError(f"state_bytes is {self.state_bytes}; the element supports 4 and 2")

    def programmed(self, name: str, weights: Words) -> tuple[Page, ...]:
        """Return the pages of an optimizer's states before its first step: the weights, and zeros.

        Args:
            name: Name of the optimizer.
            weights: FP32, of any shape, which all states get.
        """
        states = optimizer(name).states
        sizes = self._sizes(name)
        begin = (weights, *[np.zeros_like(weights)] * (len(states) - 1))
        return tuple(self._stored(one, size) for one, size in zip(begin, sizes, strict=True))

    def step(
        self, name: str, pages: Sequence[Page], gradient: Words, broadcast: Constants
    ) -> tuple[Page, ...]:
        """Make one step of all words; return the states as they are programmed, the weight first.

        Args:
            name: Name of the optimizer.
            pages: States on flash, which are not changed.
            gradient: FP32, of the shape of the states.
            broadcast: Constants of the step.
        """
        states = [self._loaded(page) for page in pages]
        with np.errstate(all="ignore"):  # a die raises no errors
            new = self._passes(name, states, gradient, broadcast)
        sizes = self._sizes(name)
        return tuple(self._stored(one, size) for one, size in zip(new, sizes, strict=True))

    def _passes(
        self, name: str, states: Sequence[Words], gradient: Words, broadcast: Constants
    ) -> Sequence[Words]:
        run = _Run(broadcast, self.newton_steps)
        if name == "sgd":
            new = [run.linear(states[0], gradient)]
        elif name == "momentum":
            moment = run.linear(states[1], gradient)
            new = [run.linear(states[0], moment), moment]
        else:
            moment = run.linear(states[1], gradient)
            variance = run.quadratic(states[2], gradient)
            factor = run.multiply(moment, run.inverse_root(variance))
            new = [run.linear(states[0], factor), moment, variance]
        assert run.done == list(OPTIMIZERS[name].passes)
        return new

    def _sizes(self, name: str) -> tuple[int, ...]:
        states = optimizer(name).states
        if self.state_bytes and len(self.state_bytes) != len(states):
            raise ConfigError(
                f"state_bytes has {len(self.state_bytes)} values, but {name} has {len(states)} states:"
                f" {', '.join(states)}"
            )
        return self.state_bytes or (4,) * len(states)

    def _loaded(self, page: Page) -> Words:
        if self.read is not None:
            page = page.copy()
            self.read(page)
        words = to_fp32(page)
        if self.check is not None:
            self.check(words)
        return words

    def _stored(self, words: Words, size: int) -> Page:
        return words if size == 4 else to_bfloat16(words, self.rounding, self.random)


class _Run:
    """The passes of one step, in order, each on all words; the model of time counts the same passes."""

    def __init__(self, broadcast: Constants, newton_steps: int) -> None:
        self._linear = iter(broadcast.linear)
        self._constants = broadcast
        self._steps = newton_steps
        self.done: list[PagePass] = []

    def linear(self, x: Words, y: Words) -> Words:
        self.done.append(PagePass.LINEAR)
        a, b = map(np.float32, next(self._linear))
        return a * x + b * y

    def quadratic(self, x: Words, y: Words) -> Words:
        self.done.append(PagePass.QUADRATIC)
        assert self._constants.quadratic is not None
        a, b = map(np.float32, self._constants.quadratic)
        return a * x + b * (y * y)

    def multiply(self, x: Words, y: Words) -> Words:
        self.done.append(PagePass.MULTIPLY)
        return x * y

    def inverse_root(self, x: Words) -> Words:
        self.done.append(PagePass.INVERSE_ROOT)
        return inverse_root(x + np.float32(self._constants.root_term), self._steps)


def to_bfloat16(
    words: Words, rounding: Rounding, random: np.random.Generator
) -> npt.NDArray[np.uint16]:
    """Convert FP32 words to bfloat16, which is their upper half; NaN stays NaN.

    Args:
        words: FP32, of any shape.
        rounding: Treatment of the lower half.
        random: Source of stochastic rounding.
    """
    bits = np.ascontiguousarray(words).view(np.uint32)
    added: npt.NDArray[np.uint32] | np.uint32 = np.uint32(0)
    if rounding is Rounding.NEAREST:
        added = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif rounding is Rounding.STOCHASTIC:
        added = random.integers(0, 1 << 16, bits.shape, np.uint32)
    finite = np.isfinite(words)
    upper = np.where(finite, bits + added, bits) >> np.uint32(16)
    # a NaN whose payload is in the lower half only would become infinite
    upper = np.where(np.isnan(words), upper | np.uint32(0x40), upper)
    return upper.astype(np.uint16)
