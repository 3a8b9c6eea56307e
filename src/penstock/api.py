"""The function ``penstock.offload``."""

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
    memory: int | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    flash: str | Path | tuple[str | Path, ...] | list[str | Path] = (),
    policy: str | Path | Plan = "auto",
    config: OffloadConfig | None = None,
    **settings: Any,
) -> Session:
    """Keep what a training step holds within a limit by offloading the rest to flash and host memory.

    ::

        with penstock.offload(model, memory="8GiB", flash="/nvme/spill") as session:
            ...  # any training loop
        print(session.summary())

    In a notebook, ``session = penstock.offload(model, ...).open()`` opens it until ``session.close()``.
    Losses, gradients and weights are bit-identical to the same run without Penstock.

    Args:
        model: Determines the names of slots and the device. Without it, modules are named when they are
            first called, and the device is CUDA if there is one.
        optimizer: Its state is never offloaded. Without it, an optimizer is found at its first step.
        memory: Limit of the host memory that Penstock holds in this process, by whichever part; bytes as
            an integer, or a string such as ``"8GiB"``. With ``"auto"``, or a share such as ``"60%"``, the
            whole process stays within the memory that is available, or within that share of it.
        device_memory: Limit of saved tensors, for each device, within ``memory`` if that is the host's.
            Default: none but ``memory``; on CUDA the memory that the rest of a step leaves free.
        host_memory: Limit of the host tier, within ``memory``.
        flash: Directory on flash to offload to, or several.
        policy: Name of a policy (``penstock.plan.policies.names()``) that makes plans from measurements,
            or a user plan: a :class:`penstock.plan.Plan`, or the path of a ``.json`` file with one.
        config: All settings in one value, in place of the keywords.
        **settings: The other fields of :class:`penstock.OffloadConfig`.

    Raises:
        ConfigError: A setting is invalid, or a directory is not usable.
        PlanError: The plan cannot be parsed.
    """
    if config is not None:
        limits = (memory, device_memory, host_memory)
        if settings or any(each is not None for each in limits) or flash or policy != "auto":
            raise ConfigError("offload: pass either config or its fields as keywords, not both")
        return Session(config, model=model, optimizer=optimizer)
    paths = tuple(flash) if isinstance(flash, list) else flash
    plan = policy if isinstance(policy, Plan) else None
    fields = {
        "memory": memory,
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
