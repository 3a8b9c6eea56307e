"""A dry profile has the slots that a real session measures: same names, sizes, order, and needs."""

import pytest
import torch
from dry_runs import FLOOR_BYTES, GPU, measured, measured_zoo, needed, slots_of
from torch import nn
from torch.nn import functional as F

from penstock.lab import zoo
from penstock.lab.dry import dry_step, dry_zoo_step


def assert_same_slots(dry, real):
    assert slots_of(dry) == slots_of(real)
    assert needed(dry) == needed(real)
    assert dry.saved_bytes == real.saved_bytes
    assert dry.small_bytes == real.small_bytes
    assert dry.small_count == real.small_count
    assert dry.unrepeatable == real.unrepeatable
    assert len(dry.passes) == len(real.passes) == 1


@pytest.mark.parametrize("name", zoo.families())
def test_every_kind_of_network_of_the_zoo(tmp_path, name):
    real = measured_zoo(tmp_path, name, 8)
    dry = dry_zoo_step(
        name, 8, machine=GPU, whole_device=False, floor_bytes=FLOOR_BYTES, size="tiny"
    ).profile
    assert len(dry.slots) >= 4
    assert_same_slots(dry, real)


@pytest.mark.parametrize("name", ["vgg16", "densenet121", "bert-base", "gpt2"])
def test_under_autocast(tmp_path, name):
    real = measured_zoo(tmp_path, name, 8, autocast="bfloat16")
    dry = dry_zoo_step(
        name,
        8,
        machine=GPU,
        autocast="bfloat16",
        whole_device=False,
        floor_bytes=FLOOR_BYTES,
        size="tiny",
    ).profile
    assert {slot.dtype for slot in dry.slots} >= {"bfloat16"}
    assert_same_slots(dry, real)


class Attention(nn.Module):
    """Fused queries, keys and values; masked, causal or neither."""

    def __init__(self, *, masked=False, causal=False, dropout=0.0):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.masked, self.causal, self.dropout = masked, causal, dropout

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.masked else None
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=self.causal, dropout_p=self.dropout
        )
        return y.transpose(1, 2).flatten(2)


class Part(nn.Module):
    """Saves a row of a table: a view of less than an eighth of its storage."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        y = self.linear(x)
        return y[:, 1:3].exp() * y[:, 4:5].sin()


class Shared(nn.Module):
    """One storage saved by several operators and modules, and expanded ones."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.relu = nn.ReLU()

    def forward(self, x):
        y = self.relu(self.linear(x))
        y = y * y + self.relu(self.linear(y))
        return y * y.mean(0, keepdim=True).expand_as(y)


class Recomputing(nn.Module):
    """Runs a part of forward again in backward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
        self.outer = nn.Linear(32, 32)

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return self.outer(y)


IMAGES = (16, 8, 12, 12)
TEXT = (16, 40, 32)
PARTS = {
    "batch norm, relu in place": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        IMAGES,
    ),
    "relu in place, pooling": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        IMAGES,
    ),
    "grouped, dilated, strided, transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(8, 16, 3, groups=4, dilation=2), nn.ConvTranspose2d(16, 8, 3, stride=2)
        ),
        IMAGES,
    ),
    "group norm, silu, average pooling, dropout": (
        lambda: nn.Sequential(
            nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2), nn.Dropout2d(0.3)
        ),
        IMAGES,
    ),
    "dropout in place": (
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5, inplace=True), nn.Dropout(0.2)),
        TEXT,
    ),
    "attention": (Attention, TEXT),
    "attention, causal": (lambda: Attention(causal=True), TEXT),
    "attention, masked": (lambda: Attention(masked=True), TEXT),
    "attention, causal, dropout": (lambda: Attention(causal=True, dropout=0.1), TEXT),
    "attention, masked, dropout": (lambda: Attention(masked=True, dropout=0.1), TEXT),
    "an encoder layer of torch": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True),
        TEXT,
    ),
    "part of a storage": (Part, TEXT),
    "shared storages": (Shared, TEXT),
    "recomputed": (Recomputing, TEXT),
    "layer norm, gelu, softmax": (
        lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Softmax(-1)),
        TEXT,
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_saves_in_its_own_way(tmp_path, part):
    make, shape = PARTS[part]
    torch.manual_seed(0)
    network, x = make(), torch.randn(shape)
    real = measured(tmp_path, network, lambda: network(x).sum().backward(), floor_bytes=8192)
    dry = dry_step(
        network,
        lambda model, x: model(x).sum(),
        inputs=(x,),
        machine=GPU,
        whole_device=False,
        floor_bytes=8192,
    ).profile
    assert dry.slots
    assert_same_slots(dry, real)


def test_a_slot_knows_the_module_that_made_it():
    network = nn.Sequential(
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.MaxPool2d(2),
    )
    profile = dry_step(
        network,
        lambda model, x: (model(x) * 2).pow(2).mean(),
        inputs=(torch.empty(IMAGES),),
        machine=GPU,
        floor_bytes=4097,
    ).profile
    # by hand: the innermost module in which it was made, and all that saved it
    assert [(slot.key.module, slot.producer) for slot in profile.slots] == [
        ("Sequential.0", None),
        ("Sequential.1", "Sequential"),
        ("Sequential.2", "Sequential"),
        ("Sequential.4", "Sequential"),
        ("Sequential.4", "Sequential.4"),
        ("", None),
    ]
