"""Parameters and depths of the full-size networks against the literature."""

import pytest
import torch
from torch import nn

from penstock.lab import zoo

EXACT = {
    "alexnet": 61_100_840,
    "overfeat": 145_920_872,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "googlenet": 13_004_888,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "senet154": 115_088_984,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "densenet-bc-100-12": 769_162,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gpt2": 124_439_808,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
}
IN_MILLIONS = {  # as the papers print them
    "overfeat": (145, 1),  # truncated there, so the figure may be up to one more
    "resnet110": (1.7, 0.05),
    "resnet164": (1.7, 0.05),
    "resnet1001": (10.2, 0.2),  # of one more projection, or of its norm, the paper does not say
    "resnet1202": (19.4, 0.05),
    "bert-xlarge": (1270, 10),
    "densenet-bc-250-24": (15.3, 0.05),
    "densenet-bc-190-40": (25.6, 0.05),
}


def on_paper(name, **overrides):
    with torch.device("meta"):
        return zoo.build(name, **overrides)


def parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_exactly_those_of_the_literature(name):
    assert parameters(on_paper(name)) == EXACT[name]


@pytest.mark.parametrize("name", IN_MILLIONS)
def test_parameters_are_those_that_the_paper_prints(name):
    millions, slack = IN_MILLIONS[name]
    assert abs(parameters(on_paper(name)) / 1e6 - millions) <= slack


def test_googlenet_without_its_auxiliary_heads():
    assert parameters(on_paper("googlenet", aux=False)) == 6_624_904


@pytest.mark.parametrize("depth", [116, 216, 316, 416])
def test_vgg_is_stretched_by_the_same_number_of_convolutions_in_each_group(depth):
    per_group = (depth - 16) // 5
    added = sum(9 * width**2 + width for width in (64, 128, 256, 512, 512))
    network = on_paper(f"vgg{depth}")
    assert parameters(network) == EXACT["vgg16"] + per_group * added
    assert weighted_layers(network) == depth


@pytest.mark.parametrize(
    "name",
    ["resnet18", "resnet50", "resnet110", "resnet272", "resnet1001", "resnet1202", "resnet1922"],
)
def test_a_resnet_has_the_depth_of_its_name(name):
    assert weighted_layers(on_paper(name)) == int(name.removeprefix("resnet"))


@pytest.mark.parametrize(
    ("name", "depth"), [("densenet121", 121), ("densenet1001", 1001), ("densenet-bc-100-12", 100)]
)
def test_a_densenet_has_the_depth_of_its_name(name, depth):
    assert weighted_layers(on_paper(name)) == depth


def test_a_depth_of_ones_own():
    network = on_paper("resnet1928")  # 9 * 214 + 2
    assert weighted_layers(network) == 1928
    assert network.config.blocks == (214, 214, 214)


def weighted_layers(network):
    """Convolutions and linear layers on the longest way: without the shortcuts' projections."""
    return sum(
        isinstance(module, nn.Conv2d | nn.Linear)
        for name, module in network.named_modules()
        if "shortcut" not in name and "projection" not in name
    )
