"""Names, settings, and what is said about wrong ones."""

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.lab import zoo

ASKED_FOR = (
    "alexnet",
    "overfeat",
    "vgg11",
    "vgg16",
    "vgg116",
    "vgg216",
    "vgg316",
    "vgg416",
    "googlenet",
    "resnet18",
    "resnet50",
    "resnet272",
    "resnet1001",
    "resnet1202",
    "resnet1922",
    "densenet121",
    "densenet1001",
    "bert-base",
    "bert-large",
    "bert-xlarge",
    "gpt2",
    "gpt-neo-125m",
    "gpt-neo-1.3b",
    "gpt-neo-2.7b",
)


def test_the_networks_of_the_papers_have_names():
    assert set(ASKED_FOR) <= set(zoo.names())
    assert set(zoo.families()) <= set(zoo.names())
    assert len(set(zoo.names())) == len(zoo.names())


@pytest.mark.parametrize("name", zoo.names())
def test_every_name_has_a_tiny_version(name):
    network = zoo.build(name, size="tiny")
    assert sum(p.nbytes for p in network.parameters()) < 1e6
    assert network.config == zoo.config(name, size="tiny")
    assert network.training


@pytest.mark.parametrize(
    ("name", "kind", "blocks"),
    [
        ("resnet110", "basic", (18, 18, 18)),
        ("resnet272", "bottleneck", (30, 30, 30)),
        ("resnet1001", "bottleneck", (111, 111, 111)),
        ("resnet101", "bottleneck", (3, 4, 23, 3)),  # though 101 is 9 * 11 + 2
        ("resnet1922", "bottleneck", (6, 32, 596, 6)),
    ],
)
def test_which_resnet_a_depth_means(name, kind, blocks):
    config = zoo.config(name)
    assert (config.block, config.blocks) == (kind, blocks)


@pytest.mark.parametrize(
    "name", ["", "resnet", "resnet9", "resnet153", "lenet", "VGG16", "gpt-neo"]
)
def test_an_unknown_name_is_refused_with_those_that_there_are(name):
    with pytest.raises(ConfigError, match=f"no {name!r}; it has alexnet, overfeat"):
        zoo.build(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vgg17", r"11, 13, 16 or 19 layers, or 16 \+ 5k"),
        ("vgg6", r"11, 13, 16 or 19 layers, or 16 \+ 5k"),
        ("densenet122", r"121, 161, 169, 201, 264 layers, or 2m \+ 5"),
        ("densenet-bc-101-12", r"a depth of 6n \+ 4"),
    ],
)
def test_a_depth_that_no_layout_gives_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        zoo.build(name)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("vgg16", {"vocab_size": 3}, "vgg16 has no setting vocab_size; it has convs, dropout"),
        ("gpt2", {"image_size": 3}, "gpt2 has no setting image_size"),
        ("gpt2", {"size": "small"}, "size='small' must be 'full' or 'tiny'"),
        ("gpt2", {"width": 100, "heads": 3}, "width=100 is not a multiple of heads=3"),
        ("gpt2", {"depth": 0}, "depth=0 must not be below 1"),
        ("gpt2", {"depth": 2.5}, "gpt2: depth=2.5 must be of type int"),
        ("gpt2", {"depth": True}, "gpt2: depth=True must be of type int"),
        ("gpt2", {"dropout": "a"}, "gpt2: dropout='a' must be of type float"),
        ("vgg16", {"inplace": 1}, "vgg16: inplace=1 must be of type bool"),
        ("gpt2", {"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ("vgg16", {"extra": -1}, "extra=-1 must not be below 0"),
        ("vgg16", {"convs": (2, 2, 0, 3, 3)}, r"convs=\(2, 2, 0, 3, 3\) must not be below 1"),
        ("vgg16", {"widths": (64, 128)}, "must have five values each"),
        ("alexnet", {"widths": (64,)}, "must be five channel counts"),
        ("overfeat", {"widths": (64,)}, "must be five channel counts"),
        ("resnet18", {"blocks": (2, 2, 2)}, "four group depths"),
        ("resnet272", {"block": "wide"}, "block='wide' must be 'basic' or 'bottleneck'"),
        ("googlenet", {"divisor": 3}, "divisor=3 is not 1, 2, 4 or 8"),
        ("densenet121", {"stem": "mnist"}, "stem='mnist' is not 'imagenet' or 'cifar'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        zoo.build(name, **overrides)


def test_the_same_seed_builds_the_same_network():
    networks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        networks.append(zoo.build("resnet18", size="tiny").out.weight)
    assert torch.equal(networks[0], networks[1])
    assert not torch.equal(networks[0], networks[2])


def test_settings_reach_the_network():
    network = zoo.build("bert-base", size="tiny", depth=3, vocab_size=400, sequence_length=16)
    assert len(network.blocks) == 3
    assert network.embeddings.tokens.num_embeddings == 400
    assert zoo.example_batch(network, 2).inputs.shape == (2, 16)
