"""What every network of the zoo has in common: how it is configured, called, and listed.

Every network is called in one way::

    loss = network(inputs, targets)      # a scalar, ready for backward
    logits = network(inputs)             # no targets, no loss

- Vision: ``inputs`` are float images ``[batch, channels, size, size]``, ``targets`` int64 classes
  ``[batch]``, the logits ``[batch, classes]``.
- Language: ``inputs`` are int64 tokens ``[batch, length]``, ``targets`` int64 ``[batch, length]``:
  ``targets[b, t]`` is the token to be predicted *at* position ``t``, ``IGNORE`` where nothing is.
  The logits are ``[batch, length, vocab]``. So the targets of a causal model are the text one place
  further on, and those of a masked one the tokens that were hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.core.errors import ConfigError

IGNORE: Final = -100
"""A language target at which there is no loss; the ``ignore_index`` of ``cross_entropy``."""


class Batch(NamedTuple):
    """What one step is called with: ``loss = network(*batch)``."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on ``device``."""
        return Batch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """What every image classifier is configured by."""

    in_channels: int = 3
    """Channels of the images."""
    image_size: int = 224
    """Height and width of the images, in pixels."""
    num_classes: int = 1000
    """Width of the logits."""
    inplace: bool = True
    """Whether ReLU overwrites its input, as in the reference implementations: the same tensors are
    saved, one buffer less is live while it runs."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageConfig:
    """What every transformer is configured by."""

    objective: ClassVar[Literal["causal", "masked"]] = "causal"

    vocab_size: int
    """Number of token ids."""
    sequence_length: int
    """The longest sequence: rows of the table of learned positions."""
    depth: int
    """Number of blocks."""
    width: int
    """Features of a token between blocks; the MLP is four times as wide."""
    heads: int
    """Attention heads; must divide ``width``."""
    dropout: float = 0.1
    """Of the embeddings and of what each block adds."""
    attention_dropout: float = 0.1
    """Of the attention's weights."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width % self.heads:
            raise ConfigError(
                f"{type(self).__name__}: width={self.width} is not a multiple of heads={self.heads}"
            )


Config = VisionConfig | LanguageConfig
Setting = int | float | bool | str | tuple[int, ...] | None


class VisionNetwork(nn.Module):
    """An image classifier; a subclass says how images become logits."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config

    def logits(self, images: Tensor) -> Tensor:
        """Class scores ``[batch, classes]``."""
        raise NotImplementedError

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean cross-entropy if ``targets`` are given, the logits otherwise."""
        logits = self.logits(images)
        return logits if targets is None else F.cross_entropy(logits, targets)


class LanguageNetwork(nn.Module):
    """A transformer over tokens; a subclass says how tokens become features and features logits."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config

    def check_length(self, tokens: Tensor) -> None:
        """Refuse a sequence for which there are no positions."""
        length, longest = tokens.shape[1], self.config.sequence_length
        if length > longest:
            raise ConfigError(
                f"{type(self).__name__}: a sequence of {length} tokens is longer than the"
                f" {longest} positions it was built with; build it with sequence_length={length}"
            )


Network = VisionNetwork | LanguageNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the zoo's table."""

    network: Callable[[Any], Network]
    """Makes the network from its configuration."""
    config: type[VisionConfig] | type[LanguageConfig]
    full: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the published network, where they are not the configuration's defaults."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """What differs in the small version for tests."""

    def configure(
        self, name: str, size: Literal["full", "tiny"], overrides: Mapping[str, Any]
    ) -> Config:
        """The configuration, with ``overrides`` on top. Raises ConfigError for one it lacks."""
        if size not in ("full", "tiny"):
            raise ConfigError(f"{name}: size={size!r} is neither 'full' nor 'tiny'")
        known = {f.name for f in fields(self.config)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise ConfigError(
                f"{name} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        tiny = self.tiny if size == "tiny" else {}
        return self.config(**{**self.full, **tiny, **overrides})


def check_fields(config: Config) -> None:
    """Refuse counts below one (or the field's ``least``) and dropouts outside ``[0, 1)``."""
    for each in fields(config):
        value = getattr(config, each.name)
        least = each.metadata.get("least", 1)
        where = f"{type(config).__name__}: {each.name}={value!r}"
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int) and not isinstance(part, bool) and part < least:
                raise ConfigError(f"{where} must not be below {least}")
        if each.name.endswith("dropout") and not 0 <= value < 1:
            raise ConfigError(f"{where} must lie in [0, 1)")


class Window(NamedTuple):
    """A convolution or pooling as far as it changes the size of an image."""

    kernel: int
    stride: int
    padding: int = 0
    ceil: bool = False


def final_size(size: int, windows: Sequence[Window]) -> int:
    """Height of what is left of an image of height ``size``; 0 if a window does not fit."""
    for window in windows:
        room = size + 2 * window.padding - window.kernel
        steps = -(-room // window.stride) if window.ceil else room // window.stride
        if window.ceil and steps * window.stride >= size + window.padding:
            steps -= 1  # torch leaves out a window that would begin beyond the image
        size = steps + 1
        if size < 1:
            return 0
    return size


def check_image_size(config: VisionConfig, windows: Sequence[Window]) -> int:
    """The final size of ``config``'s images; raises ConfigError if nothing is left of them."""
    size = final_size(config.image_size, windows)
    if size > 0:
        return size
    least = config.image_size
    while final_size(least, windows) == 0:
        least += 1
    raise ConfigError(
        f"{type(config).__name__}: image_size={config.image_size} is too small, nothing is left of"
        f" the image after the last pooling; the least that works is {least}"
    )
