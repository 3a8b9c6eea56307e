"""AlexNet in the widths of "One weird trick" (Krizhevsky 2014), 61,100,840 parameters.

torchvision has these widths. The paper of 2012 has the same layers, a little wider and split over two
GPUs; vDNN and the poster measure networks of this shape.
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

_WINDOWS = (ImageWindow(11, 4, 2), ImageWindow(3, 2), ImageWindow(3, 2), ImageWindow(3, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class AlexNetConfig(VisionConfig):
    """Settings of AlexNet, for images of 63 pixels and more."""

    widths: tuple[int, ...] = (64, 192, 384, 256, 256)
    """Channels of the five convolutions."""
    hidden: int = 4096
    """Width of the two hidden linear layers."""
    pool_size: int = 6
    """Size to which the last feature map is pooled, whatever the size of the image."""
    dropout: float = 0.5
    init_std: float | None = 0.01
    """Standard deviation of the weights, as in the paper; ``None`` for He's, better when narrow."""

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if len(self.widths) != 5:
            raise ConfigError(f"AlexNetConfig: widths={self.widths} must be five channel counts")
        check_image_size(self, _WINDOWS)


class AlexNet(VisionNetwork):
    """Five convolutions, three linear layers."""

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__(config)
        self.features = _features(config)
        self.pool = nn.AdaptiveAvgPool2d(config.pool_size)
        self.classifier = _classifier(config)
        self._init(config.init_std)

    def _init(self, std: float | None) -> None:
        if std is None:
            kaiming_(self, linear_std=None)
            return
        gaussian_(self, std=std)
        convs = [m for m in self.features if isinstance(m, nn.Conv2d)]
        hidden = [m for m in self.classifier if isinstance(m, nn.Linear)][:-1]
        for module in (
            convs[1],
            convs[3],
            convs[4],
            *hidden,
        ):  # ones in the paper, to feed the ReLUs
            assert isinstance(module.bias, Tensor)
            nn.init.ones_(module.bias)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


def _features(config: AlexNetConfig) -> nn.Sequential:
    a, b, c, d, e = config.widths

    def relu() -> nn.ReLU:
        return nn.ReLU(inplace=config.inplace)

    return nn.Sequential(
        nn.Conv2d(config.in_channels, a, 11, stride=4, padding=2),
        relu(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2),
        relu(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1),
        relu(),
        nn.Conv2d(c, d, 3, padding=1),
        relu(),
        nn.Conv2d(d, e, 3, padding=1),
        relu(),
        nn.MaxPool2d(3, 2),
    )


def _classifier(config: AlexNetConfig) -> nn.Sequential:
    return nn.Sequential(
        nn.Dropout(config.dropout),
        nn.Linear(config.widths[-1] * config.pool_size**2, config.hidden),
        nn.ReLU(inplace=config.inplace),
        nn.Dropout(config.dropout),
        nn.Linear(config.hidden, config.hidden),
        nn.ReLU(inplace=config.inplace),
        nn.Linear(config.hidden, config.num_classes),
    )


ENTRIES = {
    "alexnet": ZooEntry(
        network=AlexNet,
        config=AlexNetConfig,
        tiny={
            "image_size": 64,
            "num_classes": 10,
            "widths": (16, 24, 32, 32, 32),
            "hidden": 128,
            "pool_size": 2,
            "init_std": None,
        },
    )
}
