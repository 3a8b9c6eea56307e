"""Time of an optimizer's update on the host, by the format of its records."""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Final

import torch

from penstock.core.errors import PenstockWarning
from penstock.optim import FlashAdamW

PARAMETERS: Final = 1 << 23
_STEPS: Final = 5


def measure(directory: str, states_format: str) -> float:
    """Return the seconds by which the update of one parameter delays computing.

    One thread updates, as it does during backward, and takes its time from all threads that compute.
    The records stay in memory, so that nothing moves.

    Args:
        directory: Directory of the optimizer's files.
        states_format: Format of the records.
    """
    dtype = torch.bfloat16 if states_format == "split" else torch.float32  # split is for that alone
    weight = torch.nn.Parameter(torch.ones(PARAMETERS, dtype=dtype))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = FlashAdamW(
        [weight],
        lr=1e-4,
        flash=directory,
        format=states_format,
        threads=1,
        host_memory=64 * PARAMETERS,
    )
    times = []
    try:
        with warnings.catch_warnings():
            # it warns that it needs no less memory than torch's own
            warnings.simplefilter("ignore", PenstockWarning)
            for _ in range(1 + _STEPS):
                begun = time.perf_counter()
                optimizer.step()
                times.append(time.perf_counter() - begun)
    finally:
        optimizer.close()
    return statistics.median(times[1:]) / PARAMETERS / torch.get_num_threads()
