"""VGG (Simonyan and Zisserman 2014), and vDNN's extension of it: ``vgg<16+5k>``.

vDNN (MICRO 2016) makes a network of any depth by adding the same number of 3x3 convolutions to each of
VGG-16's five groups: 20 to each give 116 layers, 80 give 416. Parameters: VGG-11
132,863,336, VGG-16 138,357,544, then 5,494,208 more for each one added per group.

No initialisation of the added layers was published; with He's, signals vanish in hundreds of plain
layers. Here they start near the identity, so that deep networks compute with realistic numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.lab.zoo.base import (
    ImageWindow,
    VisionConfig,
    VisionNetwork,
    ZooEntry,
    check_image_size,
)
from penstock.lab.zoo.weights import kaiming_, near_identity_

_WINDOWS = (ImageWindow(2, 2),) * 5
_GROUPS = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VGGConfig(VisionConfig):
    """Settings of VGG, for images of 32 pixels and more."""

    convs: tuple[int, ...] = (2, 2, 3, 3, 3)
    """Convolutions of each of the five groups."""
    extra: int = field(default=0, metadata={"least": 0})
    """Convolutions added to each group, as in vDNN."""
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    """Channels of the five groups."""
    hidden: int = 4096
    """Width of the two hidden linear layers."""
    pool_size: int = 7
    """Size to which the last feature map is pooled, whatever the size of the image."""
    dropout: float = 0.5
    linear_std: float | None = 0.01
    """Standard deviation of the linear weights; ``None`` for torch's own, better when narrow."""

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if len(self.convs) != 5 or len(self.widths) != 5:
            raise ConfigError(
                f"VGGConfig: convs={self.convs} and widths={self.widths} must have five values each"
            )
        check_image_size(self, _WINDOWS)


class VGG(VisionNetwork):
    """Five groups of 3x3 convolutions, each ended by a max-pooling, and three linear layers."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__(config)
        self.features = nn.Sequential(*_features(config))
        self.pool = nn.AdaptiveAvgPool2d(config.pool_size)
        self.classifier = _classifier(config)
        kaiming_(self, linear_std=config.linear_std)
        self._init_extra(config)

    def _init_extra(self, config: VGGConfig) -> None:
        if not config.extra:
            return
        noise = (
            5 * config.extra
        ) ** -0.5  # together the added layers add the variance of one layer
        convs = iter(m for m in self.features if isinstance(m, nn.Conv2d))
        for own in config.convs:
            group = [next(convs) for _ in range(own + config.extra)]
            for conv in group[own:]:
                near_identity_(conv, noise=noise)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


def _features(config: VGGConfig) -> Iterator[nn.Module]:
    channels = pairwise((config.in_channels, *config.widths))
    for (before, width), own in zip(channels, config.convs, strict=True):
        for i in range(own + config.extra):
            yield nn.Conv2d(width if i else before, width, 3, padding=1)
            yield nn.ReLU(inplace=config.inplace)
        yield nn.MaxPool2d(2, 2)


def _classifier(config: VGGConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(config.widths[-1] * config.pool_size**2, config.hidden),
        nn.ReLU(inplace=config.inplace),
        nn.Dropout(config.dropout),
        nn.Linear(config.hidden, config.hidden),
        nn.ReLU(inplace=config.inplace),
        nn.Dropout(config.dropout),
        nn.Linear(config.hidden, config.num_classes),
    )


def parse(name: str) -> ZooEntry | None:
    """Return the entry of ``vgg11``, ``13``, ``16``, ``19`` or ``vgg<16+5k>``, else ``None``.

    Raises:
        ConfigError: VGG does not have this depth.
    """
    match = re.fullmatch(r"vgg(\d+)", name)
    if match is None:
        return None
    depth = int(match[1])
    if depth in _GROUPS:
        return _entry(convs=_GROUPS[depth], extra=0)
    extra, rest = divmod(depth - 16, 5)
    if extra < 1 or rest:
        raise ConfigError(
            f"{name}: VGG has 11, 13, 16 or 19 layers, or 16 + 5k with k more in each group"
        )
    return _entry(convs=_GROUPS[16], extra=extra)


def _entry(convs: tuple[int, ...], extra: int) -> ZooEntry:
    return ZooEntry(
        network=VGG,
        config=VGGConfig,
        full={"convs": convs, "extra": extra},
        tiny={
            "image_size": 32,
            "num_classes": 10,
            "extra": min(extra, 3),
            "widths": (16, 16, 24, 32, 32),
            "hidden": 128,
            "pool_size": 1,
            "linear_std": None,
        },
    )


NAMES = ("vgg11", "vgg16", "vgg116", "vgg216", "vgg316", "vgg416")
