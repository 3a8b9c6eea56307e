"""OverFeat, the *fast* model of Sermanet et al. (2014), table 1: 145,920,872 parameters.

The paper's table 4 gives 145 million for it (144 for the *accurate* model). This is the variant
without local normalisation and with pooling that does not overlap, as in the paper and in the convnet
benchmarks of vDNN's time. There is no pooling to a fixed size: the first linear layer is as wide as the
images make it, 6x6 at the published 231 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.lab.zoo.base import (
    ImageWindow,
    VisionConfig,
    VisionNetwork,
    ZooEntry,
    check_image_size,
)
from penstock.lab.zoo.weights import gaussian_, kaiming_

_WINDOWS = (
    ImageWindow(11, 4),
    ImageWindow(2, 2),
    ImageWindow(5, 1),
    ImageWindow(2, 2),
    ImageWindow(2, 2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverFeatConfig(VisionConfig):
    """Settings of OverFeat, fast, for images of 71 pixels and more; all must have the same size."""

    image_size: int = 231
    widths: tuple[int, ...] = (96, 256, 512, 1024, 1024)
    """Channels of the five convolutions."""
    hidden: tuple[int, ...] = (3072, 4096)
    """Widths of the hidden linear layers."""
    dropout: float = 0.5
    init_std: float | None = 0.01
    """Standard deviation of the weights, as in the paper; ``None`` for He's, better when narrow."""

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if len(self.widths) != 5:
            raise ConfigError(f"OverFeatConfig: widths={self.widths} must be five channel counts")
        check_image_size(self, _WINDOWS)


class OverFeat(VisionNetwork):
    """Five convolutions, three linear layers."""

    def __init__(self, config: OverFeatConfig) -> None:
        super().__init__(config)
        self.features = _features(config)
        side = check_image_size(config, _WINDOWS)
        self.classifier = _classifier(config, config.widths[-1] * side**2)
        if config.init_std is None:
            kaiming_(self, linear_std=None)
        else:
            gaussian_(self, std=config.init_std)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``. Raises ConfigError for images of another size."""
        size = self.config.image_size
        if images.shape[-2:] != (size, size):
            raise ConfigError(
                f"OverFeat was built for images of {size}x{size} pixels, and these have"
                f" {images.shape[-2]}x{images.shape[-1]}; build it with their image_size"
            )
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _features(config: OverFeatConfig) -> nn.Sequential:
    a, b, c, d, e = config.widths

    def relu() -> nn.ReLU:
        return nn.ReLU(inplace=config.inplace)

    return nn.Sequential(
        nn.Conv2d(config.in_channels, a, 11, stride=4),
        relu(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(a, b, 5),
        relu(),
        nn.MaxPool2d(2, 2),
        nn.Conv2d(b, c, 3, padding=1),
        relu(),
        nn.Conv2d(c, d, 3, padding=1),
        relu(),
        nn.Conv2d(d, e, 3, padding=1),
        relu(),
        nn.MaxPool2d(2, 2),
    )


def _classifier(config: OverFeatConfig, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for hidden in config.hidden:
        layers += [
            nn.Dropout(config.dropout),
            nn.Linear(width, hidden),
            nn.ReLU(inplace=config.inplace),
        ]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, config.num_classes))


ENTRIES = {
    "overfeat": ZooEntry(
        network=OverFeat,
        config=OverFeatConfig,
        tiny={
            "image_size": 71,
            "num_classes": 10,
            "widths": (16, 24, 32, 32, 32),
            "hidden": (96, 128),
            "init_std": None,
        },
    )
}
