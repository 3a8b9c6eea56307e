"""GoogLeNet (Szegedy et al. 2015) as torchvision has it: 13,004,888 parameters, 6,624,904 at test.

The difference is the two auxiliary classifiers, which take part in training only. As in torchvision
and unlike the paper, convolutions are followed by batch normalisation, and the branch of an
inception that has 5x5 kernels in the paper has 3x3 kernels. The usual figures are those of this form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
from penstock.lab.zoo.weights import truncated_

_WINDOWS = (
    ImageWindow(7, 2, 3),
    ImageWindow(3, 2, 0, True),
    ImageWindow(3, 2, 0, True),
    ImageWindow(3, 2, 0, True),
    ImageWindow(2, 2, 0, True),
)
_AUX_WEIGHT = 0.3  # of each auxiliary loss, as in the paper


class _Widths(NamedTuple):
    """Channels of one inception module, as in the paper's table 1."""

    one: int
    reduce_three: int
    three: int
    reduce_five: int
    five: int
    pool: int

    def total(self) -> int:
        return self.one + self.three + self.five + self.pool


_INCEPTIONS = {
    "3a": _Widths(64, 96, 128, 16, 32, 32),
    "3b": _Widths(128, 128, 192, 32, 96, 64),
    "4a": _Widths(192, 96, 208, 16, 48, 64),
    "4b": _Widths(160, 112, 224, 24, 64, 64),
    "4c": _Widths(128, 128, 256, 24, 64, 64),
    "4d": _Widths(112, 144, 288, 32, 64, 64),
    "4e": _Widths(256, 160, 320, 32, 128, 128),
    "5a": _Widths(256, 160, 320, 32, 128, 128),
    "5b": _Widths(384, 192, 384, 48, 128, 128),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GoogLeNetConfig(VisionConfig):
    """Settings of GoogLeNet, for images of 15 pixels and more."""

    divisor: int = 1
    """Divisor of every width in the paper: 1, 2, 4 or 8."""
    aux: bool = True
    """True for a network with the auxiliary classifiers."""
    dropout: float = 0.2
    aux_dropout: float = 0.7

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if self.divisor not in (1, 2, 4, 8):
            raise ConfigError(f"GoogLeNetConfig: divisor={self.divisor} is not 1, 2, 4 or 8")
        check_image_size(self, _WINDOWS)


class ConvNormReLU(nn.Module):
    """A convolution without bias, batch normalisation, ReLU."""

    def __init__(
        self,
        config: GoogLeNetConfig,
        before: int,
        after: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, kernel, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(after, eps=0.001)
        self.inplace = config.inplace

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, after, ...]``."""
        return F.relu(self.norm(self.conv(x)), inplace=self.inplace)


class Inception(nn.Module):
    """Four branches side by side, concatenated."""

    def __init__(self, config: GoogLeNetConfig, before: int, widths: _Widths) -> None:
        super().__init__()
        self.one = ConvNormReLU(config, before, widths.one, 1)
        self.three = nn.Sequential(
            ConvNormReLU(config, before, widths.reduce_three, 1),
            ConvNormReLU(config, widths.reduce_three, widths.three, 3, padding=1),
        )
        self.five = nn.Sequential(
            ConvNormReLU(config, before, widths.reduce_five, 1),
            ConvNormReLU(config, widths.reduce_five, widths.five, 3, padding=1),
        )
        self.pool = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True),
            ConvNormReLU(config, before, widths.pool, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, total, h, w]``."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


class AuxHead(nn.Module):
    """A classifier on an intermediate feature map."""

    def __init__(self, config: GoogLeNetConfig, before: int) -> None:
        super().__init__()
        width, hidden = 128 // config.divisor, 1024 // config.divisor
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.conv = ConvNormReLU(config, before, width, 1)
        self.hidden = nn.Linear(width * 16, hidden)
        self.relu = nn.ReLU(inplace=config.inplace)
        self.dropout = nn.Dropout(config.aux_dropout)
        self.out = nn.Linear(hidden, config.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        x = self.conv(self.pool(x)).flatten(1)
        logits: Tensor = self.out(self.dropout(self.relu(self.hidden(x))))
        return logits


class GoogLeNet(VisionNetwork):
    """Nine inception modules; in training, two auxiliary heads."""

    def __init__(self, config: GoogLeNetConfig) -> None:
        super().__init__(config)
        narrow, wide = 64 // config.divisor, 192 // config.divisor
        self.stem = nn.Sequential(
            ConvNormReLU(config, config.in_channels, narrow, 7, stride=2, padding=3),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            ConvNormReLU(config, narrow, narrow, 1),
            ConvNormReLU(config, narrow, wide, 3, padding=1),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
        )
        self.inceptions = nn.ModuleDict()
        self.aux = nn.ModuleDict()
        width = wide
        for name, full in _INCEPTIONS.items():
            widths = _Widths(*(w // config.divisor for w in full))
            self.inceptions[name] = Inception(config, width, widths)
            width = widths.total()
            if config.aux and name in ("4a", "4d"):
                self.aux[name] = AuxHead(config, width)
        self.pools = nn.ModuleDict(
            {
                "3b": nn.MaxPool2d(3, stride=2, ceil_mode=True),
                "4e": nn.MaxPool2d(2, stride=2, ceil_mode=True),
                "5b": nn.AdaptiveAvgPool2d(1),
            }
        )
        self.dropout = nn.Dropout(config.dropout)
        self.out = nn.Linear(width, config.num_classes)
        truncated_(self, std=0.01)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]`` of the last classifier."""
        return self._heads(images, aux=False)[-1]

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss, with 0.3 of each auxiliary one in training; without targets, the logits."""
        if targets is None:
            return self.logits(images)
        *aux, last = (F.cross_entropy(x, targets) for x in self._heads(images, aux=self.training))
        return last + _AUX_WEIGHT * sum(aux) if aux else last

    def _heads(self, images: Tensor, *, aux: bool) -> list[Tensor]:
        heads: list[Tensor] = []
        x = self.stem(images)
        for name, inception in self.inceptions.items():
            x = inception(x)
            if aux and name in self.aux:
                heads.append(self.aux[name](x))
            if name in self.pools:
                x = self.pools[name](x)
        heads.append(self.out(self.dropout(x.flatten(1))))
        return heads


ENTRIES = {
    "googlenet": ZooEntry(
        network=GoogLeNet,
        config=GoogLeNetConfig,
        tiny={"image_size": 64, "num_classes": 10, "divisor": 8},
    )
}
