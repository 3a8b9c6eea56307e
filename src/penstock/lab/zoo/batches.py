"""Example batches, in the shapes that a network's configuration asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.lab.zoo.base import (
    IGNORE,
    Batch,
    Config,
    LanguageConfig,
    Network,
    Setting,
    VisionConfig,
)
from penstock.lab.zoo.registry import config as config_of

MASKED_SHARE = 0.15
"""Share of a sequence's tokens that BERT has to predict."""


def example_batch(
    network: str | Network | Config,
    batch_size: int,
    *,
    seed: int = 0,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    **overrides: Setting,
) -> Batch:
    """Draw a random batch of the right shapes: ``loss = network(*example_batch(network, 8))``.

    The same arguments give the same numbers on every device: they are drawn on the CPU.

    Args:
        network: A network, its configuration, or a name (then of the full size, as ``build``).
        batch_size: Number of images or sequences.
        seed: Seed of a new generator, if there is no ``generator``.
        generator: A generator on the CPU, which advances.
        device: Device of the batch.
        overrides: Sizes that differ from the configuration's: ``image_size``, ``sequence_length``;
            for a name also ``size="tiny"`` and any setting.

    Raises:
        ConfigError: The name or a setting is unknown, or the batch is empty.
    """
    _check_batch_size(batch_size)
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    settings = _settings(network, overrides)
    if isinstance(settings, VisionConfig):
        batch = _images(settings, batch_size, generator)
    else:
        shape = (batch_size, settings.sequence_length + 1)
        tokens = torch.randint(_plain_tokens(settings), shape, generator=generator)
        batch = language_batch(settings, tokens, generator=generator)
    return batch.to(device)


def empty_batch(config: Config, batch_size: int) -> Batch:
    """Return a batch of the right shapes with undefined contents, on the default device.

    Raises:
        ConfigError: The batch is empty.
    """
    _check_batch_size(batch_size)
    if isinstance(config, VisionConfig):
        shape = (batch_size, config.in_channels, config.image_size, config.image_size)
        return Batch(torch.empty(shape), torch.empty(batch_size, dtype=torch.int64))
    tokens = torch.empty((batch_size, config.sequence_length), dtype=torch.int64)
    return Batch(tokens, torch.empty_like(tokens))


def masked_count(length: int) -> int:
    """Return the number of tokens that a masked model predicts in a sequence of ``length``."""
    return max(1, round(MASKED_SHARE * length))


def language_batch(config: LanguageConfig, text: Tensor, *, generator: torch.Generator) -> Batch:
    """Turn text into inputs and targets for the objective of ``config``.

    Args:
        config: Configuration with the objective.
        text: int64 ``[batch, length + 1]``; a masked model gets the first ``length``.
        generator: A generator on the CPU, used by the masked objective.
    """
    inputs = text[:, :-1].contiguous()
    if config.objective == "causal":
        return Batch(inputs, text[:, 1:].contiguous())
    return mask_tokens(inputs, vocab_size=config.vocab_size, generator=generator)


def mask_tokens(tokens: Tensor, *, vocab_size: int, generator: torch.Generator) -> Batch:
    """Hide some tokens of every sequence, as BERT does.

    Hidden are 15 % of each row, always the same number, so that each step saves tensors of the same
    sizes. Of these, four fifths become the mask (the last id of the vocabulary), a tenth a random
    token, and a tenth stays.

    Args:
        tokens: int64 ``[batch, length]``, on the CPU, without the last id of the vocabulary.
        vocab_size: Number of token ids, including the mask's.
        generator: A generator on the CPU.
    """
    count = masked_count(tokens.shape[1])
    places = torch.rand(tokens.shape, generator=generator).topk(count, dim=1).indices
    hidden = tokens.gather(1, places)
    targets = torch.full_like(tokens, IGNORE).scatter(1, places, hidden)
    random = torch.randint(vocab_size - 1, hidden.shape, generator=generator)
    fate = torch.rand(hidden.shape, generator=generator)
    shown = torch.where(fate < 0.8, vocab_size - 1, torch.where(fate < 0.9, random, hidden))
    return Batch(tokens.scatter(1, places, shown), targets)


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} must not be below 1")


def _settings(network: str | Network | Config, overrides: dict[str, Any]) -> Config:
    if isinstance(network, str):
        return config_of(network, **overrides)
    settings: Config = network.config if isinstance(network, torch.nn.Module) else network
    try:
        return replace(settings, **overrides)
    except TypeError as error:
        raise ConfigError(f"unknown setting of {type(settings).__name__}: {error}") from error


def _images(config: VisionConfig, batch_size: int, generator: torch.Generator) -> Batch:
    shape = (batch_size, config.in_channels, config.image_size, config.image_size)
    images = torch.randn(shape, generator=generator)
    return Batch(images, torch.randint(config.num_classes, (batch_size,), generator=generator))


def _plain_tokens(config: LanguageConfig) -> int:
    """Return the number of token ids in plain text: a masked model reserves the last id."""
    return config.vocab_size - (config.objective == "masked")
