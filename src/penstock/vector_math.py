"""First calls of MKL's vector functions, before two threads can make one at the same moment.

On x86 PyTorch computes square roots, exponentials and the like with MKL. At the first call of each
function MKL looks up the code for this processor. Where two threads make that first call at the same
moment, MKL 2024.2, which the wheels of PyTorch 2.13 contain, may compute the part of one thread with a
relative error of 3e-4, in that call only (https://github.com/pytorch/pytorch/issues/188792). Other busy
threads make it likelier, and Penstock has such threads.
"""

from __future__ import annotations

import functools

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log", "log10", "log2", "sin"),
    *("sqrt", "tan", "tanh", "trunc"),
)
"""Functions that PyTorch computes with MKL, of tensors of float32 and float64 on the CPU."""


@functools.cache
def look_up_kernels() -> None:
    """Have MKL look up the code of its vector functions, in this thread, once in a process.

    It takes about two milliseconds, and changes no tensor and no random state.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
