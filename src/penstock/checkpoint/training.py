"""Training state: everything that the next steps depend on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.core.errors import CheckpointError, MismatchError


class Rng:
    """The random generators of the process: Python's, NumPy's, torch's, and those of all CUDA devices."""

    def state_dict(self) -> dict[str, Any]:
        """Return their present states."""
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": random.getstate(),
            "numpy": [name, keys, position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set their states. Raises MismatchError, and sets none, if the devices differ."""
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        saved = state_dict["cuda"]
        if len(saved) != devices:
            raise MismatchError(
                f"the checkpoint has random generators of {len(saved)} CUDA devices, and there are"
                f" {devices} here: resume on as many, or load a part: partial=True, without 'rng'"
            )
        random.setstate(state_dict["python"])
        np.random.set_state(tuple(state_dict["numpy"]))
        torch.set_rng_state(state_dict["torch"].cpu())
        if devices:
            torch.cuda.set_rng_state_all([each.cpu() for each in saved])


def training_state(*, step: int = 0, **parts: Any) -> dict[str, Any]:
    """Return a state to save and to load into, with which a resumed run equals one that never stopped.

    It includes the process's random generators, as ``rng``.

    Args:
        step: Number of steps so far; after a load the saved one is at ``["step"]``.
        parts: Objects with ``state_dict`` and ``load_state_dict`` (model, optimizer, scheduler, scaler,
            sampler or data loader, average of weights), or other values, such as a position in the data.
            None is left out.

    Raises:
        CheckpointError: A part is called ``rng``.

    Example:
        ``state = training_state(model=model, optimizer=optimizer, scheduler=scheduler, step=n)``
    """
    if "rng" in parts:
        raise CheckpointError("'rng' is a part of every training state: call yours otherwise")
    made = {name: part for name, part in parts.items() if part is not None}
    made["step"] = step
    made["rng"] = Rng()  # last: what is loaded before it may draw numbers
    return made
