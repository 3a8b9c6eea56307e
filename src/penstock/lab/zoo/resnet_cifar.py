"""The deep ResNets for small images (He et al. 2015 and 2016): ``resnet<9n+2>``, ``resnet<6n+2>``.

``9n+2`` (164, 272, 1001, ...; 101 is ImageNet's): three groups of n bottlenecks, normalisation and
ReLU before each convolution (He et al. 2016, "Identity mappings"; ResNet-1001 has 10.2 million
parameters). ``6n+2``, at the depths that He et al. 2015 print (20, 32, 44, 56, 110, 1202): three
groups of n basic blocks with shortcuts that have no parameters (ResNet-1202 has 19.4 million). A
depth of both kinds that is not in that list means bottlenecks; ``blocks=`` and ``block=`` build any
other network.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from penstock.core.errors import ConfigError
from penstock.lab.zoo.base import VisionConfig, VisionNetwork, ZooEntry
from penstock.lab.zoo.resnet import BlockKind, depth_of
from penstock.lab.zoo.weights import kaiming_

_BASIC_DEPTHS = frozenset({20, 32, 44, 56, 110, 1202})


@dataclass(frozen=True, kw_only=True, slots=True)
class CifarResNetConfig(VisionConfig):
    """Settings of ResNet with the CIFAR stem, for images of any size; 32 is the published one."""

    image_size: int = 32
    num_classes: int = 10
    block: BlockKind = "bottleneck"
    blocks: tuple[int, ...] = (18, 18, 18)
    """Blocks of each of the three groups."""
    width: int = 16
    """Channels of the stem and of the first group's 3x3 convolutions; doubled at each group."""

    def __post_init__(self) -> None:
        VisionConfig.__post_init__(self)
        if self.block not in ("basic", "bottleneck") or len(self.blocks) != 3:
            raise ConfigError(
                f"CifarResNetConfig: block={self.block!r} must be 'basic' or 'bottleneck', and"
                f" blocks={self.blocks} three group depths"
            )


class PaddedShortcut(nn.Module):
    """Shortcut of every ``stride``-th pixel, with zeros for missing channels ("option A")."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.missing = after - before
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, after, h/stride, w/stride]``."""
        front = self.missing // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, front, self.missing - front))


class CifarBasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut without parameters."""

    expansion = 1

    def __init__(self, before: int, width: int, *, stride: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=inplace)
        same = stride == 1 and before == width
        self.shortcut = nn.Identity() if same else PaddedShortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, width, h/stride, w/stride]``."""
        out: Tensor = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        out = self.relu(out)
        return out


class PreActivationBottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, each after its normalisation and ReLU, beside a shortcut."""

    expansion = 4

    def __init__(self, before: int, width: int, *, stride: int, inplace: bool) -> None:
        super().__init__()
        after = width * self.expansion
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, after, 1, bias=False)
        self.relu = nn.ReLU(inplace=inplace)
        same = stride == 1 and before == after
        self.projection = None if same else nn.Conv2d(before, after, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, before, h, w]`` to ``[batch, 4 * width, h/stride, w/stride]``."""
        out: Tensor = self.relu(self.norm1(x))
        shortcut = x if self.projection is None else self.projection(out)
        out = self.conv1(out)
        out = self.conv2(self.relu(self.norm2(out)))
        out = self.conv3(self.relu(self.norm3(out)))
        out += shortcut
        return out


class CifarResNet(VisionNetwork):
    """A 3x3 stem, three groups of residual blocks, one linear layer."""

    def __init__(self, config: CifarResNetConfig) -> None:
        super().__init__(config)
        kind = CifarBasicBlock if config.block == "basic" else PreActivationBottleneck
        before = width = config.width
        stem: list[nn.Module] = [nn.Conv2d(config.in_channels, width, 3, padding=1, bias=False)]
        if config.block == "basic":
            stem += [nn.BatchNorm2d(width), nn.ReLU(inplace=config.inplace)]
        self.stem = nn.Sequential(*stem)
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
        last: list[nn.Module] = [nn.AdaptiveAvgPool2d(1)]
        if config.block == "bottleneck":
            last = [nn.BatchNorm2d(before), nn.ReLU(inplace=config.inplace), *last]
        self.last = nn.Sequential(*last)
        self.out = nn.Linear(before, config.num_classes)
        kaiming_(self, linear_std=None)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores ``[batch, classes]``."""
        logits: Tensor = self.out(self.last(self.groups(self.stem(images))).flatten(1))
        return logits


def parse(name: str) -> ZooEntry | None:
    """Return the entry of ``resnet<9n+2>`` or a published ``resnet<6n+2>``; ``None`` for other names."""
    depth = depth_of(name)
    if depth in _BASIC_DEPTHS:
        return _entry("basic", (depth - 2) // 6)
    count, rest = divmod(depth - 2, 9)
    return _entry("bottleneck", count) if count >= 1 and not rest else None


def _entry(block: BlockKind, count: int) -> ZooEntry:
    return ZooEntry(
        network=CifarResNet,
        config=CifarResNetConfig,
        full={"block": block, "blocks": (count,) * 3},
        tiny={"image_size": 16, "blocks": (min(count, 3),) * 3, "width": 8},
    )


NAMES = ("resnet110", "resnet164", "resnet272", "resnet1001", "resnet1202")
