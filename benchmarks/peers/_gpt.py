"""The network that ours and the peer train: a GPT of about so many parameters, by its layers."""

import torch
from torch import nn
from torch.nn import functional

HIDDEN = 768
VOCABULARY = 8192
LENGTH = 64


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, parameters, length=LENGTH):
        super().__init__()
        layers = max(1, round((parameters - 2 * VOCABULARY * HIDDEN) / (12 * HIDDEN**2)))
        self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(length, HIDDEN)
        self.blocks = nn.ModuleList(Block(HIDDEN, HIDDEN // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
