"""SENet-154 (Hu et al. 2018), the network that won ImageNet's challenge of 2017: 115,088,984 parameters.

A ResNet-152 whose bottlenecks are grouped and twice as wide, and end in a gate: each channel is scaled by
a number that two small layers compute from the means of all channels. As in the authors' release: three
3x3 convolutions in place of the 7x7, and 3x3 projections where the image shrinks.
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
from penstock.lab.zoo.weights import kaiming_

_STEM = (ImageWindow(3, 2, 1), ImageWindow(3, 2, 0, ceil=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class SENetConfig(VisionConfig):
    """Settings of SENet-154."""

    blocks: tuple[int, ...] = (3, 8, 36, 3)
    """Blocks of each of the four stages."""
    width: int = 64
    """Half the channels of the stem, and of the first stage's narrowest convolutions."""
    cardinality: int = 64
    """Groups of the 3x3 convolutions; must divide twice the width."""
    reduction: int = 16
    """Factor by which the gates are narrower than their inputs."""
    dropout: float = 0.2

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if len(self.blocks) != 4:
            raise ConfigError(f"SENetConfig: blocks={self.blocks} must be four stage depths")
        if 2 * self.width % self.cardinality or 4 * self.width % self.reduction:
            raise ConfigError(
                f"SENetConfig: cardinality={self.cardinality} must divide twice the width={self.width},"
                f" and reduction={self.reduction} must divide four times the width"
            )
        check_image_size(self, _STEM)


class Gate(nn.Module):
    """Squeeze and excitation: every channel is scaled by a number between 0 and 1."""

    def __init__(self, channels: int, reduction: int, *, inplace: bool) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(channels, channels // reduction, 1)
        self.relu = nn.ReLU(inplace=inplace)
        self.excite = nn.Conv2d(channels // reduction, channels, 1)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, channels, h, w]`` to the same."""
        gate: Tensor = self.sigmoid(self.excite(self.relu(self.squeeze(self.pool(x)))))
        return x * gate


class SenetBlock(nn.Module):
    """A 1x1, a grouped 3x3 and a 1x1 convolution, and a gate, beside a shortcut."""

    def __init__(self, config: SENetConfig, before: int, width: int, *, stride: int) -> None:
        super().__init__()
        after, groups = 4 * width, config.cardinality
        self.conv1 = nn.Conv2d(before, 2 * width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(2 * width)
        self.conv2 = nn.Conv2d(
            2 * width, after, 3, stride=stride, padding=1, groups=groups, bias=False
        )
        self.norm2 = nn.BatchNorm2d(after)
        self.conv3 = nn.Conv2d(after, after, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=config.inplace)
        self.gate = Gate(after, config.reduction, inplace=config.inplace)
        self.shortcut = _projection(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, 4 * width, h/stride, w/stride]``."""
        out: Tensor = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.gate(self.norm3(self.conv3(out)))
        out = out + self.shortcut(x)
        out = self.relu(out)
        return out


def _projection(before: int, after: int, stride: int) -> nn.Module:
    if stride == 1 and before == after:
        return nn.Identity()
    kernel = 1 if stride == 1 else 3
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(after),
    )


class SENet(VisionNetwork):
    """A stem that quarters the image, four stages of gated blocks, one linear layer."""

    def __init__(self, config: SENetConfig) -> None:
        super().__init__(config)
        self.stem = _stem(config)
        before, width = 2 * config.width, config.width
        stages: list[nn.Module] = []
        for stage, count in enumerate(config.blocks):
            blocks: list[nn.Module] = []
            for i in range(count):
                stride = 2 if stage and not i else 1
                blocks.append(SenetBlock(config, before, width, stride=stride))
                before = 4 * width
            stages.append(nn.Sequential(*blocks))
            width *= 2
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(before, config.num_classes)
        kaiming_(self, linear_std=None)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        features = self.pool(self.stages(self.stem(images))).flatten(1)
        logits: Tensor = self.out(self.dropout(features))
        return logits


def _stem(config: SENetConfig) -> nn.Sequential:
    layers: list[nn.Module] = []
    before = config.in_channels
    for width, stride in ((config.width, 2), (config.width, 1), (2 * config.width, 1)):
        layers += [
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=config.inplace),
        ]
        before = width
    return nn.Sequential(*layers, nn.MaxPool2d(3, stride=2, ceil_mode=True))


ENTRIES = {
    "senet154": ZooEntry(
        network=SENet,
        config=SENetConfig,
        tiny={
            "image_size": 32,
            "num_classes": 10,
            "blocks": (1, 2, 2, 1),
            "width": 4,
            "cardinality": 4,
            "reduction": 4,
        },
    )
}
