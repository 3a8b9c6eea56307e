"""A convolutional network learns to read digits under Lightning (`pip install lightning scikit-learn`).

Run it without Penstock and with it, and compare the output:

    python examples/lightning_trainer.py
    penstock run --device-memory 24MiB --flash . examples/lightning_trainer.py
"""

from __future__ import annotations

import argparse
import hashlib

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    """Eight convolutions at full size."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
        for _ in range(7):
            layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        self.net = nn.Sequential(*layers, nn.AvgPool2d(8), nn.Flatten(), nn.LazyLinear(10))
        self.net(torch.zeros(2, 1, 32, 32))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        print(f"step {index}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = nn.functional.interpolate(
        torch.tensor(digits.images, dtype=torch.float32)[:, None], size=32
    )
    data = TensorDataset(images / 16, torch.tensor(digits.target))
    model = Digits()
    trainer = lightning.Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, options.batch, shuffle=True))
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("sha256 of all weights:", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
