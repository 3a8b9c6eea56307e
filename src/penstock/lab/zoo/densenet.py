"""DenseNet (Huang et al. 2017) for ImageNet and CIFAR, of any depth.

``densenet121`` has 7,978,856 parameters; also 161, 169, 201, 264. The paper's networks for CIFAR
are ``densenet-bc-<6n+4>-<growth>``, ``densenet-bc-100-12`` with 769,162. ``densenet<2m+5>`` continues
above 264. The DenseNet-1001 that FlashNeuron (FAST 2021) trained is one of these depths; we could
not check its layout. Ours keeps the first two groups (6, 12) and divides the rest 3:2, as
DenseNet-201 does: (6, 12, 288, 192).

Concatenations are saved as they are (torchvision's ``memory_efficient=False``): memory is
quadratic in the depth of a group, which makes DenseNet a test of offloading.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.core.errors import ConfigError
from penstock.lab.zoo.base import (
    ImageWindow,
    VisionConfig,
    VisionNetwork,
    ZooEntry,
    check_image_size,
)
from penstock.lab.zoo.weights import kaiming_

_PUBLISHED: dict[int, dict[str, Any]] = {
    121: {"blocks": (6, 12, 24, 16)},
    161: {"blocks": (6, 12, 36, 24), "growth": 48, "stem_width": 96},
    169: {"blocks": (6, 12, 32, 32)},
    201: {"blocks": (6, 12, 48, 32)},
    264: {"blocks": (6, 12, 64, 48)},
}
_IMAGENET_STEM = (ImageWindow(7, 2, 3), ImageWindow(3, 2, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseNetConfig(VisionConfig):
    """Settings of DenseNet-BC."""

    blocks: tuple[int, ...] = (6, 12, 24, 16)
    """Dense layers of each group; channels and image are halved between two groups."""
    growth: int = 32
    """Number of channels that each dense layer adds."""
    stem: Literal["imagenet", "cifar"] = "imagenet"
    """Kind of stem: a strided 7x7 convolution and a pooling, or one 3x3 convolution."""
    stem_width: int = 64
    """Channels of the stem."""
    bottleneck: int = 4
    """Channels between a dense layer's two convolutions, in units of ``growth``."""
    dropout: float = 0.0
    """Dropout after each dense layer; 0.2 in the paper where data are not augmented."""

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if self.stem not in ("imagenet", "cifar"):
            raise ConfigError(f"DenseNetConfig: stem={self.stem!r} is not 'imagenet' or 'cifar'")
        stem = _IMAGENET_STEM if self.stem == "imagenet" else ()
        check_image_size(self, (*stem, *(ImageWindow(2, 2),) * (len(self.blocks) - 1)))


class DenseLayer(nn.Module):
    """All feature maps of the group so far, through 1x1 and 3x3 convolutions, to ``growth`` channels."""

    def __init__(self, config: DenseNetConfig, before: int) -> None:
        super().__init__()
        between = config.bottleneck * config.growth
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, between, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(between)
        self.conv2 = nn.Conv2d(between, config.growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=config.inplace)
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, features: list[Tensor]) -> Tensor:
        """Map the feature maps of this group so far to ``[batch, growth, h, w]``."""
        x = self.conv1(self.relu(self.norm1(torch.cat(features, dim=1))))
        out: Tensor = self.dropout(self.conv2(self.relu(self.norm2(x))))
        return out


class DenseGroup(nn.ModuleList):
    """Dense layers at one image size."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, before + layers * growth, h, w]``."""
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, dim=1)


class DenseNet(VisionNetwork):
    """A stem, dense groups with transitions between them, one linear layer."""

    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__(config)
        layers: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(config))
        width = config.stem_width
        for i, count in enumerate(config.blocks):
            if i:
                layers[f"transition{i}"] = _transition(width, width // 2, config.inplace)
                width //= 2
            inputs = [width + k * config.growth for k in range(count)]
            layers[f"group{i + 1}"] = DenseGroup(DenseLayer(config, before) for before in inputs)
            width += count * config.growth
        layers["norm"] = nn.BatchNorm2d(width)
        self.features = nn.Sequential(layers)
        self.inplace = config.inplace
        self.out = nn.Linear(width, config.num_classes)
        kaiming_(self, linear_std=None)
        nn.init.zeros_(self.out.bias)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        features = F.relu(self.features(images), inplace=self.inplace)
        logits: Tensor = self.out(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return logits


def _stem(config: DenseNetConfig) -> nn.Module:
    if config.stem == "cifar":
        return nn.Conv2d(config.in_channels, config.stem_width, 3, padding=1, bias=False)
    return nn.Sequential(
        nn.Conv2d(config.in_channels, config.stem_width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(config.stem_width),
        nn.ReLU(inplace=config.inplace),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def _transition(before: int, after: int, inplace: bool) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(before),
        nn.ReLU(inplace=inplace),
        nn.Conv2d(before, after, 1, bias=False),
        nn.AvgPool2d(2, 2),
    )


def parse(name: str) -> ZooEntry | None:
    """Return the entry of ``densenet<depth>`` or ``densenet-bc-<depth>-<growth>``, else ``None``.

    Raises:
        ConfigError: No layout has this depth.
    """
    if match := re.fullmatch(r"densenet-bc-(\d+)-(\d+)", name):
        return _cifar(name, int(match[1]), int(match[2]))
    if match := re.fullmatch(r"densenet(\d+)", name):
        return _imagenet(name, int(match[1]))
    return None


def _imagenet(name: str, depth: int) -> ZooEntry:
    if depth in _PUBLISHED:
        return _entry(_PUBLISHED[depth])
    rest = (depth - 5) // 2 - 18
    if depth % 2 == 0 or depth <= max(_PUBLISHED):
        raise ConfigError(
            f"{name}: DenseNet has {', '.join(map(str, _PUBLISHED))} layers, or 2m + 5 above these"
        )
    return _entry({"blocks": (6, 12, rest - rest * 2 // 5, rest * 2 // 5)})


def _cifar(name: str, depth: int, growth: int) -> ZooEntry:
    count, rest = divmod(depth - 4, 6)
    if count < 1 or rest or growth < 1:
        raise ConfigError(
            f"{name}: the name is densenet-bc-<depth>-<growth>, with a depth of 6n + 4"
        )
    return _entry(
        {
            "blocks": (count,) * 3,
            "growth": growth,
            "stem": "cifar",
            "stem_width": 2 * growth,
            "image_size": 32,
            "num_classes": 10,
        }
    )


def _entry(full: dict[str, Any]) -> ZooEntry:
    blocks: tuple[int, ...] = full["blocks"]
    return ZooEntry(
        network=DenseNet,
        config=DenseNetConfig,
        full=full,
        tiny={
            "image_size": 16 if full.get("stem") == "cifar" else 32,
            "num_classes": 10,
            "blocks": tuple(min(count, 4) for count in blocks),
            "growth": 8,
            "stem_width": 16,
        },
    )


NAMES = ("densenet121", "densenet201", "densenet264", "densenet1001", "densenet-bc-100-12")
