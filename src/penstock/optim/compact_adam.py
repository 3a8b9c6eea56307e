"""Which steps on compact states are made in one pass: those of Adam and AdamW, without amsgrad."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.optim import packing
from penstock.optim.formats import MASTER, Array, Form

_CLASSES: Final = (torch.optim.Adam, torch.optim.AdamW)
_STATES: Final = ("exp_avg", "exp_avg_sq")
_NO_HALVES: Final = np.empty(0, np.uint16)


def is_for(cls: type[torch.optim.Optimizer], form: Form) -> bool:
    """Return whether steps of a class on records of a form can be made by ``step``."""
    is_whole = form.master is None and form.param_dtype == torch.float32
    return (
        cls in _CLASSES
        and form.format in ("bf16", "int8")
        and (form.master == "low" or is_whole)
        and tuple(state.name for state in form.states) == _STATES
    )


def numbers_of(options: Mapping[str, Any], count: int) -> NDArray[np.float32]:
    """Factors and addends of step number ``count`` (from 1) with a group's options; float32[9]."""
    lr, eps = float(options["lr"]), float(options["eps"])
    decay = float(options["weight_decay"])
    beta1, beta2 = (float(beta) for beta in options["betas"])
    is_decoupled = bool(options["decoupled_weight_decay"])
    return np.array(
        [
            -1 if options["maximize"] else 1,
            1 - lr * decay if is_decoupled else 1,
            0 if is_decoupled else decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**count),
            eps,
            lr / (1 - beta1**count),
        ],
        np.float32,
    )


def step(
    arrays: Mapping[str, Array],
    memory: NDArray[np.uint8],
    at: int,
    weights: NDArray[Any],
    grads: NDArray[Any],
    *,
    numbers: NDArray[np.float32],
    keys: Sequence[int],
    first: int,
) -> None:
    """Update a piece of a tile.

    Args:
        arrays: Of the tile's record, by name.
        memory: The record.
        at: Where in the tile the piece begins.
        weights: Its weights, bits of bfloat16 (uint16) or float32 (uint32).
        grads: Its gradients, bits of bfloat16 (uint16) or float32 (uint32).
        numbers: As ``numbers_of`` has them.
        keys: What decides how each state is rounded.
        first: Index of the piece's first element in its parameter.
    """
    kernels = importlib.import_module("penstock.optim.adam_kernels")
    rounding = np.array(keys, np.uint32), np.uint32(first & 0xFFFFFFFF), numbers
    values = weights, _NO_HALVES, _NO_HALVES
    if MASTER in arrays:
        low = packing.halves(arrays[MASTER], memory, at, weights.size)
        values = np.empty(kernels.STRIP, np.uint32), weights, low
    states = [arrays[name] for name in _STATES]
    if states[0].packing == "bfloat16":
        m, v = (packing.halves(array, memory, at, weights.size) for array in states)
        kernels.step_bfloat16(*values, m, v, grads, *rounding)
        return
    packed = [part for array in states for part in packing.codes(array, memory, at, weights.size)]
    kernels.step_float8(*values, *packed, grads, *rounding)
