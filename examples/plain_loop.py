"""A small language model learns Python's own standard library in a plain training loop.

The script does not mention Penstock. Run it without and with, and compare the output:

    python examples/plain_loop.py
    penstock run --device-memory 24MiB --flash . examples/plain_loop.py
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sysconfig
from pathlib import Path

import torch
from torch import nn

CONTEXT = 128


class Block(nn.Module):
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out; embedding and head share their weight."""

    def __init__(self, width: int = 256, depth: int = 3) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.bytes(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def loss_of(model: Model, data: torch.Tensor, batch: int) -> torch.Tensor:
    starts = torch.randint(len(data) - CONTEXT - 1, (batch, 1))
    ids = data[starts + torch.arange(CONTEXT + 1)].long()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model, data = Model(), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + math.cos(math.pi * step / options.steps)) / 2
        for _ in range(2):  # gradients of two batches make a step
            loss = loss_of(model, data, options.batch) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {2 * loss.item():.4f}")
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("sha256 of all weights:", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
