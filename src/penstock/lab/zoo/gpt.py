"""GPT-2 (Radford et al. 2019) and GPT-Neo (Black et al. 2021): causal language models.

GPT-2 124,439,808 parameters; GPT-Neo 125M 125,198,592, 1.3B 1,315,575,808, 2.7B 2,651,307,520. The
logits are computed with the embeddings' own weights. GPT-Neo differs in this: every other block
sees the last 256 tokens only, the attention is not scaled by the width of a head, and
queries, keys and values come from three projections without bias; GPT-2 has one
with bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.lab.zoo.base import IGNORE, LanguageConfig, LanguageNetwork, Setting, ZooEntry
from penstock.lab.zoo.weights import gaussian_


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Config(LanguageConfig):
    """Settings of GPT-2, by default the smallest."""

    vocab_size: int = 50257
    sequence_length: int = 1024
    depth: int = 12
    width: int = 768
    heads: int = 12
    init_std: float = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTNeoConfig(LanguageConfig):
    """Settings of GPT-Neo, by default 125M. It is trained without dropout."""

    vocab_size: int = 50257
    sequence_length: int = 2048
    depth: int = 12
    width: int = 768
    heads: int = 12
    dropout: float = 0.0
    attention_dropout: float = 0.0
    window: int = 256
    """Number of tokens, itself included, that a token of the odd blocks attends to."""
    init_std: float = 0.02


class FusedAttention(nn.Module):
    """Attention of GPT-2: one projection to query, key and value; scaled, causal."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.attention_dropout

    def forward(self, x: Tensor, window: Tensor | None) -> Tensor:
        """Map ``[batch, length, width]`` to the same; ``window`` is not used."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class NeoAttention(nn.Module):
    """Attention of GPT-Neo: three projections without bias; unscaled, causal, windowed if ``local``."""

    def __init__(self, config: GPTNeoConfig, *, local: bool) -> None:
        super().__init__()
        self.heads = config.heads
        self.local = local
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.attention_dropout

    def forward(self, x: Tensor, window: Tensor | None) -> Tensor:
        """Map ``[batch, length, width]`` to the same; ``window`` bool ``[length, length]``."""
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=window if self.local else None,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=not self.local,
            scale=1.0,
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class GptBlock(nn.Module):
    """Attention, then an MLP; each reads the normalised stream and adds to it."""

    def __init__(self, config: GPT2Config | GPTNeoConfig, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, window: Tensor | None) -> Tensor:
        """Map ``[batch, length, width]`` to the same."""
        x = x + self.dropout(self.attention(self.norm1(x), window))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class CausalTransformer(LanguageNetwork):
    """Embeddings, blocks, a norm, and the embeddings as output weights."""

    def __init__(self, config: GPT2Config | GPTNeoConfig, attentions: list[nn.Module]) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(GptBlock(config, attention) for attention in attentions)
        self.norm = nn.LayerNorm(config.width)
        gaussian_(self, std=config.init_std)

    def window(self, tokens: Tensor) -> Tensor | None:
        """Return the mask of local blocks, bool ``[length, length]``, or ``None`` without such blocks."""
        return None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss over the positions where ``targets`` is not IGNORE, or the logits.

        Args:
            tokens: int64 ``[batch, length]``.
            targets: int64 ``[batch, length]``: the next token of each position.

        Raises:
            ConfigError: The sequence is longer than ``sequence_length``.
        """
        self.check_length(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        window = self.window(tokens)
        for block in self.blocks:
            x = block(x, window)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


class GPT2(CausalTransformer):
    """GPT-2. Initial additions to the residual stream are smaller, the deeper the network."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config, [FusedAttention(config) for _ in range(config.depth)])
        std = config.init_std * (2 * config.depth) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=std)


class GPTNeo(CausalTransformer):
    """GPT-Neo: even blocks attend globally, odd ones locally."""

    def __init__(self, config: GPTNeoConfig) -> None:
        attentions = [NeoAttention(config, local=bool(i % 2)) for i in range(config.depth)]
        super().__init__(config, list(attentions))
        self._window = config.window

    def window(self, tokens: Tensor) -> Tensor | None:
        """Return a mask: True where a token may see another, not later and less than a window earlier."""
        return local_window(tokens, self._window)


def local_window(tokens: Tensor, window: int) -> Tensor:
    """Return the mask of local blocks for ``[batch, length, ...]``: bool ``[length, length]``."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance < window)


_TINY = {"vocab_size": 320, "sequence_length": 64, "depth": 2, "width": 64, "heads": 4}


def _neo(**full: Setting) -> ZooEntry:
    return ZooEntry(network=GPTNeo, config=GPTNeoConfig, full=full, tiny={**_TINY, "window": 16})


ENTRIES = {
    "gpt2": ZooEntry(network=GPT2, config=GPT2Config, tiny=_TINY),
    "gpt-neo-125m": _neo(),
    "gpt-neo-1.3b": _neo(depth=24, width=2048, heads=16),
    "gpt-neo-2.7b": _neo(depth=32, width=2560, heads=20),
}
