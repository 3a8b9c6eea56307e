"""Dry profiles of the zoo's networks, by name."""

from __future__ import annotations

import torch

from penstock.lab import zoo
from penstock.lab.dry.profile import dry_profile
from penstock.lab.zoo.base import Setting
from penstock.plan.machine import Machine
from penstock.plan.profile import Profile


def dry_zoo_profile(
    name: str,
    batch_size: int,
    *,
    machine: Machine,
    device: str = "cpu",
    optimizer_state_copies: int = 0,
    autocast: str | None = None,
    whole_device: bool = True,
    floor_bytes: int | None = None,
    **overrides: Setting,
) -> Profile:
    """Profile one training step of a network of the zoo without memory, data, or the machine.

    Args:
        name: As for :func:`penstock.lab.zoo.build`.
        batch_size: Images or sequences.
        machine: As for :func:`.dry_profile`, and so the next ones.
        device: ``"cpu"`` or ``"cuda"``: whose kernels compute.
        optimizer_state_copies: Tensors of a parameter's size that the optimizer keeps.
        autocast: ``"bfloat16"``, ``"float16"`` or ``None``.
        whole_device: Whether it is of all device memory, or of saved tensors only.
        floor_bytes: Storages below it are no slots.
        overrides: As for ``zoo.build``: ``size="tiny"``, ``image_size``, ``sequence_length``, ...

    Raises:
        ConfigError: No such network or setting, a batch of none, or as :func:`.dry_profile`.
    """
    config = zoo.config(name, **overrides)  # type: ignore[arg-type]
    with torch.device("meta"):
        network = zoo.build(name, **overrides)  # type: ignore[arg-type]
        batch = zoo.empty_batch(config, batch_size)
    nonzero_count = None
    if isinstance(config, zoo.LanguageConfig) and config.objective == "masked":
        nonzero_count = batch_size * zoo.masked_count(config.sequence_length)
    return dry_profile(
        network,
        lambda model, inputs, targets: model(inputs, targets),
        machine=machine,
        inputs=batch,
        device=device,
        optimizer_state_copies=optimizer_state_copies,
        autocast=autocast,
        whole_device=whole_device,
        floor_bytes=floor_bytes,
        nonzero_count=nonzero_count,
    )
