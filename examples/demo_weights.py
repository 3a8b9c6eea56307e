"""The demo's last minute: a model that does not fit in the memory that it is given, in training.

A transformer of 300 million parameters learns to predict the next byte of Python's own sources. In plain
PyTorch its float32 weights, gradients and Adam's states take 4.5 GiB before the first step. Here weights
and states rest on flash, and a gradient is gone as soon as its weight is updated: what Penstock holds
stays within ``--memory``.

    python examples/demo_weights.py [--steps N] [--memory SIZE] [--flash DIR] [--out DIR]

It writes ``weights.png``.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.core.units import format_bytes, parse_bytes
from penstock.observe.records import read_events
from penstock.optim import FlashAdamW
from penstock.report.memory_plot import MemorySeries, plot_memory

WIDTH, LAYERS, HEADS, LENGTH = 1024, 24, 16, 128
BYTES_OF_ADAM = 16
"""Of a float32 weight, its gradient and its two states, in plain PyTorch."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = self.qkv(self.norm1(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        down: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + down


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> int:
    args = parse(sys.argv[1:])
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    flash, log = args.flash or args.out, args.out / "weights.jsonl"
    text = sources()
    torch.manual_seed(0)
    begun = time.perf_counter()
    with penstock.built_on_flash(flash):
        model = ByteModel()
    count = sum(each.numel() for each in model.parameters())
    console.print(
        f"[bold]a transformer of {count / 1e6:.0f} million parameters[/bold]: weights, gradients and"
        f" Adam's states take {format_bytes(count * BYTES_OF_ADAM)} in plain PyTorch. Penstock gets"
        f" {format_bytes(args.memory)}.\n"
        f"data: {format_bytes(len(text))} of Python's sources;"
        f" built on flash in {time.perf_counter() - begun:.1f} s"
    )
    optimizer = FlashAdamW(
        model.parameters(),
        lr=1e-4,
        flash=flash,
        overlap=True,
        gradient_memory=args.memory // 8,
    )
    numbers = torch.Generator().manual_seed(1)
    with penstock.offload(
        model,
        optimizer,
        memory=args.memory,
        weights="flash",
        weights_memory=args.memory // 3,
        flash=flash,
        event_log=log,
        sample_rss=True,
    ) as session:
        for step in range(args.steps):
            begun = time.perf_counter()
            starts = torch.randint(0, len(text) - LENGTH, (2,), generator=numbers).tolist()
            ids = torch.stack([text[start : start + LENGTH].long() for start in starts])
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            took = time.perf_counter() - begun
            console.print(f"  step {step}: loss {loss.item():.4f}, {took:.1f} s")
        console.print()
        console.print(str(session.summary()), highlight=False, markup=False, soft_wrap=True)
    optimizer.close()
    figure = args.out / "weights.png"
    rss = MemorySeries.of(read_events(log), "rss", run="with Penstock")
    plot_memory(
        [rss],
        figure,
        budget_bytes=None,
        title=f"{count / 1e6:.0f} million parameters: plain PyTorch needs"
        f" {format_bytes(count * BYTES_OF_ADAM)}, this process had {format_bytes(rss.peak_bytes)}",
    )
    log.unlink()
    console.print(f"\nwrote {figure}")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--memory", type=lambda text: parse_bytes(text, what="--memory"), default="384MiB"
    )
    parser.add_argument("--flash", type=Path, help="where weights rest (default: --out)")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where results go")
    return parser.parse_args(argv)


def sources() -> Tensor:
    """Return some MB of Python's own sources as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


if __name__ == "__main__":
    sys.exit(main())
