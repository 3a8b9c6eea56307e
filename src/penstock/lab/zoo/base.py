"""Common parts of all networks of the zoo: configuration, calls, and entries in the table.

Every network is called in the same way::

    loss = network(inputs, targets)      # a scalar, ready for backward
    logits = network(inputs)             # no targets, no loss

- Vision: ``inputs`` are float images ``[batch, channels, size, size]``, ``targets`` int64 classes
  ``[batch]``, the logits ``[batch, classes]``.
- Language: ``inputs`` are int64 tokens ``[batch, length]``, ``targets`` int64 ``[batch, length]``:
    ``targets[b, t]`` is the token to predict *at* position ``t``, or ``IGNORE``. The logits are
    ``[batch, length, vocab]``. So the targets of a causal model are the text one position further
    on, and those of a masked model the tokens that were hidden.
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
"""Language target of a position without a loss; the ``ignore_index`` of ``cross_entropy``."""


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
}
"""Types of the values that a setting takes, by the type of its field; others are checked elsewhere."""


class Batch(NamedTuple):
    """Arguments of one step: ``loss = network(*batch)``."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch on ``device``."""
        return Batch(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """Settings that every image classifier has."""

    in_channels: int = 3
    """Channels of the images."""
    image_size: int = 224
    """Height and width of the images, in pixels."""
    num_classes: int = 1000
    """Width of the logits."""
    inplace: bool = True
    """True if ReLU overwrites its input, as in the reference implementations: the same tensors are
    saved, and one buffer less is live while it runs."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageConfig:
    """Settings that every transformer has."""

    objective: ClassVar[Literal["causal", "masked"]] = "causal"

    vocab_size: int
    """Number of token ids."""
    sequence_length: int
    """Length of the longest sequence: rows of the table of learned positions."""
    depth: int
    """Number of blocks."""
    width: int
    """Features of a token between blocks; the MLP is four times as wide."""
    heads: int
    """Attention heads; must divide ``width``."""
    dropout: float = 0.1
    """Dropout of the embeddings and of the output of each half of a block."""
    attention_dropout: float = 0.1
    """Dropout of the attention weights."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width % self.heads:
            raise ConfigError(
                f"{type(self).__name__}: width={self.width} is not a multiple of heads={self.heads}"
            )


Config = VisionConfig | LanguageConfig
Setting = int | float | bool | str | tuple[int, ...] | None


class VisionNetwork(nn.Module):
    """An image classifier; a subclass turns images into logits."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        raise NotImplementedError

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy, or the logits if there are no ``targets``."""
        logits = self.logits(images)
        return logits if targets is None else F.cross_entropy(logits, targets)


class LanguageNetwork(nn.Module):
    """A transformer over tokens; a subclass turns tokens into features, and features into logits."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config

    def check_length(self, tokens: Tensor) -> None:
        """Raise ConfigError for a sequence longer than the table of positions."""
        length, longest = tokens.shape[1], self.config.sequence_length
        if length > longest:
            raise ConfigError(
                f"{type(self).__name__}: a sequence of {length} tokens is longer than the"
                f" {longest} positions of this network; build it with sequence_length={length}"
            )


Network = VisionNetwork | LanguageNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooEntry:
    """One line of the zoo's table."""

    network: Callable[[Any], Network]
    """Constructor of the network from its configuration."""
    config: type[VisionConfig] | type[LanguageConfig]
    full: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the published network that differ from the configuration's defaults."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the small version for tests that differ from the full one."""

    def configure(
        self, name: str, size: Literal["full", "tiny"], overrides: Mapping[str, Any]
    ) -> Config:
        """Return the configuration with ``overrides``. Raises ConfigError for an unknown or wrong one."""
        if size not in ("full", "tiny"):
            raise ConfigError(f"{name}: size={size!r} must be 'full' or 'tiny'")
        known = {f.name for f in fields(self.config)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise ConfigError(
                f"{name} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}"
            )
        for each in fields(self.config):
            value, kinds = overrides.get(each.name), _KINDS.get(str(each.type))
            if each.name in overrides and kinds and type(value) not in kinds:
                raise ConfigError(f"{name}: {each.name}={value!r} must be of type {each.type}")
        tiny = self.tiny if size == "tiny" else {}
        return self.config(**{**self.full, **tiny, **overrides})


def check_fields(config: Config) -> None:
    """Raise ConfigError for counts below one (or a field's ``least``) and dropouts not in ``[0, 1)``."""
    for each in fields(config):
        value = getattr(config, each.name)
        least = each.metadata.get("least", 1)
        where = f"{type(config).__name__}: {each.name}={value!r}"
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int) and not isinstance(part, bool) and part < least:
                raise ConfigError(f"{where} must not be below {least}")
        if each.name.endswith("dropout") and not 0 <= value < 1:
            raise ConfigError(f"{where} must lie in [0, 1)")


class ImageWindow(NamedTuple):
    """The parameters of a convolution or pooling that change the size of an image."""

    kernel: int
    stride: int
    padding: int = 0
    ceil: bool = False


def final_size(size: int, windows: Sequence[ImageWindow]) -> int:
    """Return the height that remains of an image of height ``size``; 0 if a window does not fit."""
    for window in windows:
        room = size + 2 * window.padding - window.kernel
        steps = -(-room // window.stride) if window.ceil else room // window.stride
        if window.ceil and steps * window.stride >= size + window.padding:
            steps -= 1  # torch skips a window that would begin beyond the image
        size = steps + 1
        if size < 1:
            return 0
    return size


def check_image_size(config: VisionConfig, windows: Sequence[ImageWindow]) -> int:
    """Return the final size of ``config``'s images; raise ConfigError if nothing remains of them."""
    size = final_size(config.image_size, windows)
    if size > 0:
        return size
    least = config.image_size
    while final_size(least, windows) == 0:
        least += 1
    raise ConfigError(
        f"{type(config).__name__}: image_size={config.image_size} is too small: nothing is left of"
        f" the image after the last pooling; use at least {least}"
    )
