"""Example batches, and BERT's masking."""

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.lab import zoo


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["alexnet", "bert-base", "gpt2"])
def test_a_seed_fixes_the_batch(name):
    config = zoo.config(name, size="tiny")
    assert same(zoo.example_batch(config, 3), zoo.example_batch(config, 3))
    assert not same(zoo.example_batch(config, 3), zoo.example_batch(config, 3, seed=1))
    state = torch.get_rng_state()
    zoo.example_batch(config, 3)
    assert torch.equal(state, torch.get_rng_state())


def test_a_generator_goes_on():
    config = zoo.config("gpt2", size="tiny")
    generator = torch.Generator().manual_seed(0)
    first = zoo.example_batch(config, 2, generator=generator)
    second = zoo.example_batch(config, 2, generator=generator)
    assert same(first, zoo.example_batch(config, 2))
    assert not same(first, second)


def test_a_network_its_configuration_and_its_name_give_the_same():
    network = zoo.build("googlenet", size="tiny")
    batch = zoo.example_batch(network, 2)
    assert same(batch, zoo.example_batch(network.config, 2))
    assert same(batch, zoo.example_batch("googlenet", 2, size="tiny"))


def test_sizes_can_be_overridden():
    network = zoo.build("vgg16", size="tiny")
    assert zoo.example_batch(network, 2, image_size=40).inputs.shape == (2, 3, 40, 40)
    assert zoo.example_batch("vgg16", 1, in_channels=1).inputs.shape == (1, 1, 224, 224)
    with pytest.raises(ConfigError, match=r"unknown setting of VGGConfig: .*sequence_length"):
        zoo.example_batch(network, 2, sequence_length=3)
    with pytest.raises(ConfigError, match="batch_size=0"):
        zoo.example_batch(network, 0)


def test_classes_and_tokens_are_in_range():
    images = zoo.example_batch("alexnet", 64, size="tiny", num_classes=3)
    assert images.inputs.dtype == torch.float32
    assert set(images.targets.tolist()) == {0, 1, 2}
    tokens = zoo.example_batch("gpt2", 64, size="tiny", vocab_size=5).inputs
    assert set(tokens.flatten().tolist()) == set(range(5))


def test_a_causal_model_is_to_say_the_next_token():
    batch = zoo.example_batch("gpt2", 3, size="tiny")
    assert batch.inputs.shape == batch.targets.shape == (3, 64)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.inputs.is_contiguous()
    assert batch.targets.is_contiguous()


def test_masking_is_berts():
    tokens = torch.randint(1000, (400, 100), generator=torch.Generator().manual_seed(0))
    original = tokens.clone()
    batch = zoo.mask_tokens(tokens, vocab_size=1001, generator=torch.Generator().manual_seed(1))
    assert torch.equal(tokens, original)
    hidden = batch.targets != zoo.IGNORE
    assert hidden.sum(1).eq(15).all()
    assert torch.equal(batch.targets[hidden], original[hidden])
    assert torch.equal(batch.inputs[~hidden], original[~hidden])
    masked = batch.inputs[hidden] == 1000
    stayed = batch.inputs[hidden] == original[hidden]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert stayed.float().mean().item() == pytest.approx(0.1, abs=0.02)
    places = hidden.float().mean(0)
    assert (places - 0.15).abs().max() < 0.1  # no position is preferred


def test_a_short_sequence_has_one_masked_token():
    batch = zoo.example_batch("bert-base", 5, size="tiny", sequence_length=2)
    assert (batch.targets != zoo.IGNORE).sum(1).eq(1).all()


def test_a_batch_moves_to_a_device():
    batch = zoo.example_batch("gpt2", 2, size="tiny", device="meta")
    assert batch.inputs.device.type == batch.targets.device.type == "meta"
