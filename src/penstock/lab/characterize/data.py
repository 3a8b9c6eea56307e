"""Training data: real text and images that are already on the machine.

Language models read Python's standard library, and are fine-tuned on another part of it than they were
pre-trained on. Vision models see scikit-learn's digits, or random numbers where that package is missing.
Batches are prepared before the clock runs, and are used in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from penstock.core.errors import ConfigError
from penstock.lab import zoo

_BATCHES: Final = 4
_TEXT_BYTES: Final = 4 << 20
_TUNING_SHARE: Final = 0.25
"""Share of the text, at its end, that is left for fine-tuning."""


def batches(
    config: zoo.Config, batch: int, stage: str, *, seed: int
) -> tuple[str, list[zoo.Batch]]:
    """Return the name of the data and some batches; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(config, zoo.LanguageConfig):
        text = zoo.stdlib_text_bytes(_TEXT_BYTES)
        cut = round((1 - _TUNING_SHARE) * len(text.tokens))
        part = text.tokens[cut:] if stage == "fine-tuning" else text.tokens[:cut]
        text = replace(text, tokens=part)
        made = [text.batch(config, batch, generator=generator) for _ in range(_BATCHES)]
        return text.source.name, made
    try:
        images = zoo.digits()
    except ConfigError:  # scikit-learn is an extra
        drawn = [zoo.example_batch(config, batch, generator=generator) for _ in range(_BATCHES)]
        return "random numbers (scikit-learn is not installed)", drawn
    made = [images.batch(config, batch, generator=generator) for _ in range(_BATCHES)]
    return images.source.name, made
