"""The networks of the benchmarks of weights on flash: decoders in the shape of LLaMA, and GPT-2 XL."""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from penstock.lab.zoo import gpt


class Shape(NamedTuple):
    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int = 32000

    @property
    def parameters(self):
        block = 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * block + 2 * self.vocabulary * self.hidden + self.hidden

    def network(self, dtype):
        return Decoder(self, dtype)

    @property
    def unread(self):
        """Parameters of the embedding, of which a step reads rows only."""
        return self.vocabulary * self.hidden


class Gpt2Shape(NamedTuple):
    """GPT-2 without dropout, as it is trained here; the head has the weights of the embedding."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 50257
    unread = 0

    @property
    def parameters(self):
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.layers * block + (self.vocabulary + 1024) * self.hidden + 2 * self.hidden

    def network(self, dtype):
        config = gpt.GPT2Config(
            vocab_size=self.vocabulary,
            depth=self.layers,
            width=self.hidden,
            heads=self.heads,
            dropout=0.0,
            attention_dropout=0.0,
        )
        with default_dtype(dtype):
            return gpt.GPT2(config)


SHAPES = {
    "25M": Shape(512, 4, 8, 1376, 4096),
    "91M": Shape(768, 12, 12, 2048, 4096),
    "350M": Shape(1024, 24, 16, 2752),
    "774M": Shape(1536, 24, 16, 4128),
    "1.5B": Shape(2048, 28, 16, 5504),
    "2.7B": Shape(2560, 32, 32, 6912),
    "6.7B": Shape(4096, 32, 32, 11008),
    "13B": Shape(5120, 40, 40, 13824),
    "65B": Shape(8192, 80, 64, 22016),
    "gpt2-xl": Gpt2Shape(1600, 48, 25),
}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        hidden, inner = shape.hidden, shape.inner
        self.head_width = hidden // shape.heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, turns):
        heads = self.qkv(self.before(x)).unflatten(-1, (3, -1, self.head_width))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = turned(query, turns), turned(key, turns)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def turns_of(shape, length, dtype):
    """Cosines and sines of rotary positions."""
    half = shape.hidden // shape.heads // 2
    rates = 10000.0 ** -(torch.arange(half) / half)
    angles = torch.arange(length)[:, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x, turns):
    """Rotary positions."""
    cos, sin = turns
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


class Decoder(nn.Module):
    def __init__(self, shape, dtype=torch.bfloat16):
        super().__init__()
        self.shape = shape
        with default_dtype(dtype):
            self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        turns = turns_of(self.shape, ids.shape[1], x.dtype)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


class Adapter(nn.Module):
    """A low-rank addition to a linear layer, of zeros at first."""

    def __init__(self, width, dtype, rank=8):
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, width, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.up(self.down(x))


class Adapted(nn.Module):
    """The projections of attention, with adapters of queries and values."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.query = Adapter(base.in_features, base.weight.dtype)
        self.value = Adapter(base.in_features, base.weight.dtype)

    def forward(self, x):
        query, key, value = self.base(x).chunk(3, dim=-1)
        return torch.cat((query + self.query(x), key, value + self.value(x)), dim=-1)


def adapt(model):
    """Freeze a decoder, and add adapters of queries and values."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)


def loss_of(model, ids):
    logits = model(ids)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def planned(name, dtype, mode, tokens):
    """A model, ids for it, and its loss: a network of ``penstock plan``."""
    model = SHAPES[name].network(getattr(torch, dtype))
    if mode == "lora":
        adapt(model)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return model, ids, loss_of if mode in ("full", "lora") else logits_of


def logits_of(model, ids):
    return model(ids).sum()
