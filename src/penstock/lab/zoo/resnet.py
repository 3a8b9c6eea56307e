"""ResNet for ImageNet (He et al. 2015), and its extension to any depth: ``resnet<3m+2>``.

ResNet-18 has 11,689,512 parameters, ResNet-50 25,557,032. As in torchvision the bottleneck strides
in its 3x3 convolution. FlashNeuron (FAST 2021) trained a ResNet-1922; we could not check its
layout. Ours follows the recipe of SuperNeurons (PPoPP 2018), as we recall it: bottlenecks (6, 32,
n, 6), with the depth in the third group, 3 * (6 + 32 + 596 + 6) + 2 = 1922.

The CIFAR families (9n+2, 6n+2) are in :mod:`penstock.lab.zoo.resnet_cifar`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.lab.zoo.base import VisionConfig, VisionNetwork, ZooEntry
from penstock.lab.zoo.weights import kaiming_

BlockKind = Literal["basic", "bottleneck"]

_PUBLISHED: dict[int, tuple[BlockKind, tuple[int, ...]]] = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
_STRETCHED = (6, 32, 6)  # all groups but the third


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig(VisionConfig):
    """Settings of ResNet with the ImageNet stem, for images of any size."""

    block: BlockKind = "bottleneck"
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks of each of the four groups."""
    width: int = 64
    """Channels of the stem and of the first group's 3x3 convolutions; doubled at each group."""

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if self.block not in ("basic", "bottleneck") or len(self.blocks) != 4:
            raise ConfigError(
                f"ResNetConfig: block={self.block!r} must be 'basic' or 'bottleneck', and"
                f" blocks={self.blocks} four group depths"
            )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, before: int, width: int, *, stride: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=inplace)
        self.shortcut = _projection(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, width, h/stride, w/stride]``."""
        out: Tensor = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution beside a shortcut."""

    expansion = 4

    def __init__(self, before: int, width: int, *, stride: int, inplace: bool) -> None:
        super().__init__()
        after = width * self.expansion
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=inplace)
        self.shortcut = _projection(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, 4 * width, h/stride, w/stride]``."""
        out: Tensor = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += self.shortcut(x)
        out = self.relu(out)
        return out


def _projection(before: int, after: int, stride: int) -> nn.Module:
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
    )


class ResNet(VisionNetwork):
    """A stem that quarters the image, four groups of residual blocks, one linear layer."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        self.stem = nn.Sequential(
            nn.Conv2d(config.in_channels, config.width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(config.width),
            nn.ReLU(inplace=config.inplace),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        kind = BasicBlock if config.block == "basic" else Bottleneck
        before = width = config.width
        groups: list[nn.Module] = []
        for group, count in enumerate(config.blocks):
            blocks: list[nn.Module] = []
            for i in range(count):
                stride = 2 if group and not i else 1
                blocks.append(kind(before, width, stride=stride, inplace=config.inplace))
                before = width * kind.expansion
            groups.append(nn.Sequential(*blocks))
            width *= 2
        self.groups = nn.Sequential(*groups)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.out = nn.Linear(before, config.num_classes)
        kaiming_(self, linear_std=None)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        logits: Tensor = self.out(self.pool(self.groups(self.stem(images))).flatten(1))
        return logits


def parse_published(name: str) -> ZooEntry | None:
    """Return the entry of ``resnet18``, ``34``, ``50``, ``101`` or ``152``; ``None`` for other names."""
    depth = depth_of(name)
    return _entry(*_PUBLISHED[depth]) if depth in _PUBLISHED else None


def parse_stretched(name: str) -> ZooEntry | None:
    """Return the entry of ``resnet<3m+2>`` above 152; ``None`` for other names."""
    depth = depth_of(name)
    total, rest = divmod(depth - 2, 3)
    if rest or depth <= max(_PUBLISHED):
        return None
    third = total - sum(_STRETCHED)
    return _entry("bottleneck", (*_STRETCHED[:2], third, _STRETCHED[2]))


def depth_of(name: str) -> int:
    """Return the number in ``resnet<depth>``; 0 for other names."""
    match = re.fullmatch(r"resnet(\d+)", name)
    return int(match[1]) if match else 0


def _entry(block: BlockKind, blocks: tuple[int, ...]) -> ZooEntry:
    return ZooEntry(
        network=ResNet,
        config=ResNetConfig,
        full={"block": block, "blocks": blocks},
        tiny={
            "image_size": 32,
            "num_classes": 10,
            "blocks": tuple(min(count, 2) for count in blocks),
            "width": 8 if block == "basic" else 4,
        },
    )


NAMES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet1922")
