"""Every kind of network runs forward and backward, and computes what it says."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.core.errors import ConfigError
from penstock.lab import zoo
from penstock.lab.zoo.base import ImageWindow, final_size
from penstock.lab.zoo.gpt import FusedAttention, GPT2Config, GPTNeoConfig, NeoAttention

VISION = [name for name in zoo.families() if isinstance(zoo.config(name), zoo.VisionConfig)]
LANGUAGE = [name for name in zoo.families() if name not in VISION]


def tiny(name, **overrides):
    torch.manual_seed(0)
    return zoo.build(name, size="tiny", **overrides)


def gradients(network, batch):
    torch.manual_seed(1)
    network.zero_grad()
    loss = network(*batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in network.named_parameters()}


def saved_storages(network, batch):
    """Bytes of each storage that autograd keeps, the parameters' aside."""
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept, sizes = [], {}

    def pack(tensor):
        kept.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        network(*batch)
    return list(sizes.values())


@pytest.mark.parametrize("name", zoo.families())
def test_the_gradient_reaches_every_parameter(name):
    network = tiny(name)
    loss, grads = gradients(network, zoo.example_batch(network, 4))
    assert loss.shape == ()
    assert loss.isfinite()
    for parameter, grad in grads.items():
        assert grad.isfinite().all(), parameter
        if not parameter.endswith("attention.key.bias"):  # softmax cancels it: zero on paper
            assert grad.any(), parameter


@pytest.mark.parametrize("name", zoo.families())
def test_the_tiny_version_is_small_but_saves_something(name):
    network = tiny(name)
    assert sum(p.nbytes for p in network.parameters()) < 1e6
    sizes = saved_storages(network, zoo.example_batch(network, 4))
    assert 4e3 < max(sizes) < 4e6


@pytest.mark.parametrize("name", VISION)
def test_without_targets_there_are_logits_per_image(name):
    network = tiny(name, num_classes=7)
    assert network(zoo.example_batch(network, 3).inputs).shape == (3, 7)


@pytest.mark.parametrize("name", LANGUAGE)
def test_without_targets_there_are_logits_per_token(name):
    network = tiny(name)
    tokens = zoo.example_batch(network, 3, sequence_length=20).inputs
    assert network(tokens).shape == (3, 20, network.config.vocab_size)


@pytest.mark.parametrize("name", zoo.families())
def test_the_loss_is_the_cross_entropy_of_the_logits(name):
    network = tiny(name).eval()
    batch = zoo.example_batch(network, 3)
    logits = network(batch.inputs).flatten(0, -2)
    expected = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=zoo.IGNORE)
    torch.testing.assert_close(network(*batch), expected)


@pytest.mark.parametrize("name", zoo.families())
def test_bfloat16_autocast(name):
    network = tiny(name)
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(*zoo.example_batch(network, 2))
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", VISION)
def test_inplace_changes_no_bit(name):
    one = tiny(name, inplace=True)
    other = tiny(name, inplace=False)
    batch = zoo.example_batch(one, 2)
    (loss, grads), (same_loss, same_grads) = gradients(one, batch), gradients(other, batch)
    assert torch.equal(loss, same_loss)
    for parameter, grad in grads.items():
        assert torch.equal(grad, same_grads[parameter]), parameter


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "googlenet", "bert-base", "gpt2"])
def test_dropout_draws_from_the_global_generator(name):
    network = tiny(name)
    batch = zoo.example_batch(network, 2)
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(network(*batch).item())
    assert losses[0] == losses[1] != losses[2]
    network.eval()
    assert network(*batch).item() == network(*batch).item()


@pytest.mark.parametrize(
    ("name", "least"),
    [("alexnet", 63), ("overfeat", 71), ("vgg16", 32), ("googlenet", 15), ("densenet121", 29)],
)
def test_the_smallest_image(name, least):
    network = tiny(name, image_size=least, in_channels=2)
    network(*zoo.example_batch(network, 2)).backward()
    with pytest.raises(ConfigError, match=f"image_size={least - 1}.* use at least {least}"):
        tiny(name, image_size=least - 1)


@pytest.mark.parametrize("name", [name for name in VISION if name != "overfeat"])
def test_a_network_takes_images_of_other_sizes_than_it_was_built_for(name):
    network = tiny(name)
    network(*zoo.example_batch(network, 2, image_size=96)).backward()


def test_overfeat_refuses_images_of_another_size():
    network = tiny("overfeat")
    with pytest.raises(ConfigError, match="71x71 pixels, and these have 96x96"):
        network(zoo.example_batch(network, 2, image_size=96).inputs)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_final_size_is_what_torch_computes(kernel, stride, ceil):
    pool = nn.MaxPool2d(kernel, stride, padding=kernel // 2, ceil_mode=ceil)
    bare = nn.MaxPool2d(kernel, stride, ceil_mode=ceil)
    for size in range(1, 24):
        expected = 0
        with contextlib.suppress(RuntimeError):
            expected = pool(bare(torch.zeros(1, 1, size, size))).shape[-1]
        windows = (
            ImageWindow(kernel, stride, 0, ceil),
            ImageWindow(kernel, stride, kernel // 2, ceil),
        )
        assert final_size(size, windows) == expected, size


def test_a_stretched_vgg_computes_with_live_numbers():
    network = tiny("vgg116", extra=20)
    assert sum(isinstance(module, nn.Conv2d) for module in network.modules()) == 113
    network.eval()  # dropout aside
    first, second = zoo.example_batch(network, 2).inputs
    logits = network(torch.stack([first, second]))
    assert 1e-3 < (logits[0] - logits[1]).abs().max() < 10  # He's weights give 1e-8
    _, grads = gradients(network, zoo.example_batch(network, 4))
    norms = [grad.norm().item() for name, grad in grads.items() if name.endswith("weight")]
    assert max(norms) / min(norms) < 1e4


def test_googlenet_adds_its_auxiliary_losses_in_training_only():
    network = tiny("googlenet", dropout=0.0, aux_dropout=0.0)
    for norm in network.modules():  # normalise by the batch in either mode
        if isinstance(norm, nn.BatchNorm2d):
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    batch = zoo.example_batch(network, 4)
    last = F.cross_entropy(network(batch.inputs), batch.targets)
    assert network(*batch) > last
    torch.testing.assert_close(network.eval()(*batch), last)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neo-125m"])
def test_a_causal_model_does_not_look_ahead(name):
    network = tiny(name).eval()
    tokens = zoo.example_batch(network, 1).inputs
    changed = tokens.clone()
    changed[0, 30] = (changed[0, 30] + 1) % network.config.vocab_size
    before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :30], after[:, :30])
    assert not torch.allclose(before[:, 30:], after[:, 30:])


def naive_attention(query, key, value, visible, scale):
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ value


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def test_gpt2_attention_is_causal_and_scaled():
    config = GPT2Config(width=32, heads=4, attention_dropout=0.0)
    attention = FusedAttention(config)
    x = torch.randn(2, 10, 32)
    query, key, value = (heads(part, 4) for part in attention.qkv(x).chunk(3, dim=-1))
    visible = torch.ones(10, 10).tril().bool()
    expected = naive_attention(query, key, value, visible, scale=8**-0.5)
    expected = attention.out(expected.transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, None), expected)


@pytest.mark.parametrize("local", [False, True])
def test_gpt_neo_attention_is_unscaled_and_every_other_is_local(local):
    config = GPTNeoConfig(width=32, heads=4, depth=2, window=3, vocab_size=50, sequence_length=10)
    network = zoo.build("gpt-neo-125m", **{f: getattr(config, f) for f in NEO_SIZES})
    attention = network.blocks[int(local)].attention
    assert isinstance(attention, NeoAttention)
    assert attention.local == local
    x = torch.randn(2, 10, 32)
    query, key, value = (heads(p(x), 4) for p in (attention.query, attention.key, attention.value))
    visible = torch.ones(10, 10).tril().bool()
    if local:  # itself and the two before it
        visible &= torch.ones(10, 10).triu(-2).bool()
    expected = naive_attention(query, key, value, visible, scale=1.0)
    expected = attention.out(expected.transpose(1, 2).flatten(2))
    window = network.window(torch.zeros(2, 10, dtype=torch.int64))
    torch.testing.assert_close(attention(x, window), expected)


NEO_SIZES = ("width", "heads", "depth", "window", "vocab_size", "sequence_length")


def test_bert_projects_the_masked_positions_only():
    network = tiny("bert-base", vocab_size=5000)
    batch = zoo.example_batch(network, 4)
    masked = int((batch.targets != zoo.IGNORE).sum())
    assert masked == 4 * round(0.15 * 64)
    assert max(saved_storages(network, batch)) == masked * 5000 * 4


def test_bert_sees_both_ways_but_not_the_padding():
    network = tiny("bert-base").eval()
    tokens = zoo.example_batch(network, 1).inputs
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 50:] = False
    changed = tokens.clone()
    changed[0, 50:] = 1
    torch.testing.assert_close(
        network(tokens, attention_mask=mask)[:, :50], network(changed, attention_mask=mask)[:, :50]
    )
    assert not torch.allclose(network(tokens)[:, :50], network(changed)[:, :50])
    types = (torch.arange(64) >= 32).long()[None]
    assert not torch.allclose(network(tokens, token_types=types), network(tokens))


def test_bert_refuses_a_batch_without_targets():
    network = tiny("bert-base")
    tokens = zoo.example_batch(network, 1).inputs
    with pytest.raises(ConfigError, match="all 64 targets are -100"):
        network(tokens, torch.full_like(tokens, zoo.IGNORE))


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_sequence_longer_than_the_positions_is_refused(name):
    network = tiny(name)
    with pytest.raises(ConfigError, match="65 tokens is longer than the 64 positions"):
        network(zoo.example_batch(network, 1, sequence_length=65).inputs)


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_output_embedding_is_the_input_embedding(name):
    network = tiny(name)
    shape = (network.config.vocab_size, network.config.width)
    assert [tuple(p.shape) for p in network.parameters()].count(shape) == 1


def test_gpt2_begins_what_is_added_to_the_stream_smaller():
    network = tiny("gpt2", depth=8)
    added, other = network.blocks[0].mlp[2].weight, network.blocks[0].mlp[0].weight
    assert added.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert other.std().item() == pytest.approx(0.02, rel=0.05)
