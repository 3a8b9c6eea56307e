"""BERT (Devlin et al. 2019) with the masked-language-model head, tied to the embeddings.

Base 109,514,298 parameters, Large 335,174,458; XLarge is the 24 x 2048 network that ALBERT (Lan et
al. 2020, table 2) compares with, there "1270M". The head runs at the masked positions only, which
are gathered before the projection onto the vocabulary, as in the original implementation; otherwise the
logits alone would outweigh all other activations. Next-sentence prediction is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.core.errors import ConfigError
from penstock.lab.zoo.base import IGNORE, LanguageConfig, LanguageNetwork, Setting, ZooEntry
from penstock.lab.zoo.weights import gaussian_


@dataclass(frozen=True, kw_only=True, slots=True)
class BertConfig(LanguageConfig):
    """Settings of BERT. The last id of the vocabulary stands for a masked token."""

    objective: ClassVar[Literal["causal", "masked"]] = "masked"

    vocab_size: int = 30522
    sequence_length: int = 512
    depth: int = 12
    width: int = 768
    heads: int = 12
    token_types: int = 2
    """Number of segment kinds: first and second sentence."""
    norm_eps: float = 1e-12
    init_std: float = 0.02


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.types = nn.Embedding(config.token_types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        """Map ``[batch, length]`` to ``[batch, length, width]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        x = x + self.types(torch.zeros_like(tokens) if types is None else types)
        out: Tensor = self.dropout(self.norm(x))
        return out


class SelfAttention(nn.Module):
    """Multi-head attention of every token to every other."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.attention_dropout

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``[batch, length, width]`` to the same; ``mask`` is bool, True: attend."""
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class BertBlock(nn.Module):
    """Attention, then an MLP, each added and then normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map ``[batch, length, width]`` to the same."""
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        out: Tensor = self.norm2(x + self.dropout(self.mlp(x)))
        return out


class MaskedHead(nn.Module):
    """The map from features to the vocabulary, whose weights are the embeddings."""

    def __init__(self, config: BertConfig, tied: Tensor) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.weight = tied  # a parameter: shared, so counted and saved once
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., width]`` to ``[..., vocab]``."""
        return F.linear(self.norm(F.gelu(self.dense(x))), self.weight, self.bias)


class Bert(LanguageNetwork):
    """A stack of bidirectional transformer blocks under a masked-language-model head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(BertBlock(config) for _ in range(config.depth))
        self.head = MaskedHead(config, self.embeddings.tokens.weight)
        gaussian_(self, std=config.init_std)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss over the positions where ``targets`` is not IGNORE, or all logits.

        Args:
            tokens: int64 ``[batch, length]``.
            targets: int64 ``[batch, length]``; at least one must not be IGNORE.
            token_types: int64 ``[batch, length]``, the segment of each token; all 0 by default.
            attention_mask: bool ``[batch, length]``, False at padding; all True by default.

        Raises:
            ConfigError: The sequence is too long, or no position has a target.
        """
        self.check_length(tokens)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(tokens, token_types)
        for block in self.blocks:
            x = block(x, mask)
        if targets is None:
            logits: Tensor = self.head(x)
            return logits
        places = (targets.flatten() != IGNORE).nonzero().squeeze(1)
        if not len(places):
            raise ConfigError(
                f"Bert: all {targets.numel()} targets are {IGNORE}, so there is nothing to predict"
            )
        x = x.flatten(0, 1).index_select(0, places)
        return F.cross_entropy(self.head(x), targets.flatten().index_select(0, places))


def _entry(**full: Setting) -> ZooEntry:
    tiny = {"vocab_size": 320, "sequence_length": 64, "depth": 2, "width": 64, "heads": 4}
    return ZooEntry(network=Bert, config=BertConfig, full=full, tiny=tiny)


ENTRIES = {
    "bert-base": _entry(),
    "bert-large": _entry(depth=24, width=1024, heads=16),
    "bert-xlarge": _entry(depth=24, width=2048, heads=32),
}
