"""``penstock.offload``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.core.config import OffloadConfig
from penstock.core.errors import ConfigError
from penstock.plan.plan import Plan
from penstock.session import Session, close

__all__ = ["Session", "close", "offload"]


def offload(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str = 0,
    flash: str | Path | tuple[str | Path, ...] | list[str | Path] = (),
    policy: str | Path | Plan = "auto",
    config: OffloadConfig | None = None,
    **settings: Any,
) -> Session:
    """Keep what autograd saves for backward within ``device_memory``; the rest goes to tiers and back.

    ::

        with penstock.offload(model, device_memory="2GiB", flash="/nvme/spill") as session:
            ...  # any training loop
        print(session.summary())

    In a notebook, ``session = penstock.offload(model, ...).open()`` opens it until ``session.close()``.
    Losses, gradients and weights are bit-identical to the same run without it.

    Args:
        model: Names the slots, and tells on which device they are. Without one, modules are named as
            they are first called, and the device is CUDA where there is one.
        optimizer: Its state is never moved; known by itself after its first step.
        device_memory: Budget in the memory of the device, of each if there are several; an integer in
            bytes, or as ``"2GiB"``. Without: no limit, or on CUDA what the rest of a step leaves free.
        host_memory: Budget of the host tier.
        flash: Directory to spill to, or several.
        policy: The name of a policy (``penstock.plan.policies.names()``), by which plans are made of what
            is measured; or a :class:`penstock.plan.Plan`, or the path of a ``.json`` file with one, that
            is followed as it is.
        config: All settings in one value, instead of the keywords.
        **settings: The other fields of :class:`penstock.OffloadConfig`.

    Raises:
        ConfigError: A setting makes no sense, or a directory cannot be spilled to.
        PlanError: The plan does not parse.
    """
    if config is not None:
        if settings or device_memory is not None or host_memory or flash or policy != "auto":
            raise ConfigError("offload: give either config or its fields as keywords, not both")
        return Session(config, model=model, optimizer=optimizer)
    paths = tuple(flash) if isinstance(flash, list) else flash
    plan = policy if isinstance(policy, Plan) else None
    fields = {
        "device_memory": device_memory,
        "host_memory": host_memory,
        "flash": paths,
        "policy": str(policy) if plan is None else plan.policy,
        **settings,
    }
    return Session(
        OffloadConfig.from_mapping(fields, source="offload"),
        model=model,
        optimizer=optimizer,
        plan=plan,
    )
