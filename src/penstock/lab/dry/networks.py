"""Dry profiles of the zoo's networks, by name."""

from __future__ import annotations

import torch

from penstock.lab import zoo
from penstock.lab.dry.profile import DryStep, dry_step
from penstock.lab.zoo.base import Setting
from penstock.plan.machine import Machine


def dry_zoo_step(
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
) -> DryStep:
    """Profile one training step of a network of the zoo, without its memory, data, or the machine.

    Args:
        name: Name of the network, as for :func:`penstock.lab.zoo.build`.
        batch_size: Number of images or sequences.
        machine: Machine for which the step is timed; see :func:`.dry_step` for what follows.
        device: ``"cpu"`` or ``"cuda"``, whose kernels compute.
        optimizer_state_copies: Number of tensors of a parameter's size that the optimizer keeps.
        autocast: ``"bfloat16"``, ``"float16"`` or ``None``.
        whole_device: True to profile all device memory, False for saved tensors only.
        floor_bytes: Smallest storage that is a slot.
        overrides: Settings as for ``zoo.build``: ``size="tiny"``, ``image_size``, ...

    Raises:
        ConfigError: The network or a setting is unknown, the batch is empty, or as :func:`.dry_step`.
    """
    config = zoo.config(name, **overrides)  # type: ignore[arg-type]
    with torch.device("meta"):
        network = zoo.build(name, **overrides)  # type: ignore[arg-type]
        batch = zoo.empty_batch(config, batch_size)
    nonzero_count = None
    if isinstance(config, zoo.LanguageConfig) and config.objective == "masked":
        nonzero_count = batch_size * zoo.masked_count(config.sequence_length)
    return dry_step(
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
