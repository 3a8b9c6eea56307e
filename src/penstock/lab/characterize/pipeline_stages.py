"""Networks of the zoo cut in two for a pipeline; together the halves compute what the whole one does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.core.errors import ConfigError
from penstock.lab import zoo
from penstock.lab.zoo.bert import Bert
from penstock.lab.zoo.googlenet import GoogLeNet
from penstock.lab.zoo.gpt import CausalTransformer, GPTNeoConfig, local_window


class BertStart(nn.Module):
    """Embeddings and the first blocks."""

    def __init__(self, network: Bert, count: int) -> None:
        """Take them from the network."""
        super().__init__()
        self.embeddings = network.embeddings
        self.blocks = network.blocks[:count]

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, length]`` to features ``[batch, length, width]``."""
        x: Tensor = self.embeddings(tokens, None)
        for block in self.blocks:
            x = block(x, None)
        return x


class BertEnd(nn.Module):
    """The remaining blocks, and the head at every position."""

    def __init__(self, network: Bert, count: int) -> None:
        """Take them from the network."""
        super().__init__()
        self.blocks = network.blocks[count:]
        self.head = network.head

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[batch, length, width]`` to logits ``[batch, length, vocab]``."""
        for block in self.blocks:
            x = block(x, None)
        logits: Tensor = self.head(x)
        return logits


class CausalStart(nn.Module):
    """Embeddings and the first blocks."""

    def __init__(self, network: CausalTransformer, count: int) -> None:
        """Take them from the network."""
        super().__init__()
        self.tokens, self.positions = network.tokens, network.positions
        self.dropout = network.dropout
        self.blocks = network.blocks[:count]
        self._window = _window_of(network)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens ``[batch, length]`` to features ``[batch, length, width]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions(places))
        window = local_window(tokens, self._window) if self._window else None
        for block in self.blocks:
            x = block(x, window)
        return x


class CausalEnd(nn.Module):
    """The remaining blocks, the norm, and the output weights, which are the embeddings."""

    def __init__(self, network: CausalTransformer, count: int) -> None:
        """Take them from the network."""
        super().__init__()
        self.blocks = network.blocks[count:]
        self.norm = network.norm
        self.out = nn.Linear(1, 1, bias=False)
        self.out.weight = network.tokens.weight
        self._window = _window_of(network)

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[batch, length, width]`` to logits ``[batch, length, vocab]``."""
        window = local_window(x, self._window) if self._window else None
        for block in self.blocks:
            x = block(x, window)
        return F.linear(self.norm(x), self.out.weight)


class GoogLeNetStart(nn.Module):
    """The layers up to the fourth of the nine inception modules, without auxiliary heads."""

    def __init__(self, network: GoogLeNet) -> None:
        """Take them from the network."""
        super().__init__()
        inceptions, pools = network.inceptions, network.pools
        self.layers = nn.Sequential(
            network.stem, inceptions["3a"], inceptions["3b"], pools["3b"], inceptions["4a"]
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images to features."""
        features: Tensor = self.layers(images)
        return features


def _window_of(network: CausalTransformer) -> int:
    """Return the reach of local attention blocks; 0 without such blocks."""
    return network.config.window if isinstance(network.config, GPTNeoConfig) else 0


def split(network: zoo.Network) -> tuple[nn.Module, nn.Module]:
    """Cut a network into two modules with its own parameters; a tied weight is in both.

    Raises:
        ConfigError: The network is of a kind that has no known cut.
    """
    if isinstance(network, Bert | CausalTransformer):
        count = len(network.blocks) // 2
        if isinstance(network, Bert):
            return BertStart(network, count), BertEnd(network, count)
        return CausalStart(network, count), CausalEnd(network, count)
    if isinstance(network, GoogLeNet):
        inceptions, pools = network.inceptions, network.pools
        rest = [inceptions[name] for name in ("4b", "4c", "4d", "4e")]
        last = [pools["4e"], inceptions["5a"], inceptions["5b"], pools["5b"], nn.Flatten()]
        end = nn.Sequential(*rest, *last, network.dropout, network.out)
        return GoogLeNetStart(network), end
    features, rest = _children(network)
    return nn.Sequential(*features), nn.Sequential(*rest)


def _children(network: zoo.Network) -> tuple[list[nn.Module], list[nn.Module]]:
    """Split a vision network that is one sequence of layers at about half of its parameters."""
    parts = dict(network.named_children())
    if "classifier" in parts:
        features = list(parts["features"])  # type: ignore[call-overload]
        return features, [parts["pool"], nn.Flatten(), parts["classifier"]]
    if "groups" in parts:
        groups = list(parts["groups"])  # type: ignore[call-overload]
        return [parts["stem"], *groups[:2]], [
            *groups[2:],
            parts["pool"],
            nn.Flatten(),
            parts["out"],
        ]
    raise ConfigError(f"{type(network).__name__} cannot be cut into the halves of a pipeline")


def tied_weight(network: zoo.Network) -> Tensor | None:
    """Return the weight that both halves have, or None."""
    if isinstance(network, Bert):
        return network.embeddings.tokens.weight
    return network.tokens.weight if isinstance(network, CausalTransformer) else None


def loss_from_logits(network: zoo.Network) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of a micro-batch as a function of the last half's logits and the targets."""
    if isinstance(network, zoo.VisionNetwork):
        return F.cross_entropy

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=zoo.IGNORE)

    return loss
